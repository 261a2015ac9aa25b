"""Objects as an API server keeps them: versions, generations, who changed which field, and a history that watches follow.

Only what our programs rely on, and that as the real one does it: a write that changes nothing gives no new version, a stale
version is refused, `status` is written through its subresource only, and the last manager to change a field is noted.
`store_contract.py` holds both to the same behaviour.
"""

import copy
import datetime as dt
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
Place = tuple[str, str, str]  # collection, namespace, name


class Rejected(Exception):
    def __init__(self, status: int, reason: str, message: str, causes: Sequence[Object] = ()) -> None:
        super().__init__(message)
        self.status, self.reason, self.causes = status, reason, causes


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    version: int
    collection: str
    type: str
    object: Object
    before: Object | None = None

    def seen_by(self, labels: str, fields: str) -> Object | None:
        """The event of a watch with these selectors: one that stops being selected is deleted for it. None: no event."""
        if matches(self.object, labels, fields):
            came = self.before is not None and self.type != "DELETED" and not matches(self.before, labels, fields)
            return {"type": "ADDED" if came else self.type, "object": self.object}
        if self.before is None or not matches(self.before, labels, fields):
            return None
        metadata = {**self.before["metadata"], "resourceVersion": str(self.version)}
        return {"type": "DELETED", "object": {**self.before, "metadata": metadata}}


@dataclass
class ObjectStore:
    """`with_status`: collections whose status is a subresource, as that of our own kinds."""

    with_status: frozenset[str] = frozenset({"gpushares", "partitionplans", "gpunodes"})
    version: int = 100
    objects: dict[Place, Object] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    oldest: int = 0  # versions before it are forgotten

    def find(self, place: Place) -> Object:
        if place not in self.objects:
            raise Rejected(404, "NotFound", f'{place[0]} "{place[2]}" not found')
        return self.objects[place]

    def create(self, collection: str, namespace: str, body: Object, manager: str = "test") -> Object:
        made = copy.deepcopy(body)
        metadata = made.setdefault("metadata", {})
        place = collection, namespace, metadata["name"]
        if place in self.objects:
            raise Rejected(409, "AlreadyExists", f'{collection} "{metadata["name"]}" already exists')
        metadata |= {"uid": str(uuid.uuid4()), "generation": 1}
        metadata.setdefault("creationTimestamp", dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        if namespace:
            metadata["namespace"] = namespace
        if collection in self.with_status:
            made.pop("status", None)
        _note(metadata, manager, _leaves(made), set())
        return self._store(place, made, "ADDED")

    def write(self, place: Place, wanted: Object, *, manager: str = "test", subresource: str = "") -> Object:
        """The object as it is to be; raises where it is of an old version."""
        before = self.find(place)
        after = copy.deepcopy(wanted)
        given = str((after.get("metadata") or {}).get("resourceVersion") or "")
        if given and given != before["metadata"]["resourceVersion"]:
            raise Rejected(409, "Conflict", "the object has been modified; please apply your changes to the latest version")
        if subresource == "status":
            after = {**copy.deepcopy(before), "status": after.get("status")}
        elif place[0] in self.with_status:
            after["status"] = copy.deepcopy(before.get("status"))
        after = _without_nulls(after)
        for name in ("uid", "generation", "resourceVersion", "creationTimestamp", "namespace", "managedFields"):
            if name in before["metadata"]:
                after["metadata"][name] = copy.deepcopy(before["metadata"][name])
        if after == before:
            return before
        if place[0] == "jobs" and after["spec"]["template"] != before["spec"]["template"]:
            raise Rejected(422, "Invalid", f'Job.batch "{place[2]}" is invalid: spec.template: field is immutable')
        if after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] += 1
        old, new = _leaves(before), _leaves(after)
        changed = {path for path, value in new.items() if old.get(path, _leaves) != value}
        _note(after["metadata"], manager, changed, set(old) - set(new))
        return self._store(place, after, "MODIFIED")

    def patch(self, place: Place, change: Object, *, manager: str = "test", subresource: str = "") -> Object:
        """RFC 7386."""
        return self.write(place, _merge(self.find(place), change), manager=manager, subresource=subresource)

    def delete(self, place: Place, version: str | None = None) -> Object:
        found = self.find(place)
        if version and version != found["metadata"]["resourceVersion"]:
            raise Rejected(409, "Conflict", "the object has been modified")
        del self.objects[place]
        self.version += 1
        self.history.append(Change(version=self.version, collection=place[0], type="DELETED", object=found))
        return found

    def delete_owned(self, owner: Object) -> None:
        """As the garbage collector does, after a deletion with a policy that asks for it."""
        for place, item in list(self.objects.items()):
            if any(one.get("uid") == owner["metadata"]["uid"] for one in item["metadata"].get("ownerReferences") or ()):
                self.delete(place)

    def select(self, collection: str, namespace: str, labels: str = "", fields: str = "") -> list[Object]:
        return [
            item
            for (kind, space, _), item in sorted(self.objects.items())
            if kind == collection and namespace in ("", space) and matches(item, labels, fields)
        ]

    def forget_history(self) -> None:
        """As after a compaction: a watch that is behind must list again."""
        self.oldest = self.version
        self.history.clear()

    def _store(self, place: Place, item: Object, kind: str) -> Object:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        before = self.objects.get(place)
        self.objects[place] = item
        kept = copy.deepcopy(item)
        self.history.append(Change(version=self.version, collection=place[0], type=kind, object=kept, before=before))
        return item


def matches(item: Object, labels: str, fields: str) -> bool:
    """Equality, existence and absence, which is all that our programs select by."""
    own = item["metadata"].get("labels") or {}
    for term in filter(None, labels.split(",")):
        key, equal, value = term.partition("=")
        if key.startswith("!"):
            if key[1:] in own:
                return False
        elif key not in own or (equal and own[key] != value):
            return False
    for term in filter(None, fields.split(",")):
        path, _, value = term.partition("=")
        found: Any = item
        for name in path.split("."):
            found = (found or {}).get(name)
        if (found or "") != value:  # an empty one is as good as none
            return False
    return True


def _merge(target: Any, change: Any) -> Any:
    if not isinstance(change, Mapping):
        return change
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _without_nulls(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _without_nulls(value) for key, value in item.items() if value is not None}
    return item


def _leaves(item: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if isinstance(item, dict) and item:
        return {key: value for name, each in item.items() for key, value in _leaves(each, (*path, name)).items()}
    return {path: item}


def _note(metadata: Object, manager: str, changed: Any, gone: set[tuple[str, ...]]) -> None:
    """Fields belong to the manager that changed them last; what is gone belongs to nobody."""
    owned = {entry["manager"]: _paths(entry["fieldsV1"]) for entry in metadata.get("managedFields") or ()}
    fresh = {path for path in changed if path[0] != "metadata" or path[1:2] in (("labels",), ("annotations",))}
    for name in owned:
        owned[name] -= fresh | gone
    owned.setdefault(manager, set()).update(fresh)
    metadata["managedFields"] = [
        {"manager": name, "operation": "Update", "fieldsV1": _tree(paths)} for name, paths in sorted(owned.items()) if paths
    ]


def _tree(paths: set[tuple[str, ...]]) -> Object:
    tree: Object = {}
    for path in sorted(paths):
        at = tree
        for name in path:
            at = at.setdefault(f"f:{name}", {})
    return tree


def _paths(tree: Object) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for name, below in tree.items():
        inner = _paths(below)
        found |= {(name[2:], *rest) for rest in inner} if inner else {(name[2:],)}
    return found
