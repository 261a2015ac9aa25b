"""What a change of the world may and may not do to a decision, and what a session keeps over any sequence of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.examples import examples
from tests.placement.strategies import asks, device_states, snapshots
from tests.placement.test_properties import overbooked
from tests.placement.worlds import ask, grant_on, mi300x, state_of, world

from aimgpu.domain import Ask, Fraction, IsolationRequirement, Memory, Placement, Refusal, Whole
from aimgpu.domain.compute import partition_part, partition_ppm
from aimgpu.errors import InvalidInput
from aimgpu.placement import NodeState, ReasonCode, Snapshot
from aimgpu.placement.decide import decide, decide_all
from aimgpu.placement.fit import device_free_bytes, free_bytes
from aimgpu.placement.need import resolve_need
from aimgpu.placement.scoring.fleet import Fleet
from aimgpu.placement.session import PlacementSession
from aimgpu.placement.snapshot import UNKNOWN_PARTITION
from aimgpu.units import GIB, PPM

EXAMPLES = settings(max_examples=examples(15))
MODEST = st.builds(
    lambda wanted, size, compute, avoided: replace(
        wanted,
        want=size,
        footprint_bytes=None,
        devices=1,
        compute_ppm=compute,
        isolation=IsolationRequirement.NONE,
        products=frozenset(),
        refused_products=frozenset(),
        vendor=None,
        refused_vendor=None,
        with_deployments=frozenset(),
        not_with_deployments=avoided,
    ),
    asks(),
    st.integers(1, 300).map(lambda size: Memory(memory_bytes=size)) | st.integers(1, 2).map(lambda count: Whole(count=count)),
    st.sampled_from((None, 60_001)),
    st.sampled_from((frozenset[str](), frozenset({"b"}))),
)  # asks that fit into many worlds
WORLDS = st.builds(lambda one, other: one if one.nodes and one.nodes[0].devices else other, snapshots(), snapshots())


def fits(snapshot: Snapshot, wanted: Ask) -> bool:
    return isinstance(decide(snapshot, wanted), Placement)


# --- changes of the world ---


@EXAMPLES
@given(WORLDS, MODEST, st.data())
def test_another_gpu_never_makes_unfit_what_fitted(snapshot: Snapshot, wanted: Ask, data: st.DataObject) -> None:
    if not fits(snapshot, wanted):
        return
    node = data.draw(st.sampled_from([*snapshot.nodes, NodeState(name="new", devices=())]))
    more = replace(node, devices=(*node.devices, data.draw(device_states(node.name, 7))))
    nodes = [each for each in snapshot.nodes if each.name != node.name]
    assert fits(replace(snapshot, nodes=(*nodes, more)), wanted)


@EXAMPLES
@given(WORLDS, MODEST)
def test_an_instance_that_leaves_never_makes_unfit_what_fitted(snapshot: Snapshot, wanted: Ask) -> None:
    if not fits(snapshot, wanted):
        return
    for _, state in snapshot.devices():
        for grant in state.grants:
            assert fits(snapshot.without_instance(grant.instance_id), wanted)


@EXAMPLES
@given(WORLDS, MODEST, st.integers(1, 2000))
def test_less_is_never_refused_where_more_was_placed(snapshot: Snapshot, wanted: Ask, less: int) -> None:
    if not fits(snapshot, wanted):
        return
    if isinstance(wanted.want, Memory) and wanted.footprint_bytes is None:
        assert fits(snapshot, replace(wanted, want=Memory(memory_bytes=max(wanted.want.memory_bytes - less, 1))))
    if isinstance(wanted.want, Whole) and wanted.want.count > 1:
        assert fits(snapshot, replace(wanted, want=Whole(count=wanted.want.count - 1)))
    if wanted.compute_ppm is not None:
        assert fits(snapshot, replace(wanted, compute_ppm=max(wanted.compute_ppm - less, 1)))
        assert fits(snapshot, replace(wanted, compute_ppm=None))
    assert fits(snapshot, replace(wanted, cpu_millis=0, host_memory_bytes=0))
    assert fits(snapshot, replace(wanted, not_with_deployments=frozenset()))


@EXAMPLES
@given(snapshots(), asks(), st.integers(1, 10**11))
def test_what_others_take_never_makes_fit_what_did_not(snapshot: Snapshot, wanted: Ask, taken: int) -> None:
    if fits(snapshot, wanted):
        return
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                replace(state, foreign_bytes={**state.foreign_bytes, UNKNOWN_PARTITION: taken}) for state in node.devices
            ),
        )
        for node in snapshot.nodes
    )
    assert not fits(replace(snapshot, nodes=nodes), wanted)


@EXAMPLES
@given(snapshots(), asks())
def test_a_slot_is_what_was_asked_of_a_partition_that_is_there(snapshot: Snapshot, wanted: Ask) -> None:
    decision = decide(snapshot, wanted)
    if isinstance(decision, Refusal):
        return
    states = {(node.name, state.device.id): state for node, state in snapshot.devices()}
    need = resolve_need(wanted)
    for slot in decision.slots:
        state = states[slot.node, slot.device_id]
        partition = state.device.partition(slot.partition_id)
        assert partition is not None
        assert 0 < slot.memory_bytes <= free_bytes(state, partition)
        assert slot.memory_bytes >= (wanted.footprint_bytes or 0)
        assert slot.memory_bytes == (partition.memory_bytes if slot.exclusive else need.bytes_on(state.device.memory_bytes))
        part = partition_part(state.device, partition)
        expected = None if wanted.compute_ppm is None else partition_ppm(wanted.compute_ppm, part)
        assert slot.compute_ppm == expected
        assert state.best_level(slot.partition_id, exclusive=slot.exclusive).rank >= need.least_level.rank


@EXAMPLES
@given(snapshots(), st.lists(asks(), min_size=1, max_size=4), st.integers(1, 3))
def test_a_node_that_is_held_takes_nothing_smaller(snapshot: Snapshot, found: list[Ask], least: int) -> None:
    named = [replace(each, name=f"a{number}", with_deployments=frozenset()) for number, each in enumerate(found)]
    reserved = {node.name: least for node in snapshot.nodes[:1]}
    for wanted, decision in zip(named, decide_all(snapshot, named, reserved=reserved), strict=True):
        if isinstance(decision, Placement) and resolve_need(wanted).whole_devices < least:
            assert not {slot.node for slot in decision.slots} & set(reserved)


def test_a_gpu_that_no_program_can_use_is_never_chosen_whatever_memory_it_has() -> None:
    device = mi300x("g0")
    broken = replace(device, layout=replace(device.layout, partitions=()), layouts=())
    small = state_of(mi300x("g1", total=40 * GIB))
    snapshot = world(state_of(broken), small)
    decision = decide(snapshot, ask(gib=30))
    assert isinstance(decision, Placement)
    assert decision.slots[0].device_id == "g1"
    refused = decide(snapshot, ask(gib=50))
    assert isinstance(refused, Refusal)
    assert [reason.code for reason in refused.reasons] == [ReasonCode.LAYOUT, ReasonCode.MEMORY]


def test_a_gpu_with_grants_on_partitions_that_are_gone_is_left_alone_until_they_are_too() -> None:
    cut, whole = mi300x("g0", "cpx"), mi300x("g0")
    stale = state_of(whole, grant_on(cut, GIB))
    refused = decide(world(stale), ask())
    assert isinstance(refused, Refusal)
    assert (refused.reasons[0].code, "old#0" in refused.reasons[0].text) == (ReasonCode.LAYOUT, True)
    assert fits(world(replace(stale, grants=())), ask())


@pytest.mark.parametrize("foreign", [0, 1, 5 * GIB, 200 * GIB])
def test_use_that_no_partition_owns_counts_on_each_of_them_and_once_on_the_gpu(foreign: int) -> None:
    device = mi300x("g0", "dpx")
    state = state_of(device, foreign={UNKNOWN_PARTITION: foreign})
    for partition in device.layout.partitions:
        assert free_bytes(state, partition) == partition.memory_bytes - foreign
    assert device_free_bytes(state) == max(device.layout.memory_bytes - foreign, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"want": Memory(memory_bytes=0)},
        {"want": Memory(memory_bytes=-5)},
        {"want": Fraction(ppm=0)},
        {"want": Fraction(ppm=PPM + 1)},
        {"want": Whole(count=0)},
        {"want": Whole(count=2), "devices": 3},
        {"devices": 0},
        {"devices": -1},
        {"compute_ppm": 0},
        {"compute_ppm": PPM + 1},
        {"footprint_bytes": -1},
        {"cpu_millis": -1},
        {"host_memory_bytes": -1},
    ],
    ids=repr,
)
def test_an_ask_that_cannot_be_meant_is_an_error_with_what_to_write_and_charges_nothing(wrong: dict[str, object]) -> None:
    engine = PlacementSession(world(state_of(mi300x("g0"))))
    for act in (engine.decide, engine.place):
        with pytest.raises(InvalidInput) as caught:
            act(replace(ask(), **wrong))  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.hint
    assert engine.snapshot == world(state_of(mi300x("g0")))


# --- a session over any sequence ---


class SessionMachine(RuleBasedStateMachine):
    """What a session keeps in arrays is what a session that begins with its Snapshot finds."""

    @initialize(snapshot=snapshots().filter(lambda made: not overbooked(made)))
    def begin(self, snapshot: Snapshot) -> None:
        self.first = snapshot
        self.engine = PlacementSession(snapshot)
        self.count = 0
        self.live: dict[str, tuple[Ask, Placement]] = {}
        self.there = sorted({grant.instance_id for _, state in snapshot.devices() for grant in state.grants})

    @rule(wanted=asks())
    def place(self, wanted: Ask) -> None:
        self.count += 1
        named = replace(wanted, name=f"new{self.count}", not_with_deployments=frozenset())
        foreseen = self.engine.decide(named)
        decision = self.engine.place(named)
        assert decision == foreseen
        if isinstance(decision, Placement):
            self.live[named.name] = (named, decision)

    @rule(choice=st.integers(0, 100))
    def leave(self, choice: int) -> None:
        names = [*self.live, *self.there]
        if names:
            name = names[choice % len(names)]
            self.engine.release(name)
            self.live.pop(name, None)
            self.there = [each for each in self.there if each != name]

    @rule(choice=st.integers(0, 100))
    def leave_and_come_back(self, choice: int) -> None:
        """What it held is free again: there is room for it, and as much is left as before."""
        if not self.live:
            return
        name = list(self.live)[choice % len(self.live)]
        wanted, _ = self.live[name]
        before = int(self.engine.fleet.free.sum())
        self.engine.release(name)
        decision = self.engine.place(wanted)
        assert isinstance(decision, Placement)
        if not any(slot.exclusive for slot in decision.slots) and not isinstance(wanted.want, Fraction):
            assert int(self.engine.fleet.free.sum()) == before or any(slot.exclusive for slot in self.live[name][1].slots)
        self.live[name] = (wanted, decision)

    @rule()
    def leave_twice(self) -> None:
        self.engine.release("never there")

    @invariant()
    def arrays_are_those_of_the_snapshot(self) -> None:
        now, fresh = self.engine.fleet, Fleet(self.engine.snapshot)
        for kept, made in ((now.free, fresh.free), (now.code, fresh.code), (now.cpu, fresh.cpu), (now.host, fresh.host)):
            assert np.array_equal(kept, made)
        assert np.array_equal(now.compute, fresh.compute)

    @invariant()
    def nothing_is_given_twice(self) -> None:
        assert set(overbooked(self.engine.snapshot)) <= set(overbooked(self.first))


SessionMachine.TestCase.settings = settings(max_examples=examples(15), stateful_step_count=12)
TestAnySession = SessionMachine.TestCase


@EXAMPLES
@given(snapshots().filter(lambda made: not overbooked(made)), st.lists(asks(), max_size=4))
def test_all_that_came_and_all_that_was_there_can_leave_and_every_byte_is_free(snapshot: Snapshot, found: list[Ask]) -> None:
    engine = PlacementSession(snapshot)
    for number, wanted in enumerate(found):
        engine.place(replace(wanted, name=f"new{number}"))
    for name in {grant.instance_id for _, state in engine.snapshot.devices() for grant in state.grants}:
        engine.release(name)
    empty = engine.snapshot
    assert not [grant for _, state in empty.devices() for grant in state.grants]
    assert all(node.used_cpu_millis == 0 and node.used_host_memory_bytes == 0 for node in empty.nodes)
    for _, state in empty.devices():
        for partition in state.device.layout.partitions:
            assert free_bytes(state, partition) == partition.memory_bytes - state.foreign_on(partition)


@pytest.mark.parametrize("isolation", IsolationRequirement)
def test_the_same_ask_in_the_same_world_goes_to_the_same_place_a_hundred_times(isolation: IsolationRequirement) -> None:
    states = [state_of(mi300x(f"g{number}", "cpx")) for number in range(4)]
    wanted = ask(gib=5, isolation=isolation)
    assert len({decide(world(*states[number % 4 :], *states[: number % 4]), wanted) for number in range(100)}) == 1
