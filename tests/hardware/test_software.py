"""The software GPU behind the hardware protocol: layouts of its product, usage from the driver's meter, named everywhere."""

import os
from pathlib import Path

import pytest
from tests.hardware import contract

from aimgpu.domain import Level
from aimgpu.errors import InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.hardware.software import SoftwareHardware
from aimgpu.isolation.boundaries import HardwareBoundary
from aimgpu.isolation.interposer import Interposer
from aimgpu.units import MIB


@pytest.fixture
def hardware(tmp_path: Path) -> SoftwareHardware:
    return SoftwareHardware([("MI300X", 2)], tmp_path / "gpus.json", lambda: tmp_path / "libraries")


def test_it_is_named_in_its_id_and_its_name(hardware: SoftwareHardware) -> None:
    first, second = hardware.read_devices()
    assert (first.id, second.id) == ("software-gpu-mi300x-0", "software-gpu-mi300x-1")
    assert first.software
    assert first.simulated
    assert first.kind_note == " (software GPU)"
    (plain,) = SimulatedHardware([("MI300X", 1)]).read_devices()
    assert not plain.software
    assert plain.kind_note == " (simulated)"


def test_every_partition_is_a_device_of_the_driver_with_its_size(hardware: SoftwareHardware) -> None:
    second = hardware.read_devices()[1]
    changed = hardware.apply_layout(second.id, "CPX/NPS1")
    assert changed.software
    sizes = list(hardware.gpu.state.bytes_of)
    assert sizes[0] == hardware.read_devices()[0].layout.partitions[0].memory_bytes
    assert sizes[1:8] == [1] * 7  # no partition: nothing fits
    assert sizes[8:16] == [partition.memory_bytes for partition in changed.layout.partitions]
    shown = hardware.identify(changed, changed.layout.partitions[3]).environment
    assert shown["HIP_VISIBLE_DEVICES"] == shown["CUDA_VISIBLE_DEVICES"] == "11"
    assert shown["AIMGPU_SOFTWARE_GPU"] == str(hardware.gpu.path)
    assert shown["LD_LIBRARY_PATH"].split(":")[0].endswith("libraries")


def test_usage_is_what_the_driver_counted_for_live_processes(hardware: SoftwareHardware) -> None:
    device = hardware.read_devices()[1]
    hardware.gpu.state.processes[4].pid = os.getpid()
    hardware.gpu.state.processes[4].used_on[8] = 5 * MIB
    hardware.gpu.state.processes[5].pid = 1
    hardware.gpu.state.processes[5].locked = 1  # and nobody holds the lock: it died
    hardware.gpu.state.processes[5].used_on[8] = 7 * MIB
    first, second = hardware.read_usage()
    assert first.used_bytes == 0
    assert second.used_bytes == 5 * MIB == second.used_bytes_by_partition[device.layout.partitions[0].id]
    assert [(one.pid, one.memory_bytes) for one in second.processes] == [(os.getpid(), 5 * MIB)]


def test_the_interposer_enforces_there_and_nowhere_that_has_no_driver(hardware: SoftwareHardware, tmp_path: Path) -> None:
    """So the level is `runtime` where something is enforced, and `none` where nothing is."""
    interposer = Interposer(tmp_path / "regions", why_not=lambda: None)
    device = hardware.read_devices()[0]
    (plain,) = SimulatedHardware([("MI300X", 1)]).read_devices()
    assert interposer.offer(device, device.layout.partitions[0], exclusive=False).level is Level.RUNTIME
    assert interposer.offer(plain, plain.layout.partitions[0], exclusive=False).level is None
    assert HardwareBoundary().offer(device, device.layout.partitions[0], exclusive=True).level is None


def test_more_gpus_than_the_driver_has_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="at most 8 software GPUs"):
        SoftwareHardware([("MI300X", 9)], tmp_path / "gpus.json", lambda: tmp_path)


@pytest.mark.parametrize("product", ["MI300X", "H200", "MI210"])
def test_contract(product: str, tmp_path: Path) -> None:
    hardware = SoftwareHardware([(product, 1)], tmp_path / "gpus.json", lambda: tmp_path)
    devices = contract.check_reading(hardware)
    contract.check_usage(hardware, devices)
    contract.check_every_layout(hardware, devices[0].id)
    contract.check_identity(hardware, hardware.read_devices())
