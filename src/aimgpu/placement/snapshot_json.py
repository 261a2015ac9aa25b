"""A snapshot as plain JSON values and back, exactly: what was written in the field can be replayed anywhere."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aimgpu.domain import Ask, Decision, Placement
from aimgpu.domain.codec import decode, encode
from aimgpu.errors import InvalidInput
from aimgpu.placement.snapshot import Snapshot

VERSION = 1
_HINT = "Write it with `aimgpu snapshot`."


def snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    return {"version": VERSION, **encode(snapshot)}


def snapshot_from_json(value: Mapping[str, Any]) -> Snapshot:
    """Raises InvalidInput naming the place where the value is not a snapshot."""
    if not isinstance(value, Mapping) or value.get("version") != VERSION:
        found = value.get("version") if isinstance(value, Mapping) else type(value).__name__
        raise InvalidInput(f"not a snapshot of version {VERSION} but {found!r}", hint=_HINT)
    rest = {name: item for name, item in value.items() if name != "version"}
    try:
        snapshot: Snapshot = decode(Snapshot, rest, "snapshot")
    except InvalidInput as error:
        raise InvalidInput(error.message, hint=_HINT) from error
    for fault in _faults(snapshot):
        raise InvalidInput(f"snapshot: {fault}", hint=_HINT)
    return snapshot


def _faults(snapshot: Snapshot) -> Iterator[str]:
    """What has the shape of a snapshot and cannot be one of machines that exist."""
    yield from (f"two nodes are called {name}" for name in _repeated(node.name for node in snapshot.nodes))
    for node in snapshot.nodes:
        yield from (f"{node.name} has two devices {name}" for name in _repeated(state.device.id for state in node.devices))
        for state in node.devices:
            device = state.device
            partitions = [part for layout in (device.layout, *device.layouts) for part in layout.partitions]
            yield from (f"{part.id} is not a partition of {device.id}" for part in partitions if part.device_id != device.id)
            sizes = [device.memory_bytes, *(part.memory_bytes for part in partitions), *state.foreign_bytes.values()]
            taken = [grant.memory_bytes for grant in state.grants]
            yield from (f"{device.id} has a negative number of bytes ({size})" for size in (*sizes, *taken) if size < 0)


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def ask_to_json(ask: Ask) -> dict[str, Any]:
    encoded: dict[str, Any] = encode(ask)
    return encoded


def ask_from_json(value: Mapping[str, Any]) -> Ask:
    ask: Ask = decode(Ask, value, "ask")
    return ask


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """A placement or a refusal; `placed` distinguishes them."""
    return {"placed": isinstance(decision, Placement), **encode(decision)}
