"""A log of decisions: written where they were made, replayed anywhere, and every difference named."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aimgpu.domain import Ask
from aimgpu.errors import InvalidInput
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.session import PlacementSession
from aimgpu.placement.snapshot import Snapshot
from aimgpu.placement.snapshot_json import (
    ask_from_json,
    ask_to_json,
    decision_to_json,
    snapshot_from_json,
    snapshot_to_json,
)

Event = Ask | str  # an Ask to place, or the instance to release
Entry = Mapping[str, Any]


def record_decisions(snapshot: Snapshot, events: Iterable[Event]) -> Iterator[Entry]:
    """The log, entry by entry: the world once, then every Ask with its decision, and every release."""
    yield {"snapshot": snapshot_to_json(snapshot)}
    engine = PlacementSession(snapshot, mix=Mix.given(snapshot))
    for event in events:
        if isinstance(event, str):
            engine.release(event)
            yield {"release": event}
        else:
            yield {"ask": ask_to_json(event), "decision": decision_to_json(engine.place(event))}


def replay_decisions(log: Iterable[Entry]) -> list[str]:
    """What would be decided differently now, one sentence each. Raises InvalidInput where this is no log."""
    entries = iter(log)
    first = next(entries, {})
    if "snapshot" not in first:
        raise InvalidInput("a log of decisions begins with its snapshot", hint="Write it with record_decisions.")
    snapshot = snapshot_from_json(first["snapshot"])
    engine = PlacementSession(snapshot, mix=Mix.given(snapshot))
    differences = []
    for number, entry in enumerate(entries, start=2):
        if "release" in entry:
            engine.release(entry["release"])
            continue
        ask = ask_from_json(entry["ask"])
        now, then = decision_to_json(engine.place(ask)), entry["decision"]
        if _decided(now) != _decided(then):
            differences.append(f"entry {number}: {ask.name} was {_short(then)}, now {_short(now)}")
    return differences


def _decided(decision: Entry) -> tuple[object, ...]:
    """What was decided, without the sentences: a better wording is no other decision."""
    if decision["placed"]:
        return (decision["slots"],)
    return ([(reason["node"], reason["device_id"], reason["code"], reason["short_bytes"]) for reason in decision["reasons"]],)


def _short(decision: Entry) -> str:
    if decision["placed"]:
        return "placed on " + ", ".join(slot["partition_id"] for slot in decision["slots"])
    return f"refused: {decision['summary']}"
