import pytest
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs

from aimgpu.domain import Device
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


def test_the_driver_is_reloaded_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimulatedHardware([("MI300X", 1)])
    asked: list[bool] = []
    apply = backend.apply_layout

    def noting(device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        asked.append(reload_driver)
        return apply(device_id, layout_name, reload_driver=reload_driver)

    monkeypatch.setattr(backend, "apply_layout", noting)
    (device,) = backend.read_devices()
    CombinedHardware([backend]).apply_layout(device.id, "CPX/NPS1")
    CombinedHardware([backend]).apply_layout(device.id, "SPX/NPS1", reload_driver=True)
    assert asked == [False, True]
