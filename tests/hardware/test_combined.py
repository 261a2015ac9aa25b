import pytest
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs

from aimgpu.errors import UnknownDevice
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.combined import CombinedHardware
from aimgpu.hardware.simulated import SimulatedHardware


def test_devices_of_both_backends_are_numbered_through_and_calls_reach_the_right_one() -> None:
    amd, nvidia = SimulatedHardware([("MI300X", 2)]), SimulatedHardware([("H200-141", 1)])
    both = CombinedHardware([amd, nvidia])
    devices = both.read_devices()
    assert [device.index for device in devices] == [0, 1, 2]
    changed = both.apply_layout(devices[1].id, "CPX/NPS1")
    assert changed.index == 1
    assert amd.read_devices()[1].layout.name == "CPX/NPS1"
    assert {usage.device_id for usage in both.read_usage()} == {device.id for device in devices}
    assert "AIM_PARTITION_ID" in both.identify(devices[2], devices[2].layout.partitions[0]).environment
    with pytest.raises(UnknownDevice):
        both.apply_layout("nope", "CPX/NPS1")


def test_what_any_backend_finds_is_passed_on() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change(driver_loaded=False)
    both = CombinedHardware([AmdHardware(TreeSysfs(kernel)), SimulatedHardware([("H200-141", 1)])])
    assert [finding.code for finding in both.inspect()] == ["no-driver"]
