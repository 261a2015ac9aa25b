"""What one manager applied of an object, read from its managedFields: the body that server-side apply takes again. Pure.

An apply takes away every field that the same manager applied before and leaves out now. A change of one field therefore starts
from all fields that the manager owns, and from no others: those belong to a controller, to `kubectl scale`, or are defaults.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.kubernetes.api.client import Object

_ITSELF = "."  # the map or the item itself, beside what is in it


def owned_fields(item: Object, manager: str) -> Object | None:
    """With its kind, name and namespace; None where this manager applied nothing of it."""
    metadata = item["metadata"]
    for entry in metadata.get("managedFields") or ():
        if entry.get("manager") == manager and entry.get("operation") == "Apply" and not entry.get("subresource"):
            found: Object = _chosen(item, entry.get("fieldsV1") or {})
            place = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
            identity = {"apiVersion": entry["apiVersion"], "kind": item.get("kind")}
            return {**identity, **found, "metadata": {**found.get("metadata", {}), **place}}
    return None


def _chosen(value: Any, fields: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    inside = {key: below for key, below in fields.items() if key != _ITSELF}
    if not inside:
        return copy.deepcopy(value)
    if isinstance(value, Mapping):
        named = {key.removeprefix("f:"): below for key, below in inside.items()}
        return {name: _chosen(value[name], below) for name, below in named.items() if name in value}
    return list(_items(value, inside))


def _items(values: Sequence[Any], fields: Mapping[str, Any]) -> list[Any]:
    """`k:{...}` names an item by its keys, `v:...` one of a set, `i:...` one by its place; in the order that they have now."""
    found = []
    for place, value in enumerate(values):
        for key, below in fields.items():
            kind, _, rest = key.partition(":")
            if _is_named(kind, json.loads(rest), value, place):
                keys = json.loads(rest) if kind == "k" else {}
                chosen = _chosen(value, below)
                found.append({**keys, **chosen} if keys else chosen)
                break
    return found


def _is_named(kind: str, name: Any, value: Any, place: int) -> bool:  # noqa: ANN401 - JSON
    match kind:
        case "k":
            return isinstance(value, Mapping) and all(value.get(key) == wanted for key, wanted in name.items())
        case "v":
            return bool(value == name)
        case _:
            return bool(place == name)
