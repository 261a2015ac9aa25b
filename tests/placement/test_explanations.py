"""What is said of a decision is what was decided: partitions, bytes and reasons of the Devices themselves."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.placement.strategies import asks, snapshots
from tests.placement.test_plans import lived_in, wishes
from tests.placement.test_properties import overbooked
from tests.placement.worlds import ask, grant_on, mi300x, state_of, world

from aimgpu.domain import Ask, PartitionKind, Placement, Refusal, Whole
from aimgpu.placement import Cost, MoveKind, MovePlan, MoveStep, ReasonCode, Snapshot, apply_plan
from aimgpu.placement.decide import decide
from aimgpu.placement.explain import Verdict, explain, explain_planned
from aimgpu.placement.fit import Fit, Misfit, fit_of, free_bytes
from aimgpu.placement.need import resolve_need
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.planner import plan_all, plan_for
from aimgpu.units import GIB, format_bytes, parse_bytes

EXAMPLES = settings(max_examples=examples(15))


@EXAMPLES
@given(snapshots(), asks())
def test_every_device_is_explained_once_and_as_it_is(snapshot: Snapshot, wanted: Ask) -> None:
    found = explain(snapshot, wanted)
    assert found.decision == decide(snapshot, wanted)
    listed = [(node.name, state.device.id) for node, state in snapshot.devices()]
    assert [(each.node, each.device_id) for each in found.devices] == listed
    chosen = {(slot.node, slot.device_id) for slot in found.decision.slots} if isinstance(found.decision, Placement) else set()
    need = resolve_need(wanted)
    for verdict, (node, state) in zip(found.devices, snapshot.devices(), strict=True):
        answer = fit_of(need, node, state)
        if (verdict.node, verdict.device_id) in chosen:
            assert verdict.verdict is Verdict.CHOSEN
        else:
            assert verdict.verdict is (Verdict.CANNOT if isinstance(answer, Misfit) else Verdict.WOULD_DO)
        if isinstance(answer, Misfit):
            assert (verdict.text, verdict.short_bytes) == (answer.text, answer.short_bytes)


@EXAMPLES
@given(snapshots(), asks())
def test_the_chosen_partition_is_named_with_its_own_figures(snapshot: Snapshot, wanted: Ask) -> None:
    found = explain(snapshot, wanted)
    if isinstance(found.decision, Refusal):
        return
    states = {(node.name, state.device.id): state for node, state in snapshot.devices()}
    texts = {(each.node, each.device_id): each.text for each in found.devices}
    left_on = []
    for slot in found.decision.slots:
        state = states[slot.node, slot.device_id]
        partition = state.device.partition(slot.partition_id)
        assert partition is not None
        left = free_bytes(state, partition) - slot.memory_bytes
        left_on.append(left)
        text = texts[slot.node, slot.device_id]
        assert text.startswith(slot.partition_id)
        assert text.endswith(f": {format_bytes(left)} would stay free there")
        assert ("alone on it" in text) == slot.exclusive
    if not found.decision.slots[0].exclusive:
        assert f"{format_bytes(max(left_on))} of the partition stays free" in found.decision.because


@EXAMPLES
@given(snapshots(), asks())
def test_processes_of_others_are_the_reason_only_where_it_would_do_without_them(snapshot: Snapshot, wanted: Ask) -> None:
    need = resolve_need(wanted)
    for node, state in snapshot.devices():
        miss = fit_of(need, node, state)
        if isinstance(miss, Fit) or miss.code is not ReasonCode.FOREIGN:
            continue
        assert miss.short_bytes is not None
        assert miss.short_bytes > 0
        after = fit_of(need, node, replace(state, foreign_bytes={}))
        assert isinstance(after, Fit) or after.code not in {ReasonCode.FOREIGN, ReasonCode.MEMORY}


@EXAMPLES
@given(snapshots(), asks())
def test_sizes_in_a_refusal_can_be_typed_back(snapshot: Snapshot, wanted: Ask) -> None:
    decision = decide(snapshot, wanted)
    if isinstance(decision, Refusal):
        for sentence in (decision.summary, *decision.would_fit, *(reason.text for reason in decision.reasons)):
            for size in re.findall(r"[\d.]+(?:[KMGT]iB|B)\b", sentence):
                assert parse_bytes(size) >= 0


@settings(max_examples=examples(25))
@given(lived_in(), st.lists(wishes, min_size=1, max_size=3))
def test_a_plan_explains_each_of_its_asks_beside_the_others(snapshot: Snapshot, found: list[Ask]) -> None:
    named = [replace(each, name=f"new{number}") for number, each in enumerate(found)]
    batch = plan_all(snapshot, named)
    after = apply_plan(snapshot, batch.plan)
    held = {grant.instance_id: grant for _, state in after.devices() for grant in state.grants}
    for wanted in named:
        said = explain_planned(snapshot, batch, wanted)
        chosen = {(each.node, each.device_id) for each in said.devices if each.verdict is Verdict.CHOSEN}
        if isinstance(said.decision, Refusal):
            assert wanted.name not in held
            assert not chosen
            continue
        assert (held[wanted.name].node, held[wanted.name].device_id) in chosen
        assert len(chosen) == len(said.decision.slots)
        assert said.first == tuple(step.text for step in batch.plan.steps if step.kind is not MoveKind.PLACE)


# --- the steps of a plan ---


def half_done(snapshot: Snapshot, step: MoveStep) -> Snapshot:
    """In the middle of a move: it runs at its new place and still at the old one."""
    return done(snapshot, replace(step, removed=(), from_node=None))


def done(snapshot: Snapshot, step: MoveStep) -> Snapshot:
    return apply_plan(snapshot, MovePlan(asks=(), placements=(), steps=(step,), cost=Cost(), because=""))


@settings(max_examples=examples(30))
@given(snapshot=lived_in(), wanted=wishes, reloads=st.booleans())
def test_at_no_step_of_a_plan_is_anything_given_twice(snapshot: Snapshot, wanted: Ask, *, reloads: bool) -> None:
    found = plan_for(snapshot, wanted, Limits(may_reload_driver=reloads))
    if isinstance(found, Refusal):
        return
    now, before = snapshot, set(overbooked(snapshot))
    for step in found.steps:
        if step.kind is MoveKind.MOVE:
            assert set(overbooked(half_done(now, step))) <= before, step.text
        if step.kind is MoveKind.LAYOUT:
            assert step.before is not None
            assert step.after is not None
            states = {(node.name, state.device.id): state for node, state in now.devices()}
            kept = {part.id for part in step.after.device.layout.partitions}
            held = states[step.node, str(step.device_id)].grants
            assert all(grant.partition_id in kept for grant in held), f"{step.text} under a running instance"
        now = done(now, step)
        assert set(overbooked(now)) <= before, step.text
    assert wanted.name in {grant.instance_id for _, state in now.devices() for grant in state.grants}


@settings(max_examples=examples(20))
@given(lived_in(), wishes)
def test_a_plan_costs_what_its_steps_do(snapshot: Snapshot, wanted: Ask) -> None:
    found = plan_for(snapshot, wanted, Limits(may_reload_driver=True))
    if isinstance(found, Refusal):
        return
    kinds = [step.kind for step in found.steps]
    assert found.cost.stopped == kinds.count(MoveKind.STOP) == len(found.stopped)
    assert found.cost.moved == kinds.count(MoveKind.MOVE) + kinds.count(MoveKind.RELEASE) == len(found.moved)
    assert kinds.count(MoveKind.RELEASE) == kinds.count(MoveKind.START)
    assert found.cost.layouts == kinds.count(MoveKind.LAYOUT)
    assert kinds.count(MoveKind.PLACE) == 1
    assert kinds[-1] is MoveKind.PLACE
    limited = plan_for(snapshot, wanted, Limits(may_move=False, may_stop=False, may_change_layouts=False))
    assert isinstance(limited, Placement | Refusal | MovePlan)
    if isinstance(limited, MovePlan):
        assert [step.kind for step in limited.steps] == [MoveKind.PLACE]
        assert found.cost.key() == (0,) * 6


def test_a_partition_that_another_model_has_alone_is_not_blamed_on_other_processes() -> None:
    device = mi300x("g0")
    held = state_of(device, grant_on(device, GIB, exclusive=True), foreign={"g0/spx-0": 50 * GIB})
    decision = decide(world(held), ask(gib=10))
    assert isinstance(decision, Refusal)
    assert decision.reasons[0].code == ReasonCode.MEMORY


@pytest.mark.parametrize("count", [1, 2, 3])
def test_refusals_for_several_gpus_say_which_would_do_and_which_not(count: int) -> None:
    free, full = mi300x("g0"), mi300x("g1")
    snapshot = world(state_of(free), state_of(full, grant_on(full, 150 * GIB, name="db")))
    decision = decide(snapshot, ask(want=Whole(count=count)))
    if count == 1:
        assert isinstance(decision, Placement)
        return
    assert isinstance(decision, Refusal)
    assert [reason.code for reason in decision.reasons] == [ReasonCode.COUNT, ReasonCode.BUSY]
    assert ("Stop db: then 2 GPUs of n0 fit." in decision.would_fit) == (count == 2)


def test_a_kind_that_no_layout_has_large_enough_is_refused_for_its_size_on_every_gpu() -> None:
    decision = decide(world(state_of(mi300x("g0"))), ask(want=PartitionKind(kind="cpx"), footprint_bytes=40 * GIB))
    assert isinstance(decision, Refusal)
    assert decision.reasons[0].code == ReasonCode.MEMORY
    assert decision.reasons[0].short_bytes == 40 * GIB - mi300x("g0").memory_bytes // 8
