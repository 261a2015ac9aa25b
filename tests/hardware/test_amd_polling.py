"""Polling usage reads again what may have changed, and nothing that has not."""

import os
import random
import shutil
from pathlib import Path

import pytest
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs
from tests.hardware.emulation.sysfs_tree import lay_out, pci_path, write_tree

from aimgpu.hardware.amd import AmdHardware, Sysfs

GPUS = 4


class CountingSysfs(TreeSysfs):
    """Notes which files of processes were read."""

    def __init__(self, kernel: EmulatedKernel) -> None:
        super().__init__(kernel)
        self.files: list[str] = []

    def read(self, path: str) -> str | None:
        if "/proc/" in path:
            self.files.append(path)
        return super().read(path)


@pytest.fixture
def kernel() -> EmulatedKernel:
    found = EmulatedKernel(["MI300X"] * GPUS)
    for number in range(GPUS):
        found.change_gpu(number, compute_mode="CPX")
    everywhere = {(gpu, part): 0 for gpu in range(GPUS) for part in range(8)}
    found.add_process(os.getpid(), everywhere | {(1, 3): 1 << 30})
    return found


def used(kernel: EmulatedKernel, number: int, size: int) -> None:
    kernel.tree[f"{pci_path(kernel.machine.gpus[number])}/mem_info_vram_used"] = f"{size}\n"


def held(kernel: EmulatedKernel, number: int, partition: int, size: int) -> None:
    gpu_id = kernel.machine.gpus[number].gpu_id(partition)
    kernel.tree[f"class/kfd/kfd/proc/{os.getpid()}/vram_{gpu_id}"] = f"{size}\n"


def test_a_poll_reads_the_processes_of_one_gpu_and_of_those_that_changed(kernel: EmulatedKernel) -> None:
    sysfs = CountingSysfs(kernel)
    hardware = AmdHardware(sysfs)
    first = hardware.read_usage()
    assert len(sysfs.files) == GPUS * 8
    sysfs.files.clear()
    assert hardware.read_usage() == first
    assert len(sysfs.files) == 8
    sysfs.files.clear()
    held(kernel, 0, 5, 7 << 30)  # where it had nothing: nobody with bytes there explains the change, so all are asked
    used(kernel, 0, 8 << 30)
    again = hardware.read_usage()
    assert again[0].used_bytes_by_partition[f"{again[0].device_id}/cpx-5"] == 7 << 30
    assert len(sysfs.files) == 16
    sysfs.files.clear()
    held(kernel, 0, 5, 8 << 30)  # where it has bytes: one file explains the change
    used(kernel, 0, 9 << 30)
    again = hardware.read_usage()
    assert again[0].used_bytes_by_partition[f"{again[0].device_id}/cpx-5"] == 8 << 30
    assert len(sysfs.files) == 8 + 1
    hardware.read_devices()  # reading the devices in between costs the poll nothing
    sysfs.files.clear()
    assert hardware.read_usage() == again
    assert len(sysfs.files) == 8


def test_changes_that_cancel_out_are_seen_within_one_round(kernel: EmulatedKernel) -> None:
    hardware = AmdHardware(TreeSysfs(kernel))
    hardware.read_usage()
    held(kernel, 1, 3, 0)
    held(kernel, 1, 6, 1 << 30)
    seen = [hardware.read_usage()[1].used_bytes_by_partition for _ in range(GPUS)]
    assert [size for size in seen[-1].values() if size] == [1 << 30]
    assert seen[-1][next(key for key in seen[-1] if key.endswith("cpx-6"))] == 1 << 30


def test_a_little_that_nobody_explains_is_seen_within_one_round(kernel: EmulatedKernel) -> None:
    """Page tables come and go too: for so little nobody without bytes is asked at once."""
    hardware = AmdHardware(TreeSysfs(kernel))
    before = hardware.read_usage()[2].used_bytes
    assert before is not None
    held(kernel, 2, 4, 1 << 20)
    used(kernel, 2, before + (1 << 20))
    seen = [sum(hardware.read_usage()[2].used_bytes_by_partition.values()) for _ in range(GPUS)]
    assert seen[-1] == 1 << 20


def test_many_gpus_that_change_without_a_reason_are_asked_about_in_two_polls(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"] * 8)
    kernel.add_process(os.getpid(), {(gpu, 0): 0 for gpu in range(8)})
    sysfs = CountingSysfs(kernel)
    hardware = AmdHardware(sysfs)
    hardware.read_usage()
    for number in range(8):
        held(kernel, number, 0, 1 << 30)
        used(kernel, number, 5 << 30)
    sysfs.files.clear()
    polls = [hardware.read_usage() for _ in range(2)]
    assert [usage.used_bytes for usage in polls[0]] == [5 << 30] * 8, "what a GPU uses is told at once"
    seen = [sum(process.memory_bytes == 1 << 30 for usage in poll for process in usage.processes) for poll in polls]
    assert seen == [5, 8]
    assert len(sysfs.files) <= 2 * (5 + 1)


def test_whatever_changes_the_next_round_tells_what_a_fresh_reader_tells(kernel: EmulatedKernel) -> None:
    dice = random.Random(7)
    kernel.add_process(1, {(gpu, part): 0 for gpu in range(GPUS) for part in range(8)})
    hardware = AmdHardware(TreeSysfs(kernel))
    sizes = {(pid, gpu, part): 0 for pid in (1, os.getpid()) for gpu in range(GPUS) for part in range(8)}
    for _ in range(25):
        for pid, gpu, part in dice.sample(sorted(sizes), 5):
            sizes[pid, gpu, part] = dice.choice([0, 1 << 20, 3 << 30])
            gpu_id = kernel.machine.gpus[gpu].gpu_id(part)
            kernel.tree[f"class/kfd/kfd/proc/{pid}/vram_{gpu_id}"] = f"{sizes[pid, gpu, part]}\n"
        for number in range(GPUS):
            used(kernel, number, (1 << 28) + sum(size for (_, gpu, _), size in sizes.items() if gpu == number))
        seen = [hardware.read_usage() for _ in range(GPUS)]
        assert seen[-1] == AmdHardware(TreeSysfs(kernel)).read_usage()


def test_a_process_that_begins_ends_or_takes_over_a_number_is_seen_at_once(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    write_tree(tmp_path, lay_out(kernel.machine))
    hardware = AmdHardware(Sysfs(tmp_path))
    assert hardware.read_usage()[0].processes == ()
    folder, name = tmp_path / "class/kfd/kfd/proc/4242", f"vram_{kernel.machine.gpus[0].gpu_id(0)}"
    for number in range(1, 4):
        folder.mkdir(parents=True)
        (folder / name).write_text(f"{number << 20}\n")
        (process,) = hardware.read_usage()[0].processes
        assert (process.pid, process.memory_bytes) == (4242, number << 20)
        shutil.rmtree(folder)
    assert hardware.read_usage()[0].processes == ()


def test_a_partition_that_vanishes_while_it_is_polled_is_left_out(kernel: EmulatedKernel) -> None:
    sysfs = TreeSysfs(kernel)
    hardware = AmdHardware(sysfs)
    hardware.read_usage()

    def change_in_the_middle(path: str) -> None:
        if "mem_info_vram_used" in path:
            sysfs.before_read = lambda _: None
            kernel.end_processes()
            kernel.change_gpu(0, compute_mode="SPX")

    sysfs.before_read = change_in_the_middle
    assert len(hardware.read_usage()) == GPUS
    usage = hardware.read_usage()[0]
    assert list(usage.used_bytes_by_partition) == [f"{usage.device_id}/spx-0"]


def test_a_layout_that_changes_while_devices_are_read_is_whole_at_the_next_look(kernel: EmulatedKernel) -> None:
    """At whatever read the change happens: what is told is a layout of partitions that exist, old or new, or none."""
    kernel.end_processes()
    for moment in range(0, 400, 7):
        kernel.change_gpu(0, compute_mode="CPX")
        sysfs = TreeSysfs(kernel)
        left = [moment]

        def change_at(_: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                kernel.change_gpu(0, compute_mode="DPX")

        sysfs.before_read = change_at
        hardware = AmdHardware(sysfs)
        hardware.read_devices()
        sysfs.before_read = lambda _: None
        kernel.change_gpu(0, compute_mode="DPX")
        device = hardware.read_devices()[0]
        assert (device.layout.name, len(device.layout.partitions)) == ("DPX/NPS1", 2)
        assert set(hardware.read_usage()[0].used_bytes_by_partition) == {part.id for part in device.layout.partitions}
