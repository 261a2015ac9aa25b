"""Shares that change while models run: books and limits agree, whatever is refused and wherever the controller dies."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import Crashed, Machine, boot, deployment, memory, restart

from aimgpu.control.controller import Controller
from aimgpu.domain import Device, Grant, InstanceState, Whole
from aimgpu.errors import Conflict, InvalidInput, NotAllowed, RegionUnusable, ShareInUse, UnknownDeployment
from aimgpu.isolation import layout, processes
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.interposer import Interposer
from aimgpu.units import GIB


class RealDevices:
    """The simulated GPUs, said to be real: the mechanisms for those are offered."""

    def __init__(self, hardware: Any) -> None:
        self._hardware = hardware

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hardware, name)

    def read_devices(self) -> tuple[Device, ...]:
        return tuple(replace(device, simulated=False) for device in self._hardware.read_devices())


class CrashingInterposer(Interposer):
    """The controller may die before or after it changed a cap."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.root / "regions", find_library=lambda: Path("/lib.so"), why_not=lambda: None)
        self._machine = machine

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        self._machine.tick()
        super().resize(grant, memory_bytes)
        self._machine.tick()


def boot_held(machine: Machine) -> tuple[Controller, Interposer]:
    interposer = CrashingInterposer(machine)
    parts = replace(
        boot(machine)._dependencies,
        hardware=RealDevices(machine.hardware),
        isolator=MechanismChooser([HardwareBoundary(), interposer, EngineFlags()]),
    )
    return Controller(parts), interposer


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


@pytest.fixture
def held(machine: Machine) -> Iterator[tuple[Controller, Interposer]]:
    controller, interposer = boot_held(machine)
    controller.apply([deployment("chat", want=memory(10)), deployment("code", want=memory(20))])
    yield controller, interposer
    controller.close()


def grant_of(controller: Controller, name: str) -> Grant:
    (found,) = [grant for grant in controller._dependencies.ledger.grants() if grant.deployment == name]
    return found


def cap_of(interposer: Interposer, grant: Grant) -> int:
    return interposer.read_tenants(grant.partition_id)[grant.instance_id].cap_bytes


def use(interposer: Interposer, grant: Grant, used_bytes: int) -> None:
    """As if a process of the tenant (this one) held so much."""
    region = interposer.find_region(grant.partition_id)
    assert region is not None
    index = [tenant.name.decode() for tenant in region._layout.tenants].index(grant.instance_id)
    slot = region._layout.tenants[index].processes[0]
    own = processes.read_names(os.getpid())[0]
    slot.pid, slot.start_ticks = own
    slot.pid_namespace, slot.used_bytes, slot.state = processes.own_pid_namespace(), used_bytes, layout.ACTIVE


def test_what_makes_a_grant_true_is_kept_with_it(machine: Machine, held: tuple[Controller, Interposer]) -> None:
    controller, _ = held
    assert {grant.mechanism for grant in controller._dependencies.ledger.grants()} == {"interposer"}
    again, _ = boot_held(machine)
    assert {grant.mechanism for one in again.instances() for grant in one.grants} == {"interposer"}
    again.close()


@pytest.mark.parametrize("size", [5, 10, 40])
def test_books_and_cap_change_together(held: tuple[Controller, Interposer], size: int) -> None:
    controller, interposer = held
    grant = grant_of(controller, "chat")
    use(interposer, grant, 5 * GIB)
    plan = controller.resize("chat", size * GIB, dry_run=True)
    assert cap_of(interposer, grant) == grant_of(controller, "chat").memory_bytes == 10 * GIB
    assert controller.resize("chat", size * GIB).to_json() == plan.to_json()
    assert cap_of(interposer, grant) == grant_of(controller, "chat").memory_bytes == size * GIB
    (change,) = plan.changes
    assert (change.before_bytes, change.after_bytes, change.used_bytes) == (10 * GIB, size * GIB, 5 * GIB)


def test_less_than_is_in_use_is_refused_with_the_figures(held: tuple[Controller, Interposer]) -> None:
    controller, interposer = held
    grant = grant_of(controller, "chat")
    use(interposer, grant, 6 * GIB)
    with pytest.raises(ShareInUse, match=r"uses 6GiB of its 10GiB .* cannot fall to 5GiB"):
        controller.resize("chat", 5 * GIB)
    assert cap_of(interposer, grant) == grant_of(controller, "chat").memory_bytes == 10 * GIB


def test_more_than_is_free_is_refused_with_the_figures(held: tuple[Controller, Interposer]) -> None:
    controller, interposer = held
    size = controller.devices()[0].memory_bytes
    with pytest.raises(Conflict, match=r"has 171.9GiB for .*, its own 10GiB included; 172.9GiB were asked for"):
        controller.resize("chat", size - 20 * GIB + GIB)
    controller.resize("chat", size - 20 * GIB)
    assert sum(grant.memory_bytes for grant in controller._dependencies.ledger.grants()) == size
    assert cap_of(interposer, grant_of(controller, "chat")) == size - 20 * GIB


def test_what_cannot_be_resized_says_why(machine: Machine, held: tuple[Controller, Interposer]) -> None:
    controller, _ = held
    with pytest.raises(UnknownDeployment):
        controller.resize("nobody", GIB)
    with pytest.raises(InvalidInput):
        controller.resize("chat", 0)
    controller.release(["chat", "code"])
    controller.apply([deployment("alone", want=Whole(count=1))])
    with pytest.raises(NotAllowed, match="has the partition for itself"):
        controller.resize("alone", GIB)
    controller.release(["alone"])
    flagged = Controller(replace(controller._dependencies, isolator=MechanismChooser()))
    flagged.apply([deployment("flagged")])
    with pytest.raises(NotAllowed, match="held by engine flag"):
        flagged.resize("flagged", GIB)


def test_one_that_is_being_started_or_stopped_is_left_alone(held: tuple[Controller, Interposer]) -> None:
    controller, _ = held
    instance = next(one for one in controller.instances() if one.deployment == "chat")
    with controller._lifecycle.holding_all([instance]), pytest.raises(Conflict, match="being started, put to sleep or stopped"):
        controller.resize("chat", 12 * GIB)
    controller._dependencies.ledger.update(replace(instance, state=InstanceState.LOADING))
    with pytest.raises(Conflict, match="is not ready"):
        controller.resize("chat", 12 * GIB)


def test_a_limit_that_cannot_be_raised_leaves_the_books_as_they_were(
    held: tuple[Controller, Interposer], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, interposer = held

    def fail(_grant: Grant, _memory_bytes: int) -> None:
        raise RegionUnusable("scribbled on")

    monkeypatch.setattr(interposer, "resize", fail)
    with pytest.raises(RegionUnusable):
        controller.resize("chat", 12 * GIB)
    assert grant_of(controller, "chat").memory_bytes == 10 * GIB


@pytest.mark.parametrize("size", [15, 40])
def test_a_restart_has_the_new_share(machine: Machine, held: tuple[Controller, Interposer], size: int) -> None:
    controller, interposer = held
    controller.resize("chat", size * GIB)
    before = grant_of(controller, "chat")
    for process in machine.processes:
        process.alive = False
    assert set(controller.supervise()) == {"chat", "code"}
    controller.supervise(wait=True)
    after = grant_of(controller, "chat")
    assert after.id != before.id
    assert after.memory_bytes == cap_of(interposer, after) == size * GIB
    assert grant_of(controller, "code").memory_bytes == 20 * GIB
    again, _ = boot_held(machine)
    again.reconcile()
    assert grant_of(again, "chat").memory_bytes == size * GIB
    again.close()


def test_a_share_that_is_too_small_to_start_with_is_what_it_takes(held: tuple[Controller, Interposer]) -> None:
    """It runs on with 5 GiB; to start, the model needs 10."""
    controller, _ = held
    controller.resize("chat", 5 * GIB)
    assert grant_of(controller, "chat").memory_bytes == 5 * GIB
    restart(controller, "chat")
    assert grant_of(controller, "chat").memory_bytes == 10 * GIB


def test_the_same_stack_again_leaves_it_and_another_entry_ends_it(held: tuple[Controller, Interposer]) -> None:
    controller, _ = held
    controller.resize("chat", 30 * GIB)
    before = grant_of(controller, "chat")
    stack = [deployment("chat", want=memory(10)), deployment("code", want=memory(20))]
    for more in (False, True):
        outcome = controller.apply(stack) if more else controller.apply(stack, make_room=True)
        assert outcome.plan.steps == ()
        assert grant_of(controller, "chat") == before
    more_copies = [deployment("chat", want=memory(10), replicas=2), stack[1]]
    controller.apply(more_copies)
    sizes = [grant.memory_bytes for grant in controller._dependencies.ledger.grants() if grant.deployment == "chat"]
    assert sizes == [30 * GIB, 30 * GIB], "a copy beside it is like it"
    controller.apply([deployment("chat", want=memory(12)), stack[1]])
    assert grant_of(controller, "chat").memory_bytes == 12 * GIB
    restart(controller, "chat")
    assert grant_of(controller, "chat").memory_bytes == 12 * GIB


def test_what_does_not_run_is_started_as_it_is_written(machine: Machine, held: tuple[Controller, Interposer]) -> None:
    """A larger share that is not free any more must not keep the model away for good."""
    controller, _ = held
    controller.resize("chat", 150 * GIB)
    controller.stop_instance(grant_of(controller, "chat").instance_id, restart=False)
    controller.apply([deployment("big", gib=100, want=memory(100))])
    controller.reconcile()
    assert [item.deployment for item in controller.waiting()] == ["chat"]
    controller.apply([deployment("chat", want=memory(10))])
    assert grant_of(controller, "chat").memory_bytes == 10 * GIB
    assert controller.waiting() == ()


def test_a_change_of_layout_is_planned_with_the_new_share(held: tuple[Controller, Interposer]) -> None:
    controller, _ = held
    assert controller.change_layout("0", "CPX", dry_run=True).does_not_fit == ()
    controller.resize("chat", 30 * GIB)  # a partition of CPX has 24
    assert [refusal.ask for refusal in controller.change_layout("0", "CPX", dry_run=True).does_not_fit] == [
        grant_of(controller, "chat").instance_id
    ]


@pytest.mark.parametrize("size", [5, 30])
@pytest.mark.parametrize("crash_in", range(6))
def test_after_a_crash_at_any_step_books_and_cap_agree(
    machine: Machine, held: tuple[Controller, Interposer], size: int, crash_in: int
) -> None:
    controller, interposer = held
    grant = grant_of(controller, "chat")
    machine.crash_in = crash_in
    with pytest.raises(Crashed):
        controller.resize("chat", size * GIB)
    machine.crash_in = None
    assert cap_of(interposer, grant) <= grant_of(controller, "chat").memory_bytes, "never more than is charged"
    again, later = boot_held(machine)
    again.reconcile()
    assert grant_of(again, "chat").id == grant.id, "it ran on"
    assert cap_of(later, grant) == grant_of(again, "chat").memory_bytes
    now = grant_of(again, "chat").memory_bytes
    assert now in (10 * GIB, size * GIB)
    kept = next(one.resized_bytes for one in again.deployments() if one.name == "chat")
    assert kept in (None, now), "nothing is kept that was not done"
    again.close()
