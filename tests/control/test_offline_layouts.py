"""Layouts by the names that people use, and changed where no daemon runs: recorded, verified, and undone where that fails."""

from dataclasses import replace

import pytest
from tests.control.faults import FailingHardware, Faults
from tests.control.world import Machine, boot, check_ledger, deployment
from tests.products import divided_products

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.offline_layout import change_layout_offline
from aimgpu.domain import Device, DeviceUsage, ForeignProcess
from aimgpu.domain.layouts import find_layout
from aimgpu.errors import DriverReloadNeeded, HardwareFailed, LayoutNotApplied, PartitionBusy, UnknownDevice, UnknownLayout
from aimgpu.hardware.simulated import SimulatedHardware

GPU = "sim-mi300x-0"
PRODUCTS = [product.name for product in divided_products()]


class OtherThanAsked(SimulatedHardware):
    """Takes every layout and keeps its own."""

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        return self.read_devices()[0]


class Used(SimulatedHardware):
    """Somebody's process is on the first GPU."""

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        stranger = ForeignProcess(pid=4242, name="training", memory_bytes=1)
        return (
            DeviceUsage(device_id=GPU, used_bytes=1, used_bytes_by_partition={}, utilization_percent=1, processes=(stranger,)),
        )


@pytest.fixture
def offline(machine: Machine, controllers: list[Controller]) -> Dependencies:
    """What a command has where no daemon runs."""
    controllers.append(controller := boot(machine))
    return controller._dependencies


def device_of(product: str) -> Device:
    return SimulatedHardware([(product, 1)]).read_devices()[0]


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_layout_is_found_by_its_name_in_any_case(product: str) -> None:
    device = device_of(product)
    for layout in device.layouts:
        assert find_layout(device, layout.name) == layout
        assert find_layout(device, f" {layout.name.lower()} ") == layout


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ["", "nonsense", "XPX", "CPX/NPS9", "9g.999gb", "+", "0"])
def test_a_layout_that_the_gpu_cannot_have_is_refused_with_those_it_can(product: str, name: str) -> None:
    device = device_of(product)
    with pytest.raises(UnknownLayout) as caught:
        find_layout(device, name)
    assert caught.value.hint
    known = [layout.name for layout in device.layouts] + [profile.kind for profile in device.profiles]
    assert any(one in caught.value.hint for one in known) or "--all" in caught.value.hint


def test_a_compute_mode_alone_keeps_the_memory_mode() -> None:
    device = device_of("MI300X")
    assert find_layout(device, "cpx").name == "CPX/NPS1"
    four = replace(device, layout=find_layout(device, "CPX/NPS4"))
    assert find_layout(four, "cpx").name == "CPX/NPS4"
    with pytest.raises(UnknownLayout, match="cannot have 'SPX' under NPS4") as caught:
        find_layout(four, "SPX")
    assert "SPX/NPS1" in (caught.value.hint or "")
    assert "driver reload" in (caught.value.hint or "")


def test_a_layout_is_changed_and_nothing_stays_open(machine: Machine, offline: Dependencies) -> None:
    change = change_layout_offline(offline, "0", "CPX", reload_driver=False)
    assert (change.before, change.after) == ("SPX/NPS1", "CPX/NPS1")
    assert offline.hardware.read_devices()[0].layout.name == "CPX/NPS1"
    assert offline.ledger.operations() == ()
    again = change_layout_offline(offline, GPU, "CPX/NPS1", reload_driver=False)
    assert again.changes_nothing


def test_what_a_daemon_left_wanted_stays_wanted_and_comes_back(machine: Machine, controllers: list[Controller]) -> None:
    first = boot(machine)
    first.apply([deployment("chat", 10)])
    first.close()
    for process in machine.processes:
        process.alive = False  # the machine was restarted
    second = boot(machine)
    change_layout_offline(second._dependencies, GPU, "CPX", reload_driver=False)
    second.close()
    controllers.append(third := boot(machine))
    third.reconcile()
    assert [one.state.value for one in third.instances()] == ["ready"]
    check_ledger(machine, third, names=["chat"])


@pytest.mark.parametrize(
    ("device", "layout", "error"),
    [
        ("9", "CPX", UnknownDevice),
        ("", "CPX", UnknownDevice),
        ("0", "nonsense", UnknownLayout),
        ("0", "CPX/NPS4", DriverReloadNeeded),
    ],
)
def test_what_is_refused_changes_and_records_nothing(
    machine: Machine, offline: Dependencies, device: str, layout: str, error: type[Exception]
) -> None:
    before = offline.hardware.read_devices()
    with pytest.raises(error):
        change_layout_offline(offline, device, layout, reload_driver=False)
    assert offline.hardware.read_devices() == before
    assert offline.ledger.operations() == ()


def test_a_process_of_somebody_else_keeps_the_layout(machine: Machine, offline: Dependencies) -> None:
    used = replace(offline, hardware=Used([("MI300X", 2)], machine.root / "simulated.json"))
    with pytest.raises(PartitionBusy, match="4242"):
        change_layout_offline(used, GPU, "CPX", reload_driver=False)
    assert change_layout_offline(used, "1", "CPX", reload_driver=False).after == "CPX/NPS1", "the other GPU is free"


def test_a_change_that_the_hardware_refuses_is_undone_and_closed(machine: Machine, offline: Dependencies) -> None:
    faults = Faults(fails_at=0, armed=True)
    failing = replace(offline, hardware=FailingHardware(2, machine.root / "simulated.json", faults))
    with pytest.raises(HardwareFailed, match="as told"):
        change_layout_offline(failing, GPU, "CPX", reload_driver=False)
    assert offline.hardware.read_devices()[0].layout.name == "SPX/NPS1"
    assert offline.ledger.operations() == ()
    assert change_layout_offline(failing, GPU, "CPX", reload_driver=False).after == "CPX/NPS1", "nothing blocks another try"


def test_a_layout_that_reads_back_otherwise_is_no_success(machine: Machine, offline: Dependencies) -> None:
    other = replace(offline, hardware=OtherThanAsked([("MI300X", 2)], machine.root / "simulated.json"))
    with pytest.raises(LayoutNotApplied, match=r"reads SPX/NPS1 after CPX/NPS1 was asked for"):
        change_layout_offline(other, GPU, "CPX", reload_driver=False)
    assert offline.ledger.operations() == ()


def test_a_memory_mode_takes_the_whole_hive_along(machine: Machine, offline: Dependencies) -> None:
    change = change_layout_offline(offline, GPU, "CPX/NPS4", reload_driver=True)
    assert change.needs_reload
    assert set(change.devices) == {GPU, "sim-mi300x-1"}
    assert {device.layout.memory_mode for device in offline.hardware.read_devices()} == {"NPS4"}
