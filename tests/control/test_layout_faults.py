"""Changes of layout that fail half-way, cannot be undone, or meet someone who deploys at the same moment."""

import threading
from pathlib import Path

import pytest
from tests.control.world import Machine, boot, check_ledger, deployment

from aimgpu.control.controller import Controller
from aimgpu.domain import Device, InstanceState
from aimgpu.errors import HardwareFailed, LayoutNotApplied
from aimgpu.hardware.simulated import SimulatedHardware

GPU = "sim-mi300x-0"


class HalfWay(SimulatedHardware):
    """Changes the layout and then says that it failed; `refuses` to be set back, if told so."""

    def __init__(self, state: Path, *, refuses: bool = False) -> None:
        super().__init__([("MI300X", 2)], state)
        self.asked: list[tuple[str, bool]] = []
        self._refuses = refuses

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        self.asked.append((layout_name, reload_driver))
        if len(self.asked) > 1:
            if self._refuses:
                raise HardwareFailed("the driver does not answer", hint="Reboot.")
            return super().apply_layout(device_id, layout_name, reload_driver=reload_driver)
        super().apply_layout(device_id, layout_name, reload_driver=reload_driver)
        raise LayoutNotApplied("the second half failed", hint="Look at the kernel log.")


class Waiting(SimulatedHardware):
    """Takes its time, as a driver reload does."""

    def __init__(self, state: Path) -> None:
        super().__init__([("MI300X", 1)], state)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        self.entered.set()
        assert self.go_on.wait(300)
        return super().apply_layout(device_id, layout_name, reload_driver=reload_driver)


def started(machine: Machine, hardware: SimulatedHardware, controllers: list[Controller]) -> Controller:
    machine.hardware = hardware
    controllers.append(controller := boot(machine))
    return controller


@pytest.mark.parametrize(("wanted", "reload"), [("CPX/NPS1", False), ("CPX/NPS4", True)])
def test_a_change_that_failed_half_way_is_undone_with_the_same_means(
    machine: Machine, controllers: list[Controller], wanted: str, *, reload: bool
) -> None:
    hardware = HalfWay(machine.root / "simulated.json")
    controller = started(machine, hardware, controllers)
    controller.apply([deployment("chat", 10)])
    with pytest.raises(LayoutNotApplied, match="second half"):
        controller.change_layout(GPU, wanted, reload_driver=reload)
    assert hardware.asked == [(wanted, reload), ("SPX/NPS1", reload)]
    assert controller.devices()[0].layout.name == "SPX/NPS1"
    assert [instance.state for instance in controller.instances()] == [InstanceState.READY]
    check_ledger(machine, controller)


def test_gpus_of_a_hive_get_their_own_layouts_back(machine: Machine, controllers: list[Controller]) -> None:
    hardware = HalfWay(machine.root / "simulated.json")
    SimulatedHardware([("MI300X", 2)], machine.root / "simulated.json").apply_layout("sim-mi300x-1", "QPX")
    controller = started(machine, hardware, controllers)
    with pytest.raises(LayoutNotApplied, match="second half"):
        controller.change_layout(GPU, "CPX/NPS4", reload_driver=True)
    assert [device.layout.name for device in controller.devices()] == ["SPX/NPS1", "QPX/NPS1"]


def test_what_cannot_be_undone_is_said_and_models_come_back_on_what_is_there(
    machine: Machine, controllers: list[Controller]
) -> None:
    controller = started(machine, HalfWay(machine.root / "simulated.json", refuses=True), controllers)
    controller.apply([deployment("chat", 10)])
    told: list[str] = []
    with pytest.raises(LayoutNotApplied, match="second half"):
        controller.change_layout(GPU, "CPX", emit=lambda event: told.append(event.text))
    assert any("could not be set back to SPX/NPS1: the driver does not answer" in text for text in told)
    assert controller.devices()[0].layout.name == "CPX/NPS1"
    assert [instance.state for instance in controller.instances()] == [InstanceState.READY]
    assert controller._dependencies.ledger.operations() == ()
    check_ledger(machine, controller)


def test_nothing_is_placed_on_a_layout_that_is_about_to_go(machine: Machine, controllers: list[Controller]) -> None:
    hardware = Waiting(machine.root / "simulated.json")
    controller = started(machine, hardware, controllers)
    changing = threading.Thread(target=controller.change_layout, args=(GPU, "CPX"))
    deploying = threading.Thread(target=controller.apply, args=([deployment("late", 10)],))
    changing.start()
    assert hardware.entered.wait(300)
    deploying.start()
    deploying.join(0.3)  # it must not come through; a slow machine only makes this easier
    assert controller._dependencies.ledger.grants() == ()
    hardware.go_on.set()
    changing.join(300)
    deploying.join(300)
    (grant,) = controller._dependencies.ledger.grants()
    assert "/cpx-" in grant.partition_id
    check_ledger(machine, controller)


def test_a_gpu_is_not_blocked_by_a_change_that_could_not_even_be_looked_at_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    controller.apply([deployment("chat", 10)])
    read = machine.hardware.read_devices
    broken = threading.Event()

    def read_devices() -> tuple[Device, ...]:
        if broken.is_set():
            raise HardwareFailed("the driver does not answer")
        return read()

    def apply_layout(device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        broken.set()
        raise HardwareFailed(f"{device_id} does not take {layout_name}, with {reload_driver=}")

    monkeypatch.setattr(machine.hardware, "read_devices", read_devices)
    monkeypatch.setattr(machine.hardware, "apply_layout", apply_layout)
    with pytest.raises(HardwareFailed):
        controller.change_layout(GPU, "CPX/NPS1")
    broken.clear()
    assert controller._dependencies.ledger.operations() == ()
    assert not controller._reservations.layouts_change
    controller.supervise(wait=True)
    controller.apply([deployment("chat", 10), deployment("late", 10)])
    assert {one.deployment: one.state for one in controller.instances()} == dict.fromkeys(("chat", "late"), InstanceState.READY)
    check_ledger(machine, controller, names=["chat", "late"])
    controller.close()
