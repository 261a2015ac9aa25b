"""What holds for every world and every Ask."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.placement.strategies import asks, snapshots

from aimgpu.domain import Ask, Placement, Refusal
from aimgpu.placement import ReasonCode, Snapshot, apply_plan, snapshot_from_json, snapshot_to_json
from aimgpu.placement.decide import decide, decide_all
from aimgpu.placement.fit import Fit, fit_of, free_bytes
from aimgpu.placement.need import resolve_need
from aimgpu.placement.preemption.planner import plan_all
from aimgpu.placement.session import PlacementSession
from aimgpu.units import PPM

batches = st.lists(asks(), max_size=6).map(
    lambda found: [replace(ask, name=f"new{number}") for number, ask in enumerate(found)]
)


def overbooked(snapshot: Snapshot) -> list[str]:
    """Partitions whose Grants exceed them, foreign use left out: that is not ours to promise."""
    found = []
    for _, state in snapshot.devices():
        for partition in state.device.layout.partitions:
            mine = [grant for grant in state.grants if grant.partition_id == partition.id]
            taken = sum(max(grant.memory_bytes, 1) for grant in mine)
            alone = any(grant.exclusive for grant in mine)
            compute = sum(grant.compute_ppm or 0 for grant in mine)
            if taken > partition.memory_bytes or compute > PPM or (alone and len(mine) > 1):
                found.append(partition.id)
    return found


@settings(max_examples=examples(60))
@given(snapshots(), asks())
def test_the_arrays_and_the_reasons_agree_on_what_fits(snapshot: Snapshot, ask: Ask) -> None:
    need = resolve_need(ask)
    offers = {node.name: sum(isinstance(fit_of(need, node, state), Fit) for state in node.devices) for node in snapshot.nodes}
    fits = any(count >= need.count for count in offers.values())
    decision = decide(snapshot, ask)
    assert isinstance(decision, Placement if fits else Refusal)
    if isinstance(decision, Refusal):
        devices = [(node.name, state.device.id) for node, state in snapshot.devices()]
        assert [(reason.node, reason.device_id) for reason in decision.reasons] == devices
        assert {reason.code for reason in decision.reasons} <= set(ReasonCode)


@settings(max_examples=examples(60))
@given(snapshots(), batches)
def test_nothing_is_ever_given_twice(snapshot: Snapshot, found: list[Ask]) -> None:
    before = set(overbooked(snapshot))
    engine = PlacementSession(snapshot)
    for ask in found:
        engine.place(ask)
    after = engine.snapshot
    assert set(overbooked(after)) <= before
    for node in after.nodes:
        assert node.cpu_millis is None or node.used_cpu_millis <= node.cpu_millis
        assert node.host_memory_bytes is None or node.used_host_memory_bytes <= node.host_memory_bytes


@settings(max_examples=examples(60))
@given(snapshots(), asks())
def test_a_share_never_touches_what_foreign_processes_hold(snapshot: Snapshot, ask: Ask) -> None:
    decision = decide(snapshot, ask)
    if isinstance(decision, Placement):
        states = {(node.name, state.device.id): state for node, state in snapshot.devices()}
        for slot in decision.slots:
            state = states[slot.node, slot.device_id]
            partition = state.device.partition(slot.partition_id)
            assert partition is not None
            assert slot.memory_bytes <= free_bytes(state, partition)


@settings(max_examples=examples(60))
@given(snapshots(), asks())
def test_several_devices_come_from_one_node_or_not_at_all(snapshot: Snapshot, ask: Ask) -> None:
    decision = decide(snapshot, ask)
    if isinstance(decision, Placement):
        assert len(decision.slots) == resolve_need(ask).count
        assert len({slot.device_id for slot in decision.slots}) == len(decision.slots)
        assert len({slot.node for slot in decision.slots}) == 1


@settings(max_examples=examples(60))
@given(snapshots(), batches, st.randoms(use_true_random=False))
def test_decisions_do_not_depend_on_how_things_are_listed(snapshot: Snapshot, found: list[Ask], chance: random.Random) -> None:
    nodes = [replace(node, devices=tuple(chance.sample(node.devices, len(node.devices)))) for node in snapshot.nodes]
    chance.shuffle(nodes)
    assert decide_all(replace(snapshot, nodes=tuple(nodes)), found) == decide_all(snapshot, found)


@settings(max_examples=examples(60))
@given(snapshots(), batches)
def test_a_snapshot_that_was_written_down_decides_the_same(snapshot: Snapshot, found: list[Ask]) -> None:
    again = snapshot_from_json(snapshot_to_json(snapshot))
    assert again == snapshot
    assert decide_all(again, found) == decide_all(snapshot, found)


@settings(max_examples=examples(60))
@given(snapshots(), batches)
def test_the_kept_engine_equals_a_fresh_one(snapshot: Snapshot, found: list[Ask]) -> None:
    kept = PlacementSession(snapshot)
    for ask in found:
        fresh = PlacementSession(kept.snapshot, mix=kept.mix).decide(ask)
        assert kept.place(ask) == fresh


@settings(max_examples=examples(60))
@given(snapshots(), batches)
def test_what_was_placed_and_released_leaves_the_world_as_it_was(snapshot: Snapshot, found: list[Ask]) -> None:
    engine = PlacementSession(snapshot)
    names = [ask.name for ask in found if isinstance(engine.place(ask), Placement)]
    after = engine.snapshot
    for name in names:
        after = after.without_instance(name)
    assert after == snapshot


def quarrels(snapshot: Snapshot, names: set[str]) -> list[tuple[str, str]]:
    """Instances of these names on one Device with a deployment that they avoid."""
    found = []
    for _, state in snapshot.devices():
        for grant in state.grants:
            avoided = snapshot.running[grant.instance_id].not_with_deployments if grant.instance_id in names else frozenset()
            found += [(grant.instance_id, other.instance_id) for other in state.grants if other.deployment in avoided]
    return found


_COMPANY = st.lists(
    st.tuples(asks(), st.sampled_from(("a", "b", "c")), st.frozensets(st.sampled_from(("a", "b", "c")), max_size=2)), max_size=6
).map(
    lambda found: [
        replace(ask, name=f"new{number}", deployment=name, with_deployments=frozenset(), not_with_deployments=avoided - {name})
        for number, (ask, name, avoided) in enumerate(found)
    ]
)


@settings(max_examples=examples(60))
@given(snapshots(), _COMPANY)
def test_nobody_comes_to_be_beside_whom_it_avoids_whoever_came_first(snapshot: Snapshot, found: list[Ask]) -> None:
    names = {ask.name for ask in found}
    engine = PlacementSession(snapshot)
    for ask in found:
        engine.place(ask)
    assert quarrels(engine.snapshot, names) == []
    assert quarrels(apply_plan(snapshot, plan_all(snapshot, found).plan), names) == []
