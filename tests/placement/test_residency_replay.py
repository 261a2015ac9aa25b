"""Replayed arrivals: what is late, what a rule may not do, and the bound that no rule passes."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from benchmarks.dense.bound import least_late
from benchmarks.dense.rules import Clairvoyant, Farthest, KeepAlive, LlamaSwap, Ollama, lfu, lru

from aimgpu.placement.residency import MemoryRoom, ModelUse, Move, Residence
from aimgpu.placement.residency_replay import ModelShape, Ours, Request, Rule, replay

SHAPE = ModelShape(
    name="",
    awake_bytes=10,
    asleep_bytes=1,
    host_bytes=6,
    wake_seconds=0.5,
    reload_seconds=3.0,
    start_seconds=100.0,
    sleep_seconds=0.5,
)
ROOM = MemoryRoom(gpu_bytes=24, host_bytes=20)  # two awake, and what the others hold asleep


def shapes_of(names: str) -> list[ModelShape]:
    return [replace(SHAPE, name=name) for name in names]


def busy_hour(names: str, seed: int) -> list[Request]:
    source = random.Random(seed)
    found = [
        Request(at=source.uniform(0, 3600), model=source.choices(names, range(1, len(names) + 1))[0], decode_seconds=0.4)
        for _ in range(400)
    ]
    return sorted(found, key=lambda request: request.at)


def test_a_request_to_an_awake_model_waits_for_its_prefill_alone() -> None:
    outcome = replay(shapes_of("ab"), [Request(at=5.0, model="a", prefill_seconds=0.25)], ROOM, Ours())
    assert outcome.waits == [0.25]
    assert outcome.attainment == 1.0


def test_a_swap_costs_falling_asleep_and_waking() -> None:
    outcome = replay(shapes_of("abc"), [Request(at=5.0, model="c")], ROOM, lru())
    assert outcome.waits == [1.0]
    assert outcome.wakes == 1


def test_one_that_slept_without_its_weights_is_late() -> None:
    outcome = replay(shapes_of("abc"), [Request(at=5.0, model="c")], replace(ROOM, host_bytes=0), lru())
    assert outcome.waits == pytest.approx([3.1])  # its victim drops its weights, and its own are read again
    assert outcome.late_by_model == {"c": 1}


def test_a_burst_to_a_sleeping_model_wakes_it_once() -> None:
    burst = [Request(at=5.0 + number / 100, model="c") for number in range(50)]
    outcome = replay(shapes_of("abc"), burst, ROOM, Ours())
    assert outcome.wakes == 1
    assert outcome.late == 0


class Overbooks:
    """Wakes everything at once."""

    tick_seconds: float | None = None

    def note(self, model: str, now: float) -> None: ...

    def expect(self, model: str, now: float) -> float:
        del model, now
        return inf

    def decide(self, models: Sequence[ModelUse], room: MemoryRoom) -> Sequence[Move]:
        del room
        return [Move(name=one.name, to=Residence.AWAKE, because="") for one in models if one.residence is not Residence.AWAKE]


def test_a_rule_that_overbooks_is_found_out() -> None:
    with pytest.raises(ValueError, match="pass"):
        replay(shapes_of("abc"), [Request(at=5.0, model="c")], ROOM, Overbooks())


def rules(requests: list[Request]) -> dict[str, Rule]:
    arrivals = {name: [one.at for one in requests if one.model == name] for name in {one.model for one in requests}}
    return {
        "ours": Ours(),
        "lru": lru(),
        "lfu": lfu(),
        "llama-swap": LlamaSwap(),
        "ollama": Ollama(3),
        "ollama-all": Ollama(None),
        "keep-alive": KeepAlive(),
        "farthest": Farthest(arrivals),
        "knowing": Clairvoyant(arrivals),
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_every_rule_stays_in_its_bounds_and_above_the_least_that_must_be_late(seed: int) -> None:
    requests = busy_hour("abcdef", seed)
    least = least_late(shapes_of("abcdef"), requests, ROOM)
    for name, rule in rules(requests).items():
        outcome = replay(shapes_of("abcdef"), requests, ROOM, rule)
        assert outcome.late >= least, name
        assert len(outcome.waits) == len(requests)
        if name != "keep-alive":  # which lets callers wait while nobody is idle for five minutes
            assert all(wait < inf for wait in outcome.waits), name


def test_what_must_be_late_is_seen_where_a_window_asks_for_more_than_fits() -> None:
    slow = [replace(shape, wake_seconds=100.0, reload_seconds=None) for shape in shapes_of("abcd")]
    together = [Request(at=1.0, model=name) for name in "abcd"]
    assert least_late(slow, together, ROOM) > 1.0
    assert least_late(slow, together[:2], ROOM) == 0.0


def test_a_replay_gives_the_same_twice() -> None:
    requests = busy_hour("abcdef", 3)
    first = replay(shapes_of("abcdef"), requests, ROOM, Ours())
    assert first == replay(shapes_of("abcdef"), requests, ROOM, Ours())
