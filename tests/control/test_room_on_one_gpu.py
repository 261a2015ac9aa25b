"""Making room on the only GPU: its layout changes under a model that must move, or cannot be changed at all."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FAST, Machine, boot, check_ledger, deployment

from aimgpu.control.controller import Controller
from aimgpu.control.plan.steps import StepKind
from aimgpu.domain import Device, InstanceState, PartitionKind, Priority
from aimgpu.errors import HardwareFailed, LayoutNotApplied
from aimgpu.hardware.simulated import SimulatedHardware

GPU = "sim-mi300x-0"
PART = replace(deployment("part", 10, want=PartitionKind(kind="cpx")))


class Stubborn(SimulatedHardware):
    """Its layout cannot be changed, or is changed half-way and can only be set back."""

    def __init__(self, state: Path, *, half_way: bool) -> None:
        super().__init__([("MI300X", 1)], state)
        self.half_way = half_way
        self.asked: list[str] = []

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        self.asked.append(layout_name)
        if len(self.asked) == 1:
            if self.half_way:
                super().apply_layout(device_id, layout_name, reload_driver=reload_driver)
                raise LayoutNotApplied("the second half failed", hint="Look at the kernel log.")
            raise HardwareFailed("the driver does not answer", hint="Reboot.")
        return super().apply_layout(device_id, layout_name, reload_driver=reload_driver)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


def states(controller: Controller) -> dict[str, InstanceState]:
    return {instance.deployment: instance.state for instance in controller.instances()}


def test_a_model_that_moves_is_stopped_before_the_layout_changes_and_runs_once_afterwards(
    machine: Machine, controller: Controller
) -> None:
    controller.apply([deployment("a", 10)])
    (before,) = controller.instances()
    seen: list[set[str]] = []
    real = machine.hardware.apply_layout

    def apply_layout(device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        seen.append(set(machine.live()))
        return real(device_id, layout_name, reload_driver=reload_driver)

    machine.hardware.apply_layout = apply_layout  # type: ignore[method-assign]
    outcome = controller.apply([PART], make_room=True)
    kinds = [(step.kind, step.deployment) for step in outcome.plan.steps]
    assert kinds == [
        (StepKind.RELEASE, "a"),
        (StepKind.LAYOUT, ""),
        (StepKind.DEPLOY, "a"),
        (StepKind.DEPLOY, "part"),
    ]
    assert seen == [set()], "nothing ran on the GPU while its layout changed"
    assert states(controller) == {"a": InstanceState.READY, "part": InstanceState.READY}
    assert before.id not in machine.live()
    assert all("cpx" in grant.partition_id for one in controller.instances() for grant in one.grants)
    assert controller._dependencies.ledger.operations() == ()
    check_ledger(machine, controller, names=["a", "part"])


@pytest.mark.parametrize("half_way", [False, True])
def test_a_layout_that_cannot_be_changed_leaves_everything_as_it_was(tmp_path: Path, *, half_way: bool) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    machine.hardware = Stubborn(tmp_path / "simulated.json", half_way=half_way)
    controller = boot(machine)
    controller.apply([deployment("a", 10)])
    with pytest.raises((HardwareFailed, LayoutNotApplied)):
        controller.apply([PART], make_room=True)
    assert controller.devices()[0].layout.name == "SPX/NPS1"
    assert states(controller) == {"a": InstanceState.READY}, "what was stopped for it runs again"
    assert controller._dependencies.ledger.operations() == ()
    check_ledger(machine, controller, names=["a"])
    controller.close()
    again = boot(machine)
    again.reconcile()
    check_ledger(machine, again, names=["a"])
    assert states(again) == {"a": InstanceState.READY}, "the next start does not bring up what was refused"
    again.close()


def test_a_preempted_model_runs_again_where_the_room_made_for_another_fails(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    machine.hardware = Stubborn(tmp_path / "simulated.json", half_way=False)
    controller = boot(machine, timing=replace(FAST, drain_seconds=0.0))
    low = deployment("low", 150)
    controller.apply([replace(low, ask=replace(low.ask, priority=Priority.LOW))])
    urgent = replace(PART, name="urgent", ask=replace(PART.ask, name="urgent", priority=Priority.HIGH))
    with pytest.raises(HardwareFailed):
        controller.apply([urgent], make_room=True)
    assert states(controller) == {"low": InstanceState.READY}
    check_ledger(machine, controller, names=["low"])
    controller.close()
