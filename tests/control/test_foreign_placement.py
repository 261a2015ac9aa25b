"""What somebody else uses on a GPU is never given away: from the vendor's own answers to the Grants in the books."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.world import Machine, boot, deployment
from tests.examples import examples
from tests.hardware.emulation.kernel import EmulatedKernel, KernelReloader, TreeSysfs
from tests.hardware_nvidia.fake_nvml import FakeLibrary, nvml_over
from tests.hardware_nvidia.gpus import FakeProcess, h200

from aimgpu.control.controller import Controller
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.nvidia.hardware import NvidiaHardware
from aimgpu.units import GIB

STRANGER = 3_999_999  # a pid that this machine gives to nobody


@contextmanager
def controlled(root: Path, hardware: Any) -> Iterator[Controller]:
    machine = Machine(root=root)
    machine.hardware = hardware
    controller = boot(machine)
    yield controller
    controller.close()


def granted(controller: Controller) -> dict[str, int]:
    found: dict[str, int] = {}
    for grant in controller._dependencies.ledger.grants():
        found[grant.partition_id] = found.get(grant.partition_id, 0) + grant.memory_bytes
    return found


@pytest.mark.parametrize("kind", ["compute", "graphics", "of another container"])
def test_an_nvidia_gpu_in_use_keeps_what_is_used(tmp_path: Path, kind: str) -> None:
    gpu = h200()
    gpu.processes = [FakeProcess(STRANGER, 100 * GIB, kind)]
    with controlled(tmp_path, NvidiaHardware(nvml_over(FakeLibrary([gpu])), pci=tmp_path)) as controller:
        assert controller.apply([deployment("large", 60)]).plan.refusals
        assert not controller.apply([deployment("small", 30)]).plan.refusals
        assert controller.apply([deployment("more", 15)]).plan.refusals
        assert list(granted(controller).values()) == [30 * GIB]


def test_in_mig_mode_only_the_instance_in_use_is_full(tmp_path: Path) -> None:
    gpu = h200(mig_on=True)
    instance = gpu.make("3g.71gb", 0)
    gpu.make("3g.71gb", 4)
    gpu.processes = [FakeProcess(STRANGER, 50 * GIB, instance=instance.id)]
    with controlled(tmp_path, NvidiaHardware(nvml_over(FakeLibrary([gpu])), pci=tmp_path)) as controller:
        for number in range(3):
            controller.apply([deployment(f"model-{number}", 30)])
        assert granted(controller) == {f"{gpu.uuid}/3g.71gb-4": 60 * GIB}


@settings(max_examples=examples(25))
@given(
    layout=st.sampled_from(["SPX", "DPX", "CPX"]),
    seen=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 23)), max_size=4),
    unseen=st.integers(2, 120),
    asks=st.lists(st.integers(1, 60), min_size=1, max_size=5),
)
def test_on_an_amd_gpu_grants_and_strangers_fit_together(
    tmp_path_factory: pytest.TempPathFactory, layout: str, seen: list[tuple[int, int]], unseen: int, asks: list[int]
) -> None:
    """`seen`: processes with GiB on a partition; `unseen`: GiB in use that no process here explains."""
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode=layout)
    count = len(kernel.machine.gpus[0].partition_bytes)
    for number, (index, size) in enumerate(seen):
        kernel.add_process(STRANGER + number, {(0, index % count): size * GIB})
    kernel.change_gpu(0, used_bytes=(sum(size for _, size in seen) + unseen) * GIB)
    hardware = AmdHardware(TreeSysfs(kernel), reloader=KernelReloader(kernel))
    with controlled(tmp_path_factory.mktemp("box"), hardware) as controller:
        for number, size in enumerate(asks):
            controller.apply([deployment(f"model-{number}", size)])
        ours = granted(controller)
        (device,) = controller.devices()
        for part in device.layout.partitions:
            theirs = sum(size for index, size in seen if index % count == part.index) * GIB
            if ours.get(part.id):
                assert ours[part.id] + theirs + unseen * GIB <= part.memory_bytes
