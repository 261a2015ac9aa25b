"""The engine over many decisions: what it charges, gives back, and says of the world as it was."""

import pickle
from dataclasses import replace
from typing import cast

import pytest
from tests.placement.worlds import mi300x, state_of, world

from aimgpu.domain import Ask, Memory, Placement, Refusal, Whole
from aimgpu.errors import InvalidInput
from aimgpu.placement import decision_to_json
from aimgpu.placement.decide import decide
from aimgpu.placement.scoring.prices import waste_table
from aimgpu.placement.session import PlacementSession


def test_a_refusal_tells_of_the_world_as_it_was_when_it_was_refused() -> None:
    engine = PlacementSession(world(state_of(mi300x("g0"))))
    engine.place(Ask(name="first", want=Memory(memory_bytes=100 * 10**9)))
    refusal = engine.place(Ask(name="second", want=Memory(memory_bytes=150 * 10**9)))
    engine.release("first")
    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].short_bytes == 250 * 10**9 - mi300x("g0").memory_bytes
    assert "Stop first on g0" in " ".join(refusal.would_fit)
    assert isinstance(engine.place(Ask(name="second", want=Memory(memory_bytes=150 * 10**9))), Placement)


def test_a_refusal_that_is_worked_out_late_is_like_any_other() -> None:
    engine = PlacementSession(world(state_of(mi300x("g0"))))
    late = [engine.decide(Ask(name="x", want=Memory(memory_bytes=300 * 10**9))) for _ in range(3)]
    assert isinstance(late[0], Refusal)
    plain = Refusal(ask="x", summary=late[0].summary, reasons=late[0].reasons, would_fit=late[0].would_fit)
    assert late[1] == plain
    assert plain == late[1]
    assert hash(late[2]) == hash(plain)
    assert pickle.loads(pickle.dumps(late[2])) == plain  # noqa: S301 - our own bytes
    assert decision_to_json(late[2]) == decision_to_json(plain)
    assert repr(late[2]) == repr(plain).replace("Refusal(", "LateRefusal(", 1)
    assert not hasattr(late[0], "nothing")


def test_asking_again_about_the_same_snapshot_and_about_an_equal_one_give_the_same_answer() -> None:
    snapshot = world(state_of(mi300x("g0")), state_of(mi300x("g1")))
    asks = [Ask(name=f"a{number}", want=Memory(memory_bytes=(5 + number) * 10**9)) for number in range(12)]
    first = [decide(snapshot, ask) for ask in asks]
    assert [decide(snapshot, ask) for ask in asks] == first
    for ask, decision in zip(asks, first, strict=True):
        assert decide(replace(snapshot), ask) == decision
    taken = snapshot.with_placement(asks[0], cast("Placement", first[0]))
    held = decide(taken, Ask(name="whole", want=Whole(count=2)))
    assert isinstance(held, Refusal)
    assert isinstance(decide(snapshot, Ask(name="whole", want=Whole(count=2))), Placement)


def test_an_instance_that_ran_before_and_one_of_the_same_name_are_both_given_back() -> None:
    engine = PlacementSession(world(state_of(mi300x("g0"))))
    engine.place(Ask(name="a", want=Memory(memory_bytes=10**9)))
    again = PlacementSession(engine.snapshot)
    again.place(Ask(name="a", want=Memory(memory_bytes=10**9)))
    again.release("a")
    again.release("nobody")
    assert again.fleet.free.max() == mi300x("g0").memory_bytes
    assert not any(state.grants for _, state in again.snapshot.devices())


def test_a_wrong_ask_is_found_even_where_its_like_was_right() -> None:
    engine = PlacementSession(world(state_of(mi300x("g0"))))
    engine.place(Ask(name="a", want=Memory(memory_bytes=10**9)))
    with pytest.raises(InvalidInput):
        engine.place(Ask(name="b", want=Memory(memory_bytes=10**9), host_memory_bytes=-1))


def test_what_a_refusal_tells_does_not_depend_on_what_was_asked_first() -> None:
    names = ("summary", "reasons", "would_fit")
    told = []
    for first in names:
        refusal = PlacementSession(world(state_of(mi300x("g0")))).decide(Ask(name="two", want=Whole(count=2)))
        assert isinstance(refusal, Refusal)
        getattr(refusal, first)
        told.append({name: getattr(refusal, name) for name in names})
    assert told[0] == told[1] == told[2]
    assert told[0]["would_fit"] == ("Request 1 GPU instead of 2: n0 has that many.",)


def test_prices_of_waste_are_what_the_mean_ask_cannot_use() -> None:
    counts = {200: 3, 1000: 1}
    waste = waste_table(counts)
    for free in (0, 1, 199, 200, 999, 1000):
        unusable = sum(count * free for size, count in counts.items() if size > free)
        assert waste[free] == unusable / (1000 * 4)
    assert not waste_table({}).any()
