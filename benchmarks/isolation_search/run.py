"""The worst sequence of launches that a search finds against the gate: `make bench-isolation_search`.

Hypothesis proposes kernels, grids, graphs, lengths and pauses, and follows what queues the most device time in front of a
critical request (tests/native/gate_search.py). The gate is the real one, on a clock of its own, so the same seed finds the
same sequence.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings, target
from tests.native.gate_search import MILLISECOND, MOVES, Gate, Worst

from benchmarks.recording import write_result


def search(gate: Gate, start: int, count: int) -> tuple[Worst, list[str]]:
    """The worst of so many sequences, and the sequence."""
    worst: list[tuple[Worst, list[str]]] = []

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.target],
        suppress_health_check=list(HealthCheck),
    )
    @given(moves=MOVES)
    def look(moves: list[str]) -> None:
        found = gate.play(moves)
        target(found.queued_ns / MILLISECOND)
        if not worst or found.queued_ns > worst[0][0].queued_ns:
            worst[:] = [(found, moves)]

    look()
    return worst[0]


def main() -> int:
    start, count = (int(word) for word in (sys.argv[1:] or ("1", "20000")))
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(Path(folder))
        worst, moves = search(gate, start, count)
        gate.close()
    found: dict[str, Any] = {
        "seed": start,
        "sequences": count,
        "queued_ms": worst.queued_ns / MILLISECOND,
        "unfinished_launches": worst.unfinished,
        "moves": moves,
    }
    print(json.dumps(found, indent=2))
    write_result("isolation_search", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
