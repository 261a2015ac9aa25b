"""What dies together is planned together: one look at the machine, one transaction; one that does not fit stops no other."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.control.side_threads import in_thread, wait_for
from tests.control.world import Machine, check_ledger, deployment

from aimgpu.control.apply import Applier, CommittedPlan
from aimgpu.control.controller import Controller
from aimgpu.control.plan.steps import Plan
from aimgpu.domain import DeviceUsage, InstanceState
from aimgpu.errors import LedgerFull
from aimgpu.placement import Snapshot

NAMES = [f"m{number}" for number in range(12)]
BOUND_SECONDS = 60.0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


def kill_all(machine: Machine, controller: Controller) -> None:
    for process in machine.processes:
        process.alive = False
    controller.supervise()


def restart_together(controller: Controller, count: int, meanwhile: Callable[[], object] = lambda: None) -> None:
    """The loop is held up until so many wait for it; `meanwhile` is called then."""
    restarting = threading.Thread(target=controller.supervise, kwargs={"wait": True})
    loop, held, go_on = controller._loop, threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(BOUND_SECONDS)

    holding = in_thread(lambda: loop.decide(hold))
    assert held.wait(BOUND_SECONDS)
    restarting.start()
    wait_for(lambda: len(loop._posted) >= count)
    meanwhile()
    go_on.set()
    for thread in (holding, restarting):
        thread.join(BOUND_SECONDS)
        assert not thread.is_alive()


def ready(controller: Controller) -> list[str]:
    return [one.deployment for one in controller.instances() if one.state is InstanceState.READY]


def test_all_that_died_come_back_by_one_look_at_the_machine(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.apply([deployment(name, replicas=2) if name == "m3" else deployment(name) for name in NAMES])
    kill_all(machine, controller)
    read_usage, looks = machine.hardware.read_usage, itertools.count()

    def look() -> tuple[DeviceUsage, ...]:
        next(looks)
        return read_usage()

    monkeypatch.setattr(machine.hardware, "read_usage", look)
    restart_together(controller, len(NAMES))
    assert next(looks) == 1
    assert sorted(ready(controller)) == sorted([*NAMES, "m3"])
    check_ledger(machine, controller, names=[*NAMES, "m3"])
    assert controller._dependencies.ledger.operations() == ()


def test_where_one_cannot_be_charged_with_the_others_each_is_placed_alone(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.apply([deployment(name) for name in NAMES[:3]])
    kill_all(machine, controller)
    commit, commits = Applier.commit, itertools.count(1)

    def fail_once(self: Applier, plan: Plan, snapshot: Snapshot) -> CommittedPlan:
        if next(commits) == 2:
            raise LedgerFull("the ledger cannot be written")
        return commit(self, plan, snapshot)

    monkeypatch.setattr(Applier, "commit", fail_once)
    restart_together(controller, 3)
    assert sorted(ready(controller)) == NAMES[:3]
    assert not controller.is_busy
    check_ledger(machine, controller, names=NAMES[:3])


def test_one_that_no_longer_fits_does_not_stop_the_others(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment(name, 60) for name in NAMES[:3]])
    kill_all(machine, controller)
    controller.apply([deployment("new", 60)])
    restart_together(controller, 3)
    assert len(ready(controller)) == 3
    (waiting,) = controller.waiting()
    assert waiting.deployment in NAMES[:3]
    check_ledger(machine, controller)


def test_one_that_dies_again_is_counted_alone(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment(name) for name in NAMES])
    machine.behaviours["m5"] = "dies"
    kill_all(machine, controller)
    restart_together(controller, len(NAMES))
    assert [item.deployment for item in controller.waiting()] == ["m5"]
    assert sorted(ready(controller)) == sorted(set(NAMES) - {"m5"})
    check_ledger(machine, controller)


def test_one_that_is_released_while_all_wait_is_left_out(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment(name) for name in NAMES])
    kill_all(machine, controller)
    restart_together(controller, len(NAMES), lambda: controller._dependencies.ledger.unwant("m0"))
    assert sorted(ready(controller)) == sorted(set(NAMES) - {"m0"})
    controller.supervise(wait=True)
    check_ledger(machine, controller, names=NAMES[1:])
