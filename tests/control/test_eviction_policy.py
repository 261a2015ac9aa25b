from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.world import Machine, boot, check_ledger, deployment, resident

from aimgpu.control.controller import Controller
from aimgpu.control.plan.eviction import (
    Resident,
    choose_evictions,
    due_to_sleep,
    eviction_cost,
    explain_residents,
    is_due_to_wake,
    may_be_evicted,
)
from aimgpu.control.plan.steps import StepKind
from aimgpu.domain import InstanceState, Priority

LEAST = 30.0


def test_only_idle_unpinned_settled_models_without_requests_are_due_to_sleep() -> None:
    residents = [
        resident("due"),
        resident("always", keep_seconds=None),
        resident("used-lately", idle_seconds=59.0),
        resident("busy", in_flight=1),
        resident("just-loaded", resident_seconds=1.0),
    ]
    assert due_to_sleep(residents, LEAST) == ("due",)


@pytest.mark.parametrize(
    "dearer",
    [
        {"priority": Priority.HIGH},
        {"wake_seconds": 100.0},
        {"expected_seconds": 10.0},
        {"at_risk": True},
        {"first_token_seconds": 0.5},
    ],
)
def test_priority_wake_time_traffic_and_missed_objectives_make_unloading_dearer(dearer: dict[str, object]) -> None:
    assert eviction_cost(resident("a", **dearer)) > eviction_cost(resident("b"))


def test_of_two_that_are_due_alike_the_larger_is_unloaded() -> None:
    assert eviction_cost(resident("a", freed_bytes=2)) < eviction_cost(resident("b", freed_bytes=1))


def test_what_wakes_quickly_makes_way_sooner_after_it_was_loaded() -> None:
    assert may_be_evicted(resident("a", wake_seconds=0.5, resident_seconds=6.0), LEAST)
    assert not may_be_evicted(resident("a", wake_seconds=0.5, resident_seconds=4.0), LEAST)
    assert not may_be_evicted(resident("a", wake_seconds=100.0, resident_seconds=29.0), LEAST)
    assert may_be_evicted(resident("a", wake_seconds=100.0, resident_seconds=31.0), LEAST)


def test_who_makes_room_first_is_explained() -> None:
    residents = [
        resident("busy", in_flight=2),
        resident("kept", keep_seconds=None),
        resident("often", expected_seconds=5.0),
        resident("seldom", expected_seconds=500.0, freed_bytes=2),
        resident("new", resident_seconds=0.0),
    ]
    assert explain_residents(residents, LEAST) == {
        "busy": "awake: 2 in flight",
        "kept": "awake: it is kept always",
        "often": "awake: idle for 100 s, next request expected in 5.0 s, awake again in 10.0 s; number 3 of 3 to make room",
        "seldom": "awake: idle for 100 s, next request expected in 500 s, awake again in 10.0 s; number 1 of 3 to make room",
        "new": "awake: idle for 100 s, no pattern of requests known yet, awake again in 10.0 s; number 2 of 3 to make room,"
        " but it was loaded just now",
    }


@pytest.mark.parametrize(
    ("idle_seconds", "expected_seconds", "wake_seconds", "due"),
    [
        (900.0, 20.0, 0.5, True),
        (900.0, 60.0, 0.5, False),  # it wakes quickly enough later
        (900.0, 200.0, 100.0, True),  # a slow one is begun earlier
        (60.0, 60.0, 0.5, False),  # nothing is known but the pause itself
        (1.0, 1.0, 0.5, False),
    ],
)
def test_a_sleeper_is_due_once_its_next_request_is_near_by_what_was_seen(
    idle_seconds: float, expected_seconds: float, wake_seconds: float, *, due: bool
) -> None:
    assert is_due_to_wake(idle_seconds, expected_seconds, wake_seconds) is due


@given(
    st.lists(
        st.builds(
            resident,
            st.integers(0, 10**6).map(str),
            keep_seconds=st.none() | st.just(60),
            in_flight=st.integers(0, 1),
            resident_seconds=st.sampled_from([0.0, 1000.0]),
            wake_seconds=st.floats(0.1, 100),
            priority=st.sampled_from(Priority),
        ),
        max_size=8,
        unique_by=lambda r: r.name,
    ),
    st.data(),
)
def test_victims_make_room_are_all_needed_and_never_pinned_or_busy(residents: list[Resident], data: st.DataObject) -> None:
    sizes = {r.name: data.draw(st.integers(1, 10)) for r in residents}
    need = data.draw(st.integers(0, 30))

    def fits(names: Collection[str]) -> bool:
        return sum(sizes[name] for name in names) >= need

    chosen = choose_evictions(residents, fits, LEAST)
    allowed = {r.name for r in residents if r.keep_seconds is not None and not r.in_flight and r.resident_seconds >= LEAST}
    if chosen is None:
        assert not fits(allowed)
        return
    assert set(chosen) <= allowed
    assert fits(chosen)
    assert all(not fits([other for other in chosen if other != name]) for name in chosen)


def test_a_sleeping_model_frees_its_memory_stays_wanted_and_wakes(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat", keep_seconds=60), deployment("code")])
    assert controller.sleep("chat")
    states = {instance.deployment: instance.state for instance in controller.instances()}
    assert states == {"chat": InstanceState.SLEEPING, "code": InstanceState.READY}
    check_ledger(machine, controller, names=["chat", "code"])
    assert controller.apply([deployment("chat", keep_seconds=60), deployment("code")]).plan.steps == ()
    outcome = controller.wake("chat")
    assert [instance.state for instance in outcome.instances] == [InstanceState.READY]
    check_ledger(machine, controller, names=["chat", "code"])


def test_a_model_with_requests_in_flight_is_not_put_to_sleep(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine, in_flight=lambda _: 1)
    controller.apply([deployment("chat", keep_seconds=60)])
    assert not controller.sleep("chat")
    assert [instance.state for instance in controller.instances()] == [InstanceState.READY]
    check_ledger(machine, controller)
    controller.close()


def test_waking_unloads_the_cheapest_that_make_room(machine: Machine, controller: Controller) -> None:
    stack = [deployment(name, 150, keep_seconds=60) for name in ("a", "b", "c")]
    outcome = controller.apply(stack)
    assert [step.kind for step in outcome.plan.steps] == [StepKind.DEPLOY, StepKind.DEPLOY, StepKind.REGISTER]
    assert {i.deployment: i.state.value for i in outcome.instances} == {"a": "ready", "b": "ready", "c": "sleeping"}
    controller.wake("c", [resident("a", expected_seconds=10.0), resident("b")])
    states = {instance.deployment: instance.state.value for instance in controller.instances()}
    assert states == {"a": "ready", "b": "sleeping", "c": "ready"}
    check_ledger(machine, controller, names=["a", "b", "c"])


def test_waking_in_vain_unloads_nobody(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("a", 150, keep_seconds=60), deployment("b", 150, keep_seconds=60)])
    controller.apply([deployment("c", 150, keep_seconds=60)])
    outcome = controller.wake("c", [resident("a", in_flight=1), resident("b", resident_seconds=0.0)])
    assert outcome.plan.refusals
    states = {instance.deployment: instance.state.value for instance in controller.instances()}
    assert states == {"a": "ready", "b": "ready", "c": "sleeping"}


def test_waking_never_unloads_a_model_of_higher_priority(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("a", 150, keep_seconds=60), deployment("b", 150, keep_seconds=60)])
    controller.apply([deployment("c", 150, keep_seconds=60)])
    higher = [resident("a", priority=Priority.HIGH), resident("b", priority=Priority.HIGH)]
    assert controller.wake("c", higher).plan.refusals
    assert not controller.wake("c", [*higher[:1], resident("b")]).plan.refusals


def test_what_is_kept_always_goes_first_and_what_could_never_wake_is_refused(controller: Controller) -> None:
    outcome = controller.apply([deployment("lazy", 150, keep_seconds=60), deployment("x", 150), deployment("y", 150)])
    assert outcome.plan.refusals, "lazy could never wake beside two that are kept always"
    outcome = controller.apply([deployment("lazy", 30, keep_seconds=60), deployment("x", 150), deployment("y", 150)])
    assert not outcome.plan.refusals


def test_a_sleeping_model_is_still_asleep_after_a_restart(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat", keep_seconds=60)])
    controller.sleep("chat")
    second = boot(machine)
    second.reconcile()
    assert [instance.state for instance in second.instances()] == [InstanceState.SLEEPING]
    assert machine.live() == {}
    second.close()
