"""A Device under another Layout: who has to leave, what is free afterwards, and which Devices change with it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.placement.test_plans import lived_in
from tests.placement.test_properties import overbooked
from tests.placement.worlds import ask, grant_on, mi300x, state_of

from aimgpu.domain import Device, IsolationRequirement, Layout, Level, PartitionKind, Placement, Priority, Refusal, Whole
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.placement import MoveKind, MovePlan, NodeState, Snapshot, apply_plan, canonical, undo_plan
from aimgpu.placement.decide import decide
from aimgpu.placement.fit import free_bytes, stale_grants
from aimgpu.placement.layouts import kept_partitions, laid_out, relayout_of, with_relayout
from aimgpu.placement.need import resolve_need
from aimgpu.placement.preemption.eviction_sets import Limits, eviction_sets
from aimgpu.placement.preemption.planner import plan_all, plan_consolidation, plan_for
from aimgpu.placement.snapshot import UNKNOWN_PARTITION
from aimgpu.units import GIB


def simulated(product: str, layout: str | None = None) -> Device:
    device = replace(SimulatedHardware([(product, 1)]).read_devices()[0], simulated=False)
    return device if layout is None else replace(device, layout=_layout(device, layout))


def _layout(device: Device, name: str) -> Layout:
    return next(layout for layout in device.layouts if layout.name == name)


MI300X, H100 = simulated("MI300X"), simulated("H100-80")


# --- what stays ---


@pytest.mark.parametrize("before", [layout.name for layout in MI300X.layouts])
@pytest.mark.parametrize("after", [layout.name for layout in MI300X.layouts])
def test_no_partition_of_an_amd_gpu_outlives_a_change_of_its_modes(before: str, after: str) -> None:
    device = replace(MI300X, layout=_layout(MI300X, before))
    kept = kept_partitions(device, _layout(MI300X, after))
    assert kept == (frozenset(part.id for part in device.layout.partitions) if before == after else frozenset())


@settings(max_examples=examples(60))
@given(st.sampled_from(H100.layouts), st.sampled_from(H100.layouts))
def test_a_mig_instance_outlives_a_change_where_both_layouts_have_it_at_the_same_place(first: Layout, second: Layout) -> None:
    device = replace(H100, layout=first)
    kept = kept_partitions(device, second)
    places = {
        layout.name: {(part.kind, part.start): part.id for part in layout.partitions if part.start is not None}
        for layout in H100.layouts
    }
    one, other = places[device.layout.name], places[second.name]
    if first is second:
        assert kept == frozenset(part.id for part in device.layout.partitions)
    else:
        assert kept == {one[place] for place in one.keys() & other.keys()}


@settings(max_examples=examples(40))
@given(st.sampled_from(H100.layouts), st.sampled_from(H100.layouts), st.data())
def test_those_who_are_on_what_goes_have_to_leave_and_the_others_keep_what_they_hold(
    first: Layout, second: Layout, data: st.DataObject
) -> None:
    device = replace(H100, layout=first)
    parts = range(len(device.layout.partitions))
    taken = data.draw(st.sets(st.sampled_from(list(parts)), max_size=4)) if parts else set()
    grants = [grant_on(device, GIB, name=f"i{index}", index=index) for index in taken]
    state = state_of(device, *grants)
    node = NodeState(name="n0", devices=(state,))
    relayout = relayout_of(node, device, second)
    assert relayout is not None
    leaving = relayout.touched(node.devices)
    kept = kept_partitions(device, second)
    assert leaving == {grant.instance_id for grant in grants if grant.partition_id not in kept}
    after = laid_out(replace(state, grants=tuple(one for one in grants if one.instance_id not in leaving)), second)
    assert not stale_grants(after)
    assert {grant.instance_id for grant in after.grants} == {grant.instance_id for grant in grants} - leaving
    for partition in after.device.layout.partitions:
        mine = sum(grant.memory_bytes for grant in after.grants if grant.partition_id == partition.id)
        assert free_bytes(after, partition) == partition.memory_bytes - mine


# --- what stands in the way ---


@pytest.mark.parametrize("foreign", [{"g0/spx-0": 1}, {UNKNOWN_PARTITION: 1}, {"g0/spx-0": 0}, {}], ids=repr)
def test_a_gpu_that_others_use_is_not_laid_out(foreign: dict[str, int]) -> None:
    device = mi300x("g0")
    node = NodeState(name="n0", devices=(state_of(device, foreign=foreign),))
    found = relayout_of(node, device, device.layouts[3])
    assert (found is None) == any(foreign.values())
    refused = plan_for(Snapshot(nodes=(node,)), ask(want=PartitionKind(kind="cpx")))
    assert isinstance(refused, Refusal if any(foreign.values()) else MovePlan)


def hive(*kinds: str) -> tuple[Device, ...]:
    """GPUs of one hive that can be NPS1 as they are, or CPX/NPS4 and QPX/NPS4."""
    made = []
    for number, kind in enumerate(kinds):
        device = mi300x(f"g{number}", kind)
        more = [replace(device.layouts[at], name=f"{name}/NPS4", memory_mode="NPS4") for at, name in ((2, "QPX"), (3, "CPX"))]
        made.append(replace(device, hive="h", layouts=(*device.layouts, *more)))
    return tuple(made)


def test_a_memory_mode_takes_the_whole_hive_along_each_in_its_own_compute_mode_where_that_goes() -> None:
    first, second, third = hive("spx", "qpx", "spx")
    alone = mi300x("g9")
    node = NodeState(name="n0", devices=tuple(map(state_of, (first, second, third, alone))))
    found = relayout_of(node, first, next(one for one in first.layouts if one.name == "CPX/NPS4"))
    assert found is not None
    assert found.reload_driver
    assert {name: layout.name for name, layout in found.layouts.items()} == {
        "g0": "CPX/NPS4",
        "g1": "QPX/NPS4",
        "g2": "CPX/NPS4",
    }
    same = relayout_of(node, first, next(one for one in first.layouts if one.name == "CPX/NPS1"))
    assert same is not None
    assert (set(same.layouts), same.reload_driver) == ({"g0"}, False)


def test_a_hive_in_which_one_gpu_cannot_have_the_memory_mode_keeps_it() -> None:
    first, second = hive("spx", "spx")
    fixed = replace(second, layouts=tuple(one for one in second.layouts if one.memory_mode == "NPS1"))
    node = NodeState(name="n0", devices=(state_of(first), state_of(fixed)))
    assert relayout_of(node, first, first.layouts[-1]) is None
    busy = NodeState(name="n0", devices=(state_of(first), state_of(second, foreign={"g1/spx-0": 1})))
    assert relayout_of(busy, first, first.layouts[-1]) is None


def test_a_tenant_of_a_gpu_of_the_hive_that_was_not_asked_for_has_to_leave_too() -> None:
    first, second = hive("spx", "spx")
    node = NodeState(name="n0", devices=(state_of(first), state_of(second, grant_on(second, GIB, name="db"))))
    found = relayout_of(node, first, first.layouts[-1])
    assert found is not None
    assert found.touched(node.devices) == {"db"}
    after = with_relayout(Snapshot(nodes=(node,)).without_instance("db"), "n0", found)
    assert {state.device.layout.memory_mode for _, state in after.devices()} == {"NPS4"}
    assert with_relayout(after, "elsewhere", found) == after


def test_levels_under_a_new_layout_are_those_that_a_split_gives_and_no_more() -> None:
    state = state_of(mi300x("g0"))
    plain = replace(
        state,
        shared_levels={"g0/spx-0": frozenset({Level.RUNTIME})},
        exclusive_levels={"g0/spx-0": frozenset({Level.HARDWARE})},
    )
    cut = laid_out(plain, state.device.layouts[3])
    for partition in cut.device.layout.partitions:
        assert cut.best_level(partition.id, exclusive=False) is Level.RUNTIME
        assert cut.best_level(partition.id, exclusive=True) is Level.HARDWARE
    pretended = laid_out(replace(plain, device=replace(plain.device, simulated=True)), state.device.layouts[3])
    assert pretended.best_level("g0/cpx-3", exclusive=True) is Level.NONE


# --- ways to make room ---


@settings(max_examples=examples(20))
@given(lived_in(), st.sampled_from((20, 60, 150)), st.sampled_from(Priority))
def test_whoever_is_to_leave_may_and_then_there_is_room(snapshot: Snapshot, gib: int, priority: Priority) -> None:
    wanted = ask("new", gib, priority=priority)
    limits = Limits(may_reload_driver=True)
    for way in eviction_sets(snapshot, resolve_need(wanted), limits):
        assert all(name in snapshot.running and not snapshot.running[name].pinned for name in way.leaving)
        after = snapshot
        for name in way.leaving:
            after = after.without_instance(name)
        if way.relayout is not None:
            after = with_relayout(after, way.node, way.relayout)
        decision = decide(after, wanted)
        assert isinstance(decision, Placement)
    weights = [way.weight for way in eviction_sets(snapshot, resolve_need(wanted), limits)]
    assert weights == sorted(weights)


@settings(max_examples=examples(30))
@given(lived_in(), st.integers(1, 3))
def test_a_consolidation_stops_nobody_and_leaves_as_many_whole_gpus_as_it_says(snapshot: Snapshot, count: int) -> None:
    found = plan_consolidation(snapshot, count)
    if isinstance(found, Refusal):
        return
    after = apply_plan(snapshot, found)
    assert found.stopped == ()
    assert found.placements == ()
    assert canonical(undo_plan(after, found)) == canonical(snapshot)
    assert isinstance(decide(after, ask("whole", want=Whole(count=count))), Placement)
    assert set(overbooked(after)) <= set(overbooked(snapshot))
    assert {grant.instance_id for _, state in after.devices() for grant in state.grants} == {
        grant.instance_id for _, state in snapshot.devices() for grant in state.grants
    }


@settings(max_examples=examples(15))
@given(
    lived_in(),
    st.lists(
        st.tuples(st.sampled_from((10, 40, 100)), st.sampled_from(Priority), st.sampled_from(IsolationRequirement)),
        min_size=1,
        max_size=4,
    ),
)
def test_a_batch_is_placed_or_refused_ask_by_ask_and_what_ran_before_is_stopped_only_for_higher_priority(
    snapshot: Snapshot, wanted: list[tuple[int, Priority, IsolationRequirement]]
) -> None:
    asks = [
        ask(f"new{number}", gib, priority=priority, isolation=isolation)
        for number, (gib, priority, isolation) in enumerate(wanted)
    ]
    batch = plan_all(snapshot, asks)
    refused = {refusal.ask for refusal in batch.refusals}
    placed = {placement.ask for placement in batch.plan.placements}
    assert refused | placed == {each.name for each in asks}
    assert not refused & placed
    highest = max(each.priority.rank for each in asks)
    for name in batch.plan.stopped:
        assert snapshot.running[name].priority.rank < highest
        assert not snapshot.running[name].pinned
    after = apply_plan(snapshot, batch.plan)
    assert set(overbooked(after)) <= set(overbooked(snapshot))
    assert placed <= set(after.running)
    assert [step.kind for step in batch.plan.steps].count(MoveKind.PLACE) == len(placed)
