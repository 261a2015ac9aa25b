"""What is queued in front of a critical request, whatever a tenant launches: the gate itself on a clock of its own."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, target
from tests.examples import examples
from tests.native.gate_search import MICROSECOND, MILLISECOND, MOST_AHEAD, MOVES, Gate, longest


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    made = Gate(tmp_path_factory.mktemp("clock"))
    yield made
    made.close()


@settings(max_examples=examples(1000))
@given(moves=MOVES)
def test_at_most_eight_launches_are_queued_whatever_their_lengths_become(gate: Gate, moves: list[str]) -> None:
    """The search looks for the sequence that queues the most device time."""
    worst = gate.play(moves)
    target(worst.queued_ns / MILLISECOND)
    assert worst.unfinished <= MOST_AHEAD
    assert worst.queued_ns <= (MOST_AHEAD - 1) * longest(moves)


def repeat(move: str, count: int) -> str:
    return " ".join(move.format(i) for i in range(count))


def varying(percent: int, short: int, long: int) -> str:
    """One kernel, so many percent of whose launches are long, at random; microseconds."""
    dice = random.Random(1)
    return " ".join(f"k 0 1 {(long if dice.randrange(100) < percent else short) * MICROSECOND} 1" for _ in range(4000))


CASES = {
    # what is launched, and how much device time may be in flight beside the longest launch of it, in milliseconds
    "a kernel that grows from 2 us to 20 ms with its data": ("k 0 1 2000 3000 k 0 1 20000000 3000", 140),
    "a kernel that grows from 2 us to 1 ms": ("k 0 1 2000 3000 k 0 1 1000000 3000", 7),
    "a kernel that grows from 20 us to 1 ms": ("k 0 1 20000 3000 k 0 1 1000000 3000", 5),
    "a kernel that grows from 100 us to 2 ms": ("k 0 1 100000 3000 k 0 1 2000000 1000", 6),
    "a kernel whose length varies all the time": (repeat("k 0 1 2000 1 k 0 1 20000000 1", 200), 2),
    "a kernel that is sometimes long": (varying(10, 3, 5000), 5),
    "a kernel that is often long": (varying(20, 100, 2000), 2.1),
    "a graph with the handle of a destroyed one": ("g 0 20000 500 x 0 g 0 50000000 200", 2),
    "a kernel of code that was unloaded": ("k 0 1 20000 500 u k 0 1 50000000 200", 2),
    "grids that are always new": ("k 0 0 80000000 100", 2),
    "grids that are always new, short": ("k 0 0 10000 5000", 1),
    "kernels of more lengths than the table holds": (repeat("k {} 1 10000 1", 20000), 1),
    "short launches": ("k 0 1 100000 500", 1),
    "launches of a second": ("k 0 1 900000000 100", 2),
}


@pytest.mark.parametrize("name", CASES)
def test_one_launch_is_ahead(gate: Gate, name: str) -> None:
    """Beyond the launch that runs: about a millisecond, and no more than a few launches when lengths change."""
    moves, most = CASES[name]
    assert gate.play([moves]).queued_ns <= most * MILLISECOND


@pytest.mark.parametrize("name", ["grids that are always new, short", "kernels of more lengths than the table holds"])
def test_many_lengths_do_not_leave_the_device_idle(gate: Gate, name: str) -> None:
    """Kernels of 10 us: as many grids or kernels as there may be, a launch waits little longer than its work takes."""
    moves, _ = CASES[name]
    count = 5000 if "grids" in name else 20000
    assert gate.play([moves]).idle_ns / count < 40 * MICROSECOND
