"""Who stays awake, sleeps or stops: what holds for any models, and the cases that the rules name."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import Priority
from aimgpu.placement.residency import Decision, MemoryRoom, ModelUse, Residence, decide_residency

AWAKE, WEIGHTS, EMPTY, STOPPED = Residence
MOVES = {  # what can begin from where
    AWAKE: {WEIGHTS, EMPTY, STOPPED},
    WEIGHTS: {AWAKE, EMPTY, STOPPED},
    EMPTY: {AWAKE, STOPPED},
    STOPPED: {AWAKE},
}


def a_model(name: str, residence: Residence, **changes: object) -> ModelUse:
    usual = ModelUse(
        name=name,
        residence=residence,
        awake_bytes=10,
        asleep_bytes=1,
        host_bytes=6,
        wake_seconds=0.3,
        reload_seconds=1.8,
        start_seconds=100.0,
        sleep_seconds=0.3,
        expected_seconds=60.0,
        idle_seconds=5.0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def moves_of(decision: Decision) -> list[tuple[str, Residence]]:
    return [(move.name, move.to) for move in decision.moves]


def test_callers_wake_a_model_in_the_room_of_the_one_whose_next_request_is_farthest_away() -> None:
    models = [
        a_model("soon", AWAKE, expected_seconds=3.0),
        a_model("later", AWAKE, expected_seconds=300.0),
        a_model("wanted", WEIGHTS, waiting=2, expected_seconds=0.5),
    ]
    decision = decide_residency(models, MemoryRoom(gpu_bytes=21, host_bytes=100))
    assert moves_of(decision) == [("later", WEIGHTS), ("wanted", AWAKE)]
    assert "makes room for wanted" in decision.why["later"]
    assert "2 wait" in decision.why["wanted"]


def test_nothing_that_works_makes_room() -> None:
    models = [a_model("works", AWAKE, in_flight=1), a_model("wanted", WEIGHTS, waiting=1)]
    decision = decide_residency(models, MemoryRoom(gpu_bytes=11, host_bytes=100))
    assert not decision.moves
    assert "are not free" in decision.why["wanted"]


def test_one_that_is_kept_always_stays_whatever_waits() -> None:
    models = [a_model("kept", AWAKE, keep_seconds=None), a_model("wanted", WEIGHTS, waiting=9, priority=Priority.HIGH)]
    assert not decide_residency(models, MemoryRoom(gpu_bytes=11, host_bytes=100)).moves


def test_what_was_idle_for_its_keep_time_sleeps_though_nobody_needs_the_room() -> None:
    models = [a_model("idle", AWAKE, idle_seconds=61.0, keep_seconds=60.0, expected_seconds=9000.0), a_model("other", AWAKE)]
    assert moves_of(decide_residency(models, MemoryRoom(gpu_bytes=100, host_bytes=100))) == [("idle", WEIGHTS)]


def test_a_lower_priority_never_takes_the_room_of_a_higher_one() -> None:
    models = [a_model("high", AWAKE, priority=Priority.HIGH), a_model("low", WEIGHTS, waiting=1, priority=Priority.LOW)]
    assert not decide_residency(models, MemoryRoom(gpu_bytes=11, host_bytes=100)).moves


def test_one_just_loaded_stays_for_equals_and_goes_for_a_higher_priority() -> None:
    room = MemoryRoom(gpu_bytes=11, host_bytes=100, least_residency_seconds=10.0)
    loaded = a_model("loaded", AWAKE, resident_seconds=2.0, priority=Priority.MEDIUM)
    assert not decide_residency([loaded, a_model("wanted", WEIGHTS, waiting=1)], room).moves
    urgent = a_model("wanted", WEIGHTS, waiting=1, priority=Priority.HIGH)
    assert moves_of(decide_residency([loaded, urgent], room)) == [("loaded", WEIGHTS), ("wanted", AWAKE)]


@pytest.mark.parametrize(
    "room",
    [
        MemoryRoom(gpu_bytes=11, host_bytes=11),
        MemoryRoom(gpu_bytes=11, host_bytes=100, host_bytes_per_model=5),
        MemoryRoom(gpu_bytes=11, host_bytes=100, pinned_bytes=11),
    ],
)
def test_weights_that_pass_a_bound_of_the_host_are_not_kept(room: MemoryRoom) -> None:
    models = [a_model("idle", AWAKE, pinned=True), a_model("wanted", WEIGHTS, waiting=1, pinned=True)]
    # The one that wakes holds its host memory until it is awake.
    assert moves_of(decide_residency(models, room))[0] == ("idle", EMPTY)


def test_a_host_that_became_short_gives_up_the_weights_that_save_least() -> None:
    models = [a_model("often", WEIGHTS, expected_seconds=700.0), a_model("seldom", WEIGHTS, expected_seconds=90_000.0)]
    assert moves_of(decide_residency(models, MemoryRoom(gpu_bytes=5, host_bytes=6))) == [("seldom", STOPPED)]
    assert moves_of(decide_residency(models, MemoryRoom(gpu_bytes=30, host_bytes=6)))[0] == ("seldom", EMPTY)


def test_remains_of_sleepers_go_where_nothing_else_gives_room() -> None:
    models = [a_model("asleep", WEIGHTS, expected_seconds=5000.0), a_model("wanted", STOPPED, waiting=1)]
    assert moves_of(decide_residency(models, MemoryRoom(gpu_bytes=10, host_bytes=100))) == [
        ("asleep", STOPPED),
        ("wanted", AWAKE),
    ]


def test_a_model_that_is_due_is_woken_ahead_in_free_room() -> None:
    models = [a_model("due", WEIGHTS, expected_seconds=20.0), a_model("not", EMPTY, expected_seconds=90_000.0)]
    assert moves_of(decide_residency(models, MemoryRoom(gpu_bytes=50, host_bytes=100))) == [("due", AWAKE)]


def test_one_at_a_time_is_copied_and_one_read_from_disk() -> None:
    models = [
        a_model("a", WEIGHTS, waiting=1),
        a_model("b", WEIGHTS, waiting=1, expected_seconds=1.0),
        a_model("c", EMPTY, waiting=1),
        a_model("d", EMPTY, waiting=1, moving_to=AWAKE),
    ]
    assert moves_of(decide_residency(models, MemoryRoom(gpu_bytes=100, host_bytes=100))) == [("b", AWAKE)]


def test_callers_that_are_late_already_wait_for_cheaper_room_but_not_for_ever() -> None:
    busy = a_model("busy", AWAKE, expected_seconds=0.1)
    late = a_model("late", WEIGHTS, waiting=1, waited_seconds=5.0, expected_seconds=60.0)
    room = MemoryRoom(gpu_bytes=11, host_bytes=100, patience_seconds=20.0)
    put_off = decide_residency([busy, late], room)
    assert not put_off.moves
    assert "late already" in put_off.why["late"]
    assert moves_of(decide_residency([busy, replace(late, waited_seconds=21.0)], room)) == [("busy", WEIGHTS), ("late", AWAKE)]


uses = st.builds(
    ModelUse,
    name=st.just(""),
    residence=st.sampled_from(Residence),
    awake_bytes=st.integers(3, 40),
    asleep_bytes=st.integers(0, 2),
    host_bytes=st.integers(1, 30),
    pinned=st.booleans(),
    wake_seconds=st.floats(0.01, 2),
    reload_seconds=st.none() | st.floats(0.01, 9),
    start_seconds=st.floats(5, 200),
    sleep_seconds=st.floats(0.01, 2),
    expected_seconds=st.floats(0, 1e6) | st.just(inf),
    moving_to=st.none() | st.sampled_from(Residence),
    in_flight=st.integers(0, 2),
    waiting=st.integers(0, 3),
    waited_seconds=st.floats(0, 100),
    idle_seconds=st.floats(0, 1e5),
    resident_seconds=st.floats(0, 1e5),
    keep_seconds=st.none() | st.floats(1, 1e4) | st.just(inf),
    priority=st.sampled_from(Priority),
)


def possible(found: list[ModelUse]) -> list[ModelUse]:
    """One that works is awake; a move leads where it can from where it is."""
    models = []
    for number, model in enumerate(found):
        moving = model.moving_to if model.moving_to in MOVES[model.residence] else None
        working = model.in_flight if model.residence is AWAKE and moving is None else 0
        models.append(replace(model, name=f"m{number}", moving_to=moving, in_flight=working))
    return models


worlds = st.lists(uses, min_size=1, max_size=9).map(possible)
rooms = st.builds(
    MemoryRoom,
    gpu_bytes=st.integers(0, 150),
    host_bytes=st.integers(0, 90),
    host_bytes_per_model=st.none() | st.integers(0, 30),
    pinned_bytes=st.none() | st.integers(0, 60),
    least_residency_seconds=st.sampled_from((0.0, 10.0)),
)


def on_gpu(models: list[ModelUse], moves: dict[str, Residence]) -> int:
    """Once the moves are done; what was moving before counts with the larger of its sizes."""
    return sum(
        max(model.bytes_in(model.residence), model.bytes_in(model.moving_to))
        if model.moving_to
        else model.bytes_in(moves.get(model.name, model.residence))
        for model in models
    )


def on_host(models: list[ModelUse], moves: dict[str, Residence], *, pinned_only: bool = False) -> int:
    """While they are being done: what wakes still holds its host memory."""
    total = 0
    for model in models:
        holds = {moves.get(model.name, model.moving_to or model.residence)}
        if model.moving_to or moves.get(model.name) is AWAKE:
            holds.add(model.residence)
        total += model.host_bytes if WEIGHTS in holds and (model.pinned or not pinned_only) else 0
    return total


@settings(max_examples=examples(400))
@given(worlds, rooms)
def test_no_decision_passes_the_gpu_or_the_host(models: list[ModelUse], room: MemoryRoom) -> None:
    decision = decide_residency(models, room)
    moves = {move.name: move.to for move in decision.moves}
    assert len(moves) == len(decision.moves)
    wakes = AWAKE in moves.values()
    assert on_gpu(models, moves) <= max(room.gpu_bytes, 0 if wakes else on_gpu(models, {}))
    falls_asleep = [model for model in models if moves.get(model.name) is WEIGHTS]
    if falls_asleep:
        assert on_host(models, moves) <= room.host_bytes
        for model in falls_asleep:
            assert room.host_bytes_per_model is None or model.host_bytes <= room.host_bytes_per_model
            if model.pinned and room.pinned_bytes is not None:
                assert on_host(models, moves, pinned_only=True) <= room.pinned_bytes


@settings(max_examples=examples(400))
@given(worlds, rooms)
def test_what_works_moves_or_is_kept_always_is_left_where_it_is(models: list[ModelUse], room: MemoryRoom) -> None:
    moves = {move.name: move.to for move in decide_residency(models, room).moves}
    for model in models:
        to = moves.get(model.name)
        if to is None:
            continue
        assert to in MOVES[model.residence]
        assert model.moving_to is None
        if model.residence is AWAKE:
            assert not model.in_flight
            assert not model.waiting
            assert model.keep_seconds is not None


@settings(max_examples=examples(200))
@given(worlds, rooms, st.randoms())
def test_the_order_in_which_models_are_listed_does_not_matter(models: list[ModelUse], room: MemoryRoom, source: object) -> None:
    shuffled = list(models)
    source.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide_residency(models, room) == decide_residency(shuffled, room)


@settings(max_examples=examples(200))
@given(worlds, rooms)
def test_every_model_gets_a_sentence_that_names_where_it_will_be(models: list[ModelUse], room: MemoryRoom) -> None:
    decision = decide_residency(models, room)
    moves = {move.name: move.to for move in decision.moves}
    assert set(decision.why) == {model.name for model in models}
    for model in models:
        assert moves.get(model.name, model.moving_to or model.residence).value in decision.why[model.name]


@settings(max_examples=examples(200))
@given(worlds)
def test_with_room_for_all_whoever_waits_is_on_its_way_or_next(models: list[ModelUse]) -> None:
    room = MemoryRoom(gpu_bytes=10_000, host_bytes=10_000)
    decision = decide_residency(models, room)
    moves = {move.name: move.to for move in decision.moves}
    for model in models:
        if model.waiting and model.residence is not AWAKE and model.moving_to is None:
            others = [one for one in models if one.residence is model.residence and one is not model]
            woken = [one for one in others if moves.get(one.name, one.moving_to) is AWAKE]
            assert moves.get(model.name) is AWAKE or woken
