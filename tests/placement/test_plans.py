"""Plans: what moves, stops and changes so that an Ask fits."""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.placement.test_properties import overbooked
from tests.placement.worlds import ask, mi300x, state_of, world

from aimgpu.domain import Ask, IsolationRequirement, Memory, PartitionKind, Placement, Priority, Refusal, Spread, Whole
from aimgpu.errors import InvalidInput
from aimgpu.placement import MoveKind, MovePlan, NodeState, Snapshot, apply_plan, canonical, undo_plan
from aimgpu.placement.decide import decide
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.planner import plan_all, plan_consolidation, plan_for
from aimgpu.placement.session import PlacementSession
from aimgpu.units import GIB


def running(snapshot: Snapshot, *found: Ask) -> Snapshot:
    """The world in which these Asks were placed."""
    engine = PlacementSession(snapshot)
    for each in found:
        assert isinstance(engine.place(each), Placement)
    return engine.snapshot


def planned(found: MovePlan | Refusal) -> MovePlan:
    assert isinstance(found, MovePlan), found
    return found


def test_what_fits_as_things_are_needs_no_other_step() -> None:
    plan = planned(plan_for(world(state_of(mi300x("g0"))), ask()))
    assert [step.kind for step in plan.steps] == ["place"]
    assert plan.cost.key() == (0,) * 6


def test_an_idle_device_gets_the_layout_that_is_needed() -> None:
    plan = planned(plan_for(world(state_of(mi300x("g0"))), ask(want=PartitionKind(kind="cpx"))))
    assert [step.kind for step in plan.steps] == ["layout", "place"]
    assert plan.steps[0].text == "repartition g0 as CPX/NPS1 instead of SPX/NPS1"


def test_instances_move_aside_for_a_whole_device() -> None:
    empty = world(state_of(mi300x("g0")), state_of(mi300x("g1")))
    snapshot = running(empty, ask("a", 80), ask("b", 80, spread=Spread.SPREAD))
    plan = planned(plan_for(snapshot, ask("big", want=Whole()), Limits(may_stop=False, may_change_layouts=False, most_moves=1)))
    assert plan.stopped == ()
    assert len(plan.moved) == 1
    assert [step.kind for step in plan.steps] == ["move", "place"]


def test_only_lower_priority_is_stopped_and_no_more_than_needed() -> None:
    low, high = Priority.LOW, Priority.HIGH
    found = [ask("low1", 60, priority=low), ask("low2", 60, priority=low), ask("mid", 60)]
    snapshot = running(world(state_of(mi300x("g0"))), *found)
    plan = planned(plan_for(snapshot, ask("vip", 50, priority=high)))
    assert len(plan.stopped) == 1
    assert plan.stopped[0].startswith("low")
    assert isinstance(plan_for(snapshot, ask("peer", 150)), Refusal)


def test_a_pinned_instance_is_never_touched() -> None:
    snapshot = running(world(state_of(mi300x("g0"))), ask("low", 150, priority=Priority.LOW, pinned=True))
    assert isinstance(plan_for(snapshot, ask("vip", 100, priority=Priority.HIGH)), Refusal)


def test_preemption_is_bounded_by_the_hour() -> None:
    snapshot = running(world(state_of(mi300x("g0"))), ask("low", 150, priority=Priority.LOW))
    vip = ask("vip", 100, priority=Priority.HIGH)
    assert planned(plan_for(snapshot, vip)).stopped == ("low",)
    assert isinstance(plan_for(replace(snapshot, recent_preemptions=12), vip), Refusal)


def test_a_set_of_models_finds_a_layout_that_the_hardware_can_have() -> None:
    hardware = [ask(f"m{n}", want=Memory(memory_bytes=12 * 10**9), isolation=IsolationRequirement.HARDWARE) for n in range(9)]
    eight = plan_all(world(state_of(mi300x("g0"))), hardware[:8])
    assert not eight.refusals
    assert {slot.partition_id for placement in eight.plan.placements for slot in placement.slots} == {
        f"g0/cpx-{n}" for n in range(8)
    }
    assert [step.kind for step in eight.plan.steps] == ["layout"] + ["place"] * 8
    nine = plan_all(world(state_of(mi300x("g0"))), hardware)
    assert [refusal.ask for refusal in nine.refusals] == ["m8"]
    shared = plan_all(world(state_of(mi300x("g0"))), [replace(each, isolation=IsolationRequirement.NONE) for each in hardware])
    assert not shared.refusals


def test_three_models_that_cannot_share_one_device_are_refused_with_the_numbers() -> None:
    large = [ask(f"m{n}", want=Memory(memory_bytes=165 * 10**9)) for n in range(3)]
    batch = plan_all(world(state_of(mi300x("g0"))), large)
    assert [refusal.ask for refusal in batch.refusals] == ["m1", "m2"]
    assert batch.refusals[0].reasons[0].short_bytes == 2 * 165 * 10**9 - 206141652992


def test_a_hive_changes_its_memory_mode_together_and_only_when_allowed() -> None:
    devices = [replace(mi300x(f"g{n}"), hive="h0") for n in range(2)]
    for number, device in enumerate(devices):
        nps4 = replace(device.layouts[3], name="CPX/NPS4", memory_mode="NPS4")
        devices[number] = replace(device, layouts=(device.layouts[0], nps4))
    snapshot = world(*(state_of(device) for device in devices))
    wanted = ask(want=PartitionKind(kind="cpx"))
    assert isinstance(plan_for(snapshot, wanted), Refusal)
    plan = planned(plan_for(snapshot, wanted, Limits(may_reload_driver=True)))
    assert [step.device_id for step in plan.steps if step.kind == "layout"] == ["g0", "g1"]
    assert all(step.reload_driver for step in plan.steps if step.kind == "layout")


def test_consolidation_frees_whole_devices_and_stops_nothing() -> None:
    snapshot = Snapshot(nodes=(NodeState(name="n0", devices=(state_of(mi300x("g0")), state_of(mi300x("g1")))),))
    snapshot = running(snapshot, ask("a", 40, spread=Spread.SPREAD), ask("b", 40, spread=Spread.SPREAD))
    plan = planned(plan_consolidation(snapshot, 1))
    after = apply_plan(snapshot, plan)
    assert sum(not state.grants for _, state in after.devices()) == 1
    assert plan.stopped == ()


@st.composite
def lived_in(draw: st.DrawFn) -> Snapshot:
    """A world that is nearly full, whose instances are known, so that they can move or stop."""
    nodes = []
    for number in range(draw(st.integers(1, 2))):
        devices = [mi300x(f"g{each}", draw(st.sampled_from(("spx", "cpx")))) for each in range(draw(st.integers(1, 3)))]
        hive = draw(st.sampled_from((None, f"h{number}")))
        states = tuple(state_of(replace(device, hive=hive)) for device in devices)
        nodes.append(NodeState(name=f"n{number}", devices=states, cpu_millis=draw(st.sampled_from((None, 40_000)))))
    engine = PlacementSession(Snapshot(nodes=tuple(nodes)))
    for number in range(draw(st.integers(1, 12))):
        gib = draw(st.sampled_from((5, 20, 60, 90)))
        priority, spread = draw(st.sampled_from(Priority)), draw(st.sampled_from(Spread))
        pinned, cpu = draw(st.integers(0, 5)) == 0, draw(st.sampled_from((0, 4000)))
        engine.place(ask(f"i{number}", gib, priority=priority, spread=spread, pinned=pinned, cpu_millis=cpu))
    unknown = draw(st.sets(st.integers(0, 12), max_size=2))
    known = {name: each for name, each in engine.snapshot.running.items() if name not in {f"i{n}" for n in unknown}}
    return replace(engine.snapshot, running=known)


wishes = st.builds(
    lambda want, priority, demand: Ask(name="new", want=want, priority=priority, isolation=demand),
    st.one_of(
        st.sampled_from((10, 40, 100, 180)).map(lambda gib: Memory(memory_bytes=gib * GIB)),
        st.integers(1, 2).map(lambda count: Whole(count=count)),
        st.sampled_from(("spx", "dpx", "cpx")).map(lambda kind: PartitionKind(kind=kind)),
    ),
    st.sampled_from((Priority.MEDIUM, Priority.HIGH)),
    st.sampled_from((IsolationRequirement.NONE, IsolationRequirement.HARDWARE)),
)


def _kinds(plan: MovePlan) -> list[MoveKind]:
    return sorted({step.kind for step in plan.steps})


@settings(max_examples=examples(120))
@given(
    lived_in(),
    wishes,
    st.builds(Limits, may_move=st.booleans(), may_change_layouts=st.booleans(), may_reload_driver=st.booleans()),
)
def test_plans_keep_their_rules(snapshot: Snapshot, wanted: Ask, limits: Limits) -> None:
    found = plan_for(snapshot, wanted, limits)
    event(type(found).__name__ + ("" if isinstance(found, Refusal) else f" {[kind.value for kind in _kinds(found)]}"))
    if isinstance(found, Refusal):
        return
    after = apply_plan(snapshot, found)
    assert canonical(undo_plan(after, found)) == canonical(snapshot)
    placed = [grant for _, state in after.devices() for grant in state.grants if grant.instance_id == wanted.name]
    assert len(placed) == len(found.placements[0].slots) > 0  # never in vain
    for name in (*found.stopped, *found.moved):
        assert not snapshot.running[name].pinned
    assert limits.may_move or not found.moved
    for name in found.stopped:
        assert snapshot.running[name].priority.rank < wanted.priority.rank
    assert set(overbooked(after)) <= set(overbooked(snapshot))
    if found.stopped:
        assert isinstance(decide(snapshot, wanted), Refusal)


def test_asking_twice_under_one_name_is_an_error() -> None:
    snapshot = running(world(state_of(mi300x("g0"))), ask("a"))
    with pytest.raises(InvalidInput, match="a"):
        plan_all(snapshot, [ask("a")])
    with pytest.raises(InvalidInput, match="b"):
        plan_all(snapshot, [ask("b"), ask("b")])


def test_a_set_never_costs_the_important_one_its_place() -> None:
    small = [ask(f"low{n}", 90, priority=Priority.LOW, isolation=IsolationRequirement.HARDWARE) for n in range(2)]
    vip = ask("vip", 150, priority=Priority.HIGH, isolation=IsolationRequirement.HARDWARE)
    batch = plan_all(world(state_of(mi300x("g0"))), [*small, vip], Limits(may_stop=False))
    assert [refusal.ask for refusal in batch.refusals] == ["low0", "low1"]


@settings(max_examples=examples(60))
@given(lived_in(), st.lists(wishes, min_size=2, max_size=6), st.booleans())
def test_sets_are_placed_once_each_within_the_books(snapshot: Snapshot, found: list[Ask], reload: bool) -> None:  # noqa: FBT001
    wanted = [replace(each, name=f"new{number}") for number, each in enumerate(found)]
    batch = plan_all(snapshot, wanted, Limits(may_reload_driver=reload))
    placed = [placement.ask for placement in batch.plan.placements]
    refused = [refusal.ask for refusal in batch.refusals]
    assert sorted(placed + refused) == [each.name for each in wanted]
    after = apply_plan(snapshot, batch.plan)
    assert canonical(undo_plan(after, batch.plan)) == canonical(snapshot)
    assert set(overbooked(after)) <= set(overbooked(snapshot))
    best = max(each.priority.rank for each in wanted)
    assert all(snapshot.running[name].priority.rank < best for name in batch.plan.stopped)
    for _, state in after.devices():
        ids = {partition.id for partition in state.device.layout.partitions}
        assert all(grant.partition_id in ids for grant in state.grants)
