"""Decisions that were written down are made again the same way, here and in every process."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.placement.decision_log import record_decisions, replay_decisions
from tests.placement.worlds import mi300x, state_of

from aimgpu.domain import Ask, Fraction, IsolationRequirement, Memory, PartitionKind, Placement, Priority, Spread, Whole
from aimgpu.errors import InvalidInput
from aimgpu.placement import NodeState, Snapshot
from aimgpu.placement.session import PlacementSession
from aimgpu.units import GIB

LOG = Path(__file__).with_name("decisions.jsonl")


def cluster() -> Snapshot:
    kinds = ("spx", "cpx", "dpx", "spx")
    return Snapshot(
        nodes=tuple(
            NodeState(
                name=f"n{node}",
                devices=tuple(state_of(mi300x(f"n{node}-g{gpu}", kinds[(node + gpu) % 4])) for gpu in range(4)),
                cpu_millis=64_000 if node else None,
            )
            for node in range(3)
        )
    )


def events() -> Iterator[Ask | str]:
    """A day of a small cluster: Asks of all kinds come, and some leave."""
    chance = random.Random(7)
    alive: list[str] = []
    for number in range(160):
        if alive and chance.random() < 0.35:
            yield alive.pop(chance.randrange(len(alive)))
            continue
        want = chance.choice(
            (
                Memory(memory_bytes=chance.choice((3, 10, 24, 60)) * GIB),
                Fraction(ppm=chance.choice((125_000, 333_333, 500_000))),
                PartitionKind(kind=chance.choice(("cpx", "dpx"))),
                Whole(count=chance.choice((1, 2))),
            )
        )
        alive.append(f"i{number}")
        yield Ask(
            name=f"i{number}",
            want=want,
            isolation=chance.choice(list(IsolationRequirement)),
            priority=chance.choice(list(Priority)),
            spread=chance.choice(list(Spread)),
            cpu_millis=chance.choice((0, 4000)),
        )


def test_the_recorded_day_is_decided_the_same_today() -> None:
    entries = [json.loads(line) for line in LOG.read_text().splitlines()]
    assert len(entries) == 161
    assert sum(entry["decision"]["placed"] for entry in entries if "decision" in entry) > 40
    assert replay_decisions(entries) == []


def test_a_difference_is_named() -> None:
    entries = [json.loads(line) for line in LOG.read_text().splitlines()]
    for entry in entries:
        if entry.get("decision", {}).get("placed"):
            entry["decision"]["slots"][0]["partition_id"] = "elsewhere"
            break
    (difference,) = replay_decisions(entries)
    assert "elsewhere" in difference


def test_a_log_without_its_snapshot_is_refused() -> None:
    with pytest.raises(InvalidInput):
        replay_decisions([])


@pytest.mark.slow
def test_another_process_decides_the_same_whatever_its_hash_seed() -> None:
    program = "from tests.placement.test_replay import *; print(json.dumps(list(record_decisions(cluster(), events()))))"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]


def test_release_gives_back_what_was_running_before() -> None:
    engine = PlacementSession(cluster())
    assert isinstance(engine.place(Ask(name="a", want=Whole(count=2), cpu_millis=1000)), Placement)
    kept = PlacementSession(engine.snapshot)
    kept.release("a")
    kept.release("nobody")
    assert kept.snapshot == replace(cluster(), running={})
    assert (kept.fleet.free == PlacementSession(cluster()).fleet.free).all()
    assert (kept.fleet.cpu == PlacementSession(cluster()).fleet.cpu).all()


if __name__ == "__main__":
    LOG.write_text("".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in record_decisions(cluster(), events())))
