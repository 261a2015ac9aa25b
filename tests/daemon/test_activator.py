"""Who is worth keeping: what the gateway saw of each model, as the choice of whom to unload reads it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import FAST, Machine, boot, deployment
from tests.daemon.running import wait_for

from aimgpu.control.controller import Controller
from aimgpu.control.events import ignore
from aimgpu.control.plan.eviction import Resident, eviction_cost
from aimgpu.daemon.activator import Activator, InstanceUsage
from aimgpu.domain import InstanceState, Priority
from aimgpu.gateway.routes import Arrival
from aimgpu.gateway.slo_monitor import ModelActivity
from aimgpu.gateway.wake_requests import WakeRequests


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = boot(Machine(root=tmp_path, gpus=1))
    yield controller
    controller.close()


def read(activator: Activator) -> dict[str, Resident]:
    return {resident.name: resident for resident in activator.residents()}


def make(controller: Controller, activity: dict[str, ModelActivity] | None = None, **fields: Any) -> Activator:
    return Activator(controller, WakeRequests(), lambda: activity or {}, ignore, **fields)


def test_a_model_that_breaks_its_promise_is_dearer_to_unload(controller: Controller) -> None:
    controller.apply([deployment(name, 10, keep_seconds=60) for name in ("late", "quick", "unused")])
    clock = Clock()
    seen = {name: ModelActivity(last_request=1050.0, expected_seconds=90.0) for name in ("late", "quick")}
    seen["late"] = replace(seen["late"], overspending=True)
    activator = make(controller, seen, now=clock)
    read(activator)
    clock.now = 1060.0
    found = read(activator)
    assert {name: resident.at_risk for name, resident in found.items()} == {"late": True, "quick": False, "unused": False}
    assert {name: resident.idle_seconds for name, resident in found.items()} == {"late": 10.0, "quick": 10.0, "unused": 60.0}
    late, quick = (replace(found[name], wake_seconds=1.0) for name in ("late", "quick"))  # whatever was measured here
    assert eviction_cost(late) > eviction_cost(quick)
    activator.close()


def test_a_wake_is_expected_to_take_what_it_took_less_what_has_passed(controller: Controller) -> None:
    controller.apply([deployment("chat", 10, keep_seconds=60, engine="sleeper")])
    activator = make(controller)
    controller.sleep("chat")
    first = activator.wake("chat")
    assert first is not None
    assert first.seconds is None, "it was never seen waking"
    activator.close()
    controller.sleep("chat")
    again = make(controller)
    second = again.wake("chat")
    assert second is not None
    assert second.since is not None
    assert second.seconds_left(second.since) is not None, "the ledger remembers how long it took"
    again.close()
    assert again.wake("chat") is None, "nothing is woken by one that is ending"


def state_of(controller: Controller, name: str) -> InstanceState | None:
    return next((instance.state for instance in controller.instances() if instance.deployment == name), None)


def test_who_is_due_is_woken_ahead_once_and_only_into_free_room(controller: Controller) -> None:
    controller.apply([deployment("regular", 100, keep_seconds=60), deployment("large", 150, keep_seconds=60)])
    controller.sleep("regular")
    clock = Clock()
    activity = {"regular": ModelActivity(last_request=400.0, expected_seconds=5.0)}
    activator = make(controller, activity, now=clock)
    controller.wake("large")
    assert state_of(controller, "large") is InstanceState.READY
    activator.tick()
    activator.close()  # returns when what it began has ended
    assert state_of(controller, "regular") is InstanceState.SLEEPING, "idle as the other is, it keeps its room"
    assert state_of(controller, "large") is InstanceState.READY
    said = activator.explain()
    assert said["regular"].startswith("asleep and stopped: next request expected in 5.0 s, awake in ")
    assert said["large"].startswith("awake: idle for 0.0 s, no pattern of requests known yet, awake again in ")
    controller.sleep("large")
    again = make(controller, activity, now=clock)
    again.tick()
    wait_for(lambda: state_of(controller, "regular") is InstanceState.READY, "it is up before its request comes")
    controller.sleep("regular")
    again.tick()
    again.close()
    assert state_of(controller, "regular") is InstanceState.SLEEPING, "no request came, so not a second time"


def test_what_callers_wait_for_is_woken(controller: Controller) -> None:
    controller.apply([deployment("chat", 10, keep_seconds=60)])
    controller.sleep("chat")
    wanted = WakeRequests()
    activator = Activator(controller, wanted, dict, ignore)
    activator.start()
    wanted.want("chat", Priority.MEDIUM, 0.0)
    wait_for(lambda: state_of(controller, "chat") is InstanceState.READY, "it is up")
    activator.close()


def test_a_wake_that_cannot_be_done_is_tried_again_after_growing_pauses_and_its_reason_is_known(
    controller: Controller,
) -> None:
    """A model that is kept always holds the GPU, so there is no room for the other, and none will come."""
    controller.apply([deployment("chat", 150, keep_seconds=60)])
    controller.sleep("chat")
    controller.apply([deployment("always", 150)])
    clock = Clock()
    wanted = WakeRequests()
    wanted.want("chat", Priority.HIGH, 0.0)
    activator = Activator(controller, wanted, dict, ignore, clock)
    pauses = []
    for _ in range(4):
        activator.serve_requests()
        arrival = wait_for(lambda: _blocked(controller, activator), "the attempt failed")
        assert arrival.retry_at is not None
        assert "150" in (arrival.problem or "")
        pauses.append(arrival.retry_at - clock.now)
        activator.serve_requests()
        assert _blocked(controller, activator) == arrival, "not before its time"
        clock.now = arrival.retry_at
    assert pauses == sorted(pauses)
    assert pauses[-1] > 2 * pauses[0]
    activator.close()


def test_room_may_come_only_from_models_without_which_it_would_fit(controller: Controller) -> None:
    controller.apply([deployment("chat", 150, keep_seconds=60)])
    controller.sleep("chat")
    controller.apply([deployment("always", 60), deployment("busy", 100, keep_seconds=60)])
    wanted = WakeRequests()
    wanted.want("chat", Priority.MEDIUM, 0.0)
    activator = Activator(controller, wanted, dict, ignore, usage=InstanceUsage(in_flight=lambda _: 1))
    activator.serve_requests()
    full = wait_for(lambda: _blocked(controller, activator), "it was tried")
    assert not full.room_may_come, "always and chat do not fit together"
    assert "held by busy 100GiB on sim-mi300x-0 (1 in flight), always 60GiB on sim-mi300x-0 (kept loaded)" in str(full.problem)
    assert list(activator.waiting_for_room()) == ["chat"]
    controller.release(["always"])

    def tried_again() -> bool:
        activator.serve_requests()
        found = _blocked(controller, activator)
        return found is not None and found.room_may_come

    wait_for(tried_again, "it fits once busy has fallen idle")
    activator.close()


def _blocked(controller: Controller, activator: Activator) -> Arrival | None:
    item = next(item for item in controller.deployments() if item.name == "chat")
    arrival = activator.find_arrival(item, [one for one in controller.instances() if one.deployment == "chat"])
    return arrival if arrival is not None and arrival.retry_at is not None else None


def test_a_wake_for_which_there_is_room_does_not_wait_behind_those_that_wait_for_room(controller: Controller) -> None:
    controller.apply([deployment("big", 150, keep_seconds=60)])
    controller.sleep("big")
    controller.apply([deployment("small", 10, keep_seconds=60)])
    controller.sleep("small")
    controller.apply([deployment("always", 150)])
    wanted = WakeRequests()
    wanted.want("big", Priority.HIGH, 0.0)
    wanted.want("small", Priority.LOW, 1.0)
    activator = Activator(controller, wanted, dict, ignore)
    activator.start()
    wait_for(lambda: state_of(controller, "small") is InstanceState.READY, "the small one is up")
    assert state_of(controller, "big") is InstanceState.SLEEPING
    activator.close()


def states_of(controller: Controller, name: str) -> list[str]:
    return sorted(one.state.value for one in controller.instances() if one.deployment == name)


def test_a_pair_of_which_one_found_no_room_is_made_whole_when_there_is_room(tmp_path: Path) -> None:
    controller = boot(Machine(root=tmp_path / "two", gpus=2))
    try:
        controller.apply([deployment("pair", 150, keep_seconds=60, replicas=2)])
        controller.sleep("pair")
        controller.apply([deployment("always", 150)])
        activator = make(controller)
        activator.wake("pair")
        wait_for(lambda: states_of(controller, "pair") == ["ready", "sleeping"], "as many as fit are up")
        controller.release(["always"])

        def made_whole() -> bool:
            controller.supervise()
            return states_of(controller, "pair") == ["ready", "ready"]

        wait_for(made_whole, "the other is up too")
        activator.close()
    finally:
        controller.close()


def test_a_model_that_dies_again_long_after_it_came_back_has_a_new_problem(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine, timing=replace(FAST, restart_delay_seconds=1000.0, restart_longest_seconds=1000.0))
    chat = deployment("chat", 10)
    controller.apply([chat])
    clock = Clock()
    activator = make(controller, now=clock)

    def die() -> Arrival:
        for process in machine.processes:
            process.alive = False
        controller.supervise()
        arrival = activator.find_arrival(chat, controller.instances())
        assert arrival is not None
        return arrival

    def start_again() -> None:
        (retry,) = controller.waiting()
        controller._dependencies.ledger.keep_retry(replace(retry, retry_at_ms=0))
        controller.supervise(wait=True)

    assert die().problem_since == 1000.0
    clock.now = 1005.0
    machine.behaviours["chat"] = "dies"
    start_again()
    arrival = activator.find_arrival(chat, controller.instances())
    assert arrival is not None
    assert arrival.problem_since == 1000.0  # it did not come back
    machine.behaviours["chat"] = "ready"
    start_again()
    clock.now = 2000.0
    assert die().problem_since == 2000.0
    activator.close()
    controller.close()
