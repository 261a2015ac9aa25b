import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hardware.contract import check_every_layout, check_identity, check_reading, check_usage
from tests.hardware_nvidia.conftest import Connect
from tests.hardware_nvidia.fake_nvml import GPU_IS_LOST, NO_PERMISSION, FakeLibrary, Fault, nvml_over
from tests.hardware_nvidia.gpus import MIB, FakeGpu, FakeProcess, a100, h100, h200, l4

from aimgpu.domain import Vendor
from aimgpu.errors import HardwareUnavailable, UnknownDevice
from aimgpu.hardware.nvidia.hardware import NvidiaHardware
from aimgpu.hardware.nvidia.nvml import DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, LIBRARY_NOT_FOUND, Nvml, Presence
from aimgpu.hardware.nvidia.presence import nvidia_may_be_here

PARTS = [(a100, "A100-40", 108), (h100, "H100-80", 132), (h200, "H200-141", 132)]
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"


@pytest.mark.parametrize("gpus", [[h200()], [a100(mig_on=True)], [h100(0), l4(1), h200(2, mig_on=True)]])
def test_the_contract_of_every_backend_holds(connect: Connect, gpus: list[FakeGpu]) -> None:
    hardware = connect(FakeLibrary(gpus))
    devices = check_reading(hardware)
    check_usage(hardware, devices)
    check_identity(hardware, devices)


@pytest.mark.parametrize("make", [a100, h100, h200])
def test_every_listed_layout_can_be_had_and_is_what_was_foretold(connect: Connect, make: Callable[..., FakeGpu]) -> None:
    gpu = make(tells_placements_when_off=True)
    check_every_layout(connect(FakeLibrary([gpu])), gpu.uuid)


@pytest.mark.parametrize(("make", "part", "units"), PARTS)
def test_a_device_is_told_by_uuid_with_what_can_be_given_away(
    connect: Connect, make: Callable[..., FakeGpu], part: str, units: int
) -> None:
    gpu = make()
    (device,) = connect(FakeLibrary([gpu])).read_devices()
    assert (device.id, device.vendor, device.product, device.market_name) == (gpu.uuid, Vendor.NVIDIA, part, gpu.name)
    assert device.compute_units == units
    assert device.memory_bytes == gpu.total_bytes - gpu.reserved_bytes
    assert device.reserved_bytes == gpu.reserved_bytes
    (whole,) = device.layout.partitions
    assert (whole.kind, whole.uuid, whole.memory_bytes) == ("whole", gpu.uuid, device.memory_bytes)


def test_a_gpu_without_mig_has_one_layout(connect: Connect) -> None:
    (device,) = connect(FakeLibrary([l4()])).read_devices()
    assert [layout.name for layout in device.layouts] == ["whole"]
    assert (device.product, device.compute_units) == ("L4-24", 58)


def test_layouts_come_from_what_the_device_tells_and_not_from_a_table(connect: Connect) -> None:
    odd = h200(mig_on=True)
    odd.profiles = tuple(one for one in odd.profiles if one.slices in {2, 4})
    odd.profiles = (replace(odd.profiles[0], starts=(0, 3)), odd.profiles[1])
    (device,) = connect(FakeLibrary([odd])).read_devices()
    assert [layout.name for layout in device.layouts] == ["whole", "4g.71gb@0", "2g.35gb@0+2g.35gb@3", "mig-empty"]


def test_use_is_measured_with_the_processes_that_hold_it(connect: Connect) -> None:
    gpu = h200()
    gpu.processes = [
        FakeProcess(os.getpid(), 40 * MIB),
        FakeProcess(os.getpid(), 40 * MIB, kind="graphics"),
        FakeProcess(999_999_999, None, kind="mps"),
    ]
    (usage,) = connect(FakeLibrary([gpu])).read_usage()
    assert usage.utilization_percent == 7
    own, unnamed = usage.processes
    assert (own.pid, own.memory_bytes, own.partition_id) == (os.getpid(), 40 * MIB, f"{gpu.uuid}/whole-0")
    assert own.name == Path("/proc/self/comm").read_text().strip()
    assert (unnamed.name, unnamed.memory_bytes) == (None, None)


def test_in_mig_mode_use_and_processes_belong_to_their_instance(connect: Connect) -> None:
    gpu = h200(mig_on=True)
    small, large = gpu.make("1g.18gb", 0), gpu.make("3g.71gb", 4)
    gpu.processes = [FakeProcess(11, 100, instance=large.id), FakeProcess(12, 7, instance=small.id)]
    (usage,) = connect(FakeLibrary([gpu])).read_usage()
    assert usage.used_bytes_by_partition == {f"{gpu.uuid}/1g.18gb-0": 7, f"{gpu.uuid}/3g.71gb-4": 100}
    assert {one.pid: one.partition_id for one in usage.processes} == {
        11: f"{gpu.uuid}/3g.71gb-4",
        12: f"{gpu.uuid}/1g.18gb-0",
    }
    assert usage.utilization_percent is None


def test_an_old_driver_counts_its_reserve_as_used_and_still_lists_processes(connect: Connect) -> None:
    gpu = a100()
    gpu.processes = [FakeProcess(11, 5 * MIB)]
    hardware = connect(FakeLibrary([gpu], missing=frozenset({"nvmlDeviceGetMemoryInfo_v2", f"{PROCESSES}_v3"})))
    (device,), (usage,) = hardware.read_devices(), hardware.read_usage()
    assert (device.memory_bytes, device.reserved_bytes) == (gpu.total_bytes, None)
    assert usage.used_bytes == gpu.reserved_bytes + 5 * MIB
    assert [process.pid for process in usage.processes] == [11]
    assert [finding.code for finding in hardware.inspect()] == ["old-driver", "mig-unknown"]


def test_a_driver_that_cannot_list_processes_is_said(connect: Connect) -> None:
    hardware = connect(FakeLibrary([l4()], missing=frozenset({f"{PROCESSES}_v3", f"{PROCESSES}_v2"})))
    (finding,) = hardware.inspect()
    assert finding.code == "old-driver"
    assert "which processes run" in finding.text


@pytest.mark.parametrize(
    ("remapped", "code", "serious"),
    [
        ((5, 0, 0, 0), None, False),
        ((0, 1, 1, 0), "memory-pending", False),
        ((0, 9, 0, 1), "memory-failed", True),
        ((0, 9, 1, 1), "memory-failed", True),
        (None, None, False),
    ],
)
def test_memory_that_fails_is_said(
    connect: Connect, remapped: tuple[int, int, int, int] | None, code: str | None, *, serious: bool
) -> None:
    found = connect(FakeLibrary([l4(0), l4(1, remapped=remapped)])).inspect()
    assert [(one.code, one.subject, one.serious) for one in found] == ([(code, l4(1).uuid, serious)] if code else [])


def test_a_driver_that_fails_to_tell_of_its_memory_has_nothing_to_say(connect: Connect) -> None:
    library = FakeLibrary([l4()], faults=[Fault("nvmlDeviceGetRemappedRows", 999, times=None)])
    assert connect(library).inspect() == ()


def test_profiles_without_names_are_named_as_nvidia_names_them(connect: Connect) -> None:
    gpu = h200(mig_on=True)
    names = connect(FakeLibrary([gpu])).read_devices()[0].layouts
    old = connect(FakeLibrary([gpu], missing=frozenset({"nvmlDeviceGetGpuInstanceProfileInfoV"}))).read_devices()[0].layouts
    assert {layout.name for layout in old} == {layout.name for layout in names}


def test_a_lost_gpu_leaves_the_others_and_is_said(connect: Connect) -> None:
    hardware = connect(FakeLibrary([h100(0), h100(1, lost=True), h100(2)]))
    assert [device.index for device in hardware.read_devices()] == [0, 2]
    assert len(hardware.read_usage()) == 2
    finding = next(one for one in hardware.inspect() if one.code == "lost")
    assert finding.subject == "gpu1"
    assert finding.hint is not None
    with pytest.raises(UnknownDevice):
        hardware.apply_layout(h100(1).uuid, "whole")


def test_a_gpu_that_vanishes_between_two_questions_is_left_out(connect: Connect) -> None:
    gpus = [h100(0), h100(1)]
    library = FakeLibrary(gpus)

    def vanish(function: str) -> None:
        if function == "nvmlDeviceGetMigMode":
            gpus[0].lost = True

    library.on_call = vanish
    assert [device.id for device in connect(library).read_devices()] == [gpus[1].uuid]


def test_values_that_the_device_does_not_have_are_unknown(connect: Connect) -> None:
    (device,) = connect(FakeLibrary([l4(cores=None)])).read_devices()
    (usage,) = connect(FakeLibrary([l4(utilization=None)])).read_usage()
    assert device.compute_units is None
    assert usage.utilization_percent is None


def test_nvml_that_someone_shut_down_is_started_again(connect: Connect) -> None:
    library = FakeLibrary([h100()], faults=[Fault("nvmlDeviceGetCount_v2", 1)])
    assert len(connect(library).read_devices()) == 1
    assert library.calls.count("nvmlInitWithFlags") == 2


def test_a_machine_without_nvidia_has_no_devices_and_nothing_to_say(tmp_path: Path) -> None:
    hardware = NvidiaHardware(nvml_over(FakeLibrary([], init_code=LIBRARY_NOT_FOUND)), pci=tmp_path)
    assert hardware.read_devices() == ()
    assert hardware.read_usage() == ()
    assert hardware.inspect() == ()


def test_without_the_drivers_library_this_very_machine_reads_as_empty(tmp_path: Path) -> None:
    hardware = NvidiaHardware(Nvml(), pci=tmp_path)
    if hardware.read_devices():
        pytest.skip("this machine has an NVIDIA GPU")
    assert hardware.inspect() == ()


def test_a_machine_without_nvidia_does_not_even_load_the_library_for_it() -> None:
    if nvidia_may_be_here():
        pytest.skip("this machine has an NVIDIA GPU")
    code = (
        "import sys; from aimgpu.hardware.nvidia import NvidiaHardware as H; H().read_devices(); print('pynvml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_bus_is_not_searched_at_every_poll_where_nvidia_is_not() -> None:
    looks = iter([False, True])
    presence = Presence(lambda: next(looks), again_seconds=30.0)
    assert [presence.look(now) for now in (0.0, 1.0, 29.9)] == [False] * 3
    assert presence.look(30.0)


def test_a_device_file_alone_means_that_nvidia_may_be_here(tmp_path: Path) -> None:
    assert not nvidia_may_be_here(pci=tmp_path / "none", dev=tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert nvidia_may_be_here(pci=tmp_path / "none", dev=tmp_path)


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH])
def test_a_gpu_on_the_bus_without_a_working_driver_is_a_finding(tmp_path: Path, code: int) -> None:
    entry = tmp_path / "0000:65:00.0"
    entry.mkdir()
    (entry / "vendor").write_text("0x10de\n")
    (entry / "class").write_text("0x030200\n")
    (tmp_path / "nouveau").mkdir()
    (entry / "driver").symlink_to(tmp_path / "nouveau")
    hardware = NvidiaHardware(nvml_over(FakeLibrary([], init_code=code)), pci=tmp_path)
    assert hardware.read_devices() == ()
    (finding,) = hardware.inspect()
    assert (finding.code, finding.subject) == ("no-driver", "0000:65:00.0")
    assert "nouveau" in finding.text
    assert finding.hint is not None


def test_a_driver_that_comes_later_is_found_at_the_next_read(connect: Connect) -> None:
    library = FakeLibrary([h100()], init_code=DRIVER_NOT_LOADED)
    hardware = connect(library)
    assert hardware.read_devices() == ()
    library.init_code = 0
    assert len(hardware.read_devices()) == 1


@pytest.mark.parametrize("faults", [[], [Fault("nvmlDeviceGetGpuInstanceProfileInfoV", NO_PERMISSION, times=None)]])
def test_a_user_without_rights_still_sees_the_instances(connect: Connect, faults: list[Fault]) -> None:
    gpu = h200(mig_on=True)
    gpu.make("1g.18gb", 0)
    large = gpu.make("3g.71gb", 4)
    gpu.processes = [FakeProcess(11, 100, instance=large.id)]
    hardware = connect(FakeLibrary([gpu], privileged=False, faults=faults))
    (device,), (usage,) = hardware.read_devices(), hardware.read_usage()
    assert [partition.kind for partition in device.layout.partitions] == ["1g.18gb", "3g.71gb"]
    assert all(partition.uuid for partition in device.layout.partitions)
    assert device.memory_bytes == device.layout.memory_bytes
    assert usage.used_bytes == 100
    assert "unreadable" not in {finding.code for finding in hardware.inspect()}
    assert {partition.id for partition in device.layout.partitions} == set(usage.used_bytes_by_partition)


def test_an_instance_that_is_cut_up_or_empty_is_named_and_not_offered(connect: Connect) -> None:
    gpu = h200(mig_on=True)
    cut = gpu.make("3g.71gb", 0)
    cut.computes.clear()
    cut.add_compute(1)
    cut.add_compute(1)
    gpu.add(next(one for one in gpu.profiles if one.kind == "1g.18gb"), 4)
    gpu.make("1g.18gb", 5)
    hardware = connect(FakeLibrary([gpu]))
    (device,) = hardware.read_devices()
    assert [partition.id for partition in device.layout.partitions] == [f"{gpu.uuid}/1g.18gb-5"]
    assert "3g.71gb@0(2 compute instances)" in device.layout.name
    assert [finding.code for finding in hardware.inspect()] == ["mig-cut-up", "mig-cut-up"]


def test_a_half_used_compute_instance_does_not_count_as_the_whole(connect: Connect) -> None:
    gpu = h200(mig_on=True)
    cut = gpu.make("3g.71gb", 0)
    cut.computes.clear()
    cut.add_compute(2)
    (device,) = connect(FakeLibrary([gpu])).read_devices()
    assert device.layout.partitions == ()


def test_a_workload_is_given_its_uuid_and_the_nodes_of_its_gpu(connect: Connect) -> None:
    gpu = h100(3)
    hardware = connect(FakeLibrary([h100(0), h100(1), h100(2), gpu]))
    device = hardware.read_devices()[3]
    identity = hardware.identify(device, device.layout.partitions[0])
    assert identity.environment["CUDA_VISIBLE_DEVICES"] == gpu.uuid
    assert identity.device_nodes[0] == "/dev/nvidia3"
    assert "/dev/nvidiactl" in identity.device_nodes


def test_a_workload_in_an_instance_is_given_its_capability_files(tmp_path: Path) -> None:
    gpu = h200(mig_on=True)
    instance = gpu.make("1g.18gb", 0)
    folder = tmp_path / "driver/nvidia/capabilities/gpu0/mig" / f"gi{instance.id}"
    (folder / "ci0").mkdir(parents=True)
    (folder / "access").write_text("DeviceFileMinor: 12\nDeviceFileMode: 292\n")
    (folder / "ci0/access").write_text("DeviceFileMinor: 13\nDeviceFileMode: 292\n")
    hardware = NvidiaHardware(nvml_over(FakeLibrary([gpu])), proc=tmp_path)
    (device,) = hardware.read_devices()
    identity = hardware.identify(device, device.layout.partitions[0])
    assert identity.environment["CUDA_VISIBLE_DEVICES"].startswith("MIG-")
    assert identity.device_nodes[-2:] == ("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13")


def test_a_partition_that_is_only_planned_cannot_be_opened(connect: Connect) -> None:
    hardware = connect(FakeLibrary([h200(mig_on=True)]))
    (device,) = hardware.read_devices()
    planned = next(layout for layout in device.layouts if layout.name == "7g.141gb@0").partitions[0]
    with pytest.raises(HardwareUnavailable):
        hardware.identify(device, planned)


def test_a_lost_gpu_cannot_be_opened(connect: Connect) -> None:
    gpu = h100()
    hardware = connect(FakeLibrary([gpu], faults=[Fault("nvmlDeviceGetHandleByUUID", GPU_IS_LOST)]))
    (device,) = hardware.read_devices()
    with pytest.raises(HardwareUnavailable):
        hardware.identify(device, device.layout.partitions[0])
