"""In how many ways at once an engine may have to read an answer by a JSON schema.

Engines follow every alternative that the text so far allows. Where two branches of an `anyOf` begin alike and a reference
leads into the same choice again, each level doubles them: 360 bytes of schema kept llama.cpp busy for minutes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aimgpu.gateway.grammars.paths import CostlyGrammar

MOST_WAYS = 64
_DEEPEST = 64  # of what is followed through references
_MOST_BRANCHES = 500
_CHOICES = ("anyOf", "oneOf")
_INSIDE = (*_CHOICES, "allOf", "$ref", "items", "prefixItems", "additionalProperties", "patternProperties", "properties")


def check_schema_ways(root: Mapping[str, Any]) -> None:
    """Raises CostlyGrammar where the ways to read one text multiply beyond bounds."""
    _Walk(root).visit(root, 1, {})


class _Walk:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._seen: set[tuple[int, int]] = set()

    def visit(self, schema: object, ways: int, entered: Mapping[int, int]) -> None:
        """`entered`: schemas that this one stands in, with the number of ways there."""
        if not isinstance(schema, dict):
            return
        if ways > MOST_WAYS or len(entered) > _DEEPEST:
            raise CostlyGrammar("has alternatives that begin alike, nested in each other")
        before = entered.get(id(schema))
        if before is not None:
            if ways > before:
                raise CostlyGrammar("has alternatives that begin alike and lead back to themselves")
            return
        if (id(schema), ways) in self._seen:
            return
        self._seen.add((id(schema), ways))
        inner = {**entered, id(schema): ways}
        self.visit(self._resolve(schema), ways, inner)
        branches = [branch for branch in self._branches(schema) if _has_nested(self._followed(branch))]
        for branch in branches:
            alike = sum(self._alike(branch, other) for other in branches)
            self.visit(branch, ways * alike, inner)
        for part in _parts(schema):
            self.visit(part, ways, inner)

    def _resolve(self, schema: Mapping[str, Any]) -> object:
        """What its reference within the document names; None where it has none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: object = self._root
        for step in filter(None, reference[1:].split("/")):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _followed(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema at the end of its references."""
        for _ in range(_DEEPEST):
            found = self._resolve(schema)
            if not isinstance(found, dict):
                break
            schema = found
        return schema

    def _branches(self, schema: Mapping[str, Any], depth: int = 0) -> list[dict[str, Any]]:
        """Of its choices, and of choices within those."""
        if depth > _DEEPEST:
            raise CostlyGrammar("has choices that lead back to themselves")
        found: list[dict[str, Any]] = []
        for branch in (branch for name in _CHOICES for branch in _list(schema.get(name))):
            if isinstance(branch, dict):
                found += self._branches(self._followed(branch), depth + 1) or [branch]
            if len(found) > _MOST_BRANCHES:
                raise CostlyGrammar(f"has a choice of more than {_MOST_BRANCHES}")
        return found

    def _alike(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether both may go on reading something nested after the same beginning."""
        if one is other:
            return True
        first, second = self._followed(one), self._followed(other)
        if first is second:
            return True
        kinds = _kind(first), _kind(second)
        if None not in kinds and kinds[0] != kinds[1]:
            return False
        if kinds == ("object", "object"):
            return _objects_alike(first, second)
        return _has_nested(first) and _has_nested(second)


def _objects_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """They differ where a name or a constant differs before the first value that has something nested."""
    (mine, my_rest), (theirs, their_rest) = _fields(one), _fields(other)
    for (name, value), (its_name, its_value) in zip(mine, theirs, strict=False):
        if name != its_name or _apart(value, its_value):
            return False
        if _has_nested(value) and _has_nested(its_value):
            return True
    common = min(len(mine), len(theirs))
    left = [_nested_names([*fields[common:], *rest]) for fields, rest in ((mine, my_rest), (theirs, their_rest))]
    others = [_has_nested(each.get("additionalProperties")) or "patternProperties" in each for each in (one, other)]
    return bool(left[0] & left[1]) or all(others) or (others[0] and bool(left[1])) or (others[1] and bool(left[0]))


def _nested_names(fields: Sequence[tuple[str, object]]) -> set[str]:
    return {name for name, value in fields if _has_nested(value)}


def _fields(schema: Mapping[str, Any]) -> tuple[list[tuple[str, object]], list[tuple[str, object]]]:
    """Required ones, which come first, and those that may be left out."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return [], []
    required = {name for name in _list(schema.get("required")) if isinstance(name, str)}
    return [each for each in properties.items() if each[0] in required], [
        each for each in properties.items() if each[0] not in required
    ]


def _apart(one: object, other: object) -> bool:
    """Whether both are constants and have none in common."""
    values = [_constants(one), _constants(other)]
    return all(values) and not any(value in values[1] for value in values[0])


def _constants(schema: object) -> Sequence[object]:
    if not isinstance(schema, dict):
        return []
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def _kind(schema: Mapping[str, Any]) -> str | None:
    kind = schema.get("type")
    if isinstance(kind, str):
        return "number" if kind == "integer" else kind
    return "object" if "properties" in schema else None


def _has_nested(schema: object) -> bool:
    return isinstance(schema, dict) and any(schema.get(name) not in (None, False, True, {}, []) for name in _INSIDE)


def _parts(schema: Mapping[str, Any]) -> Iterator[object]:
    """What stands in it one after another."""
    for name in ("properties", "patternProperties"):
        named = schema.get(name)
        if isinstance(named, dict):
            yield from named.values()
    for name in (*_CHOICES, "allOf", "prefixItems", "items"):
        yield from _list(schema.get(name))
    for name in ("items", "additionalProperties"):
        yield schema.get(name)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
