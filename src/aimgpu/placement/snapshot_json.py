"""A Snapshot as plain JSON values and back, exactly: what was written in the field can be replayed anywhere."""

from collections.abc import Mapping
from typing import Any

from aimgpu.domain import Ask, Decision, Placement
from aimgpu.domain.plain import decode, encode
from aimgpu.errors import InvalidInput
from aimgpu.placement.snapshot import Snapshot

VERSION = 1
_HINT = "Write it with `aimgpu snapshot`."


def snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    return {"version": VERSION, **encode(snapshot)}


def snapshot_from_json(value: Mapping[str, Any]) -> Snapshot:
    """Raises InvalidInput naming the place where the value is not a Snapshot."""
    if not isinstance(value, Mapping) or value.get("version") != VERSION:
        found = value.get("version") if isinstance(value, Mapping) else type(value).__name__
        raise InvalidInput(f"not a snapshot of version {VERSION} but {found!r}", hint=_HINT)
    rest = {name: item for name, item in value.items() if name != "version"}
    try:
        snapshot: Snapshot = decode(Snapshot, rest, "snapshot")
    except InvalidInput as error:
        raise InvalidInput(error.message, hint=_HINT) from error
    return snapshot


def ask_to_json(ask: Ask) -> dict[str, Any]:
    encoded: dict[str, Any] = encode(ask)
    return encoded


def ask_from_json(value: Mapping[str, Any]) -> Ask:
    ask: Ask = decode(Ask, value, "ask")
    return ask


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """With `placed` to tell the two apart."""
    return {"placed": isinstance(decision, Placement), **encode(decision)}
