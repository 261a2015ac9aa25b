"""Schemas whose alternatives begin alike multiply the ways to read an answer; unions that people write do not."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.grammar_cost import check_grammars

TEXT = {"type": "string"}
SELF = {"$ref": "#/$defs/x"}
REFUSED = re.compile(r"'response_format' (?:has (?:alternatives|choices) that .+|is nested deeper than .+)\.")


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def recursive(*branches: Any, choice: str = "anyOf") -> dict[str, Any]:
    return {**SELF, "$defs": {"x": {choice: [*branches, TEXT]}}}


def check(schema: dict[str, Any]) -> None:
    check_grammars({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})


def refusal(schema: dict[str, Any]) -> InvalidRequest | None:
    try:
        check(schema)
    except InvalidRequest as refused:
        return refused
    return None


def chain(length: int) -> dict[str, Any]:
    """No cycle, but each definition has two branches that begin with the next one."""
    definitions: dict[str, Any] = {f"x{length}": TEXT}
    for number in range(length):
        inner = {"$ref": f"#/$defs/x{number + 1}"}
        definitions[f"x{number}"] = {"anyOf": [record(a=inner, b=TEXT), record(a=inner, c=TEXT)]}
    return {"$ref": "#/$defs/x0", "$defs": definitions}


@pytest.mark.parametrize(
    "schema",
    [
        recursive(record(a=SELF, b=TEXT), record(a=SELF, c=TEXT)),
        recursive(record(a=SELF, b=TEXT), record(a=SELF, c=TEXT), choice="oneOf"),
        recursive(record(n=TEXT, a=SELF), record(n=TEXT, a=SELF)),
        recursive({"type": "array", "items": SELF}, {"type": "array", "items": SELF, "minItems": 1}),
        recursive({"type": "array", "prefixItems": [SELF]}, {"type": "array", "prefixItems": [SELF, TEXT]}),
        recursive({"type": "object", "additionalProperties": SELF}, {"type": "object", "additionalProperties": SELF}),
        recursive({"anyOf": [record(a=SELF), record(a=SELF)]}),
        recursive(record(a=SELF, b=TEXT) | {"required": []}, record(b=TEXT, a=SELF) | {"required": []}),
        recursive(record(a=SELF) | {"required": []}, record(a=SELF)),
        recursive(record(a=SELF), {"type": "object", "additionalProperties": SELF}),
        {"anyOf": [record(a={"$ref": "#"}), record(a={"$ref": "#"}, b=TEXT)]},
        {
            **SELF,
            "$defs": {
                "x": {"anyOf": [{"$ref": "#/$defs/y"}, {"$ref": "#/$defs/z"}, TEXT]},
                "y": record(a=SELF, b=TEXT),
                "z": record(a=SELF, c=TEXT),
            },
        },
        chain(12),
    ],
)
def test_alternatives_that_begin_alike_and_nest_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="begin alike"):
        check(schema)
    with pytest.raises(InvalidRequest, match="begin alike"):
        check_grammars({"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]})
    with pytest.raises(InvalidRequest, match="begin alike"):
        check_grammars({"format": schema})


@pytest.mark.parametrize(
    "schema",
    [
        recursive(record(kind={"const": "add"}, left=SELF, right=SELF), record(kind={"const": "mul"}, left=SELF, right=SELF)),
        recursive(record(kind={"enum": ["a", "b"]}, of=SELF), record(kind={"enum": ["c"]}, of=SELF)),
        recursive(record(add=SELF), record(mul=SELF)),
        recursive({"type": "array", "items": SELF}, {"type": "object", "additionalProperties": SELF}, {"type": "null"}),
        recursive(record(name=TEXT, children={"type": "array", "items": SELF})),
        {"anyOf": [record(owner={"$ref": "#/$defs/o"}, cat=TEXT), record(owner={"$ref": "#/$defs/o"}, dog=TEXT)],
         "$defs": {"o": record(name=TEXT, friend={"anyOf": [{"$ref": "#/$defs/o"}, {"type": "null"}]})}},
        {"$ref": "https://example.org/elsewhere"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"anyOf": [{"const": str(number)} for number in range(400)]},
        chain(5),
    ],
)  # fmt: skip
def test_unions_that_people_write_are_taken(schema: dict[str, Any]) -> None:
    check(schema)


_NAMES = st.sampled_from(["x", "y", "z"])
_SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(_NAMES.map(lambda name: {"$ref": f"#/$defs/{name}"}), st.sampled_from([TEXT, {"type": "null"}, {}, True, 3])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: {"anyOf": each}),
        st.lists(inner, max_size=3).map(lambda each: {"allOf": each}),
        st.dictionaries(_NAMES, inner, max_size=2).map(lambda fields: {"type": "object", "properties": fields}),
        inner.map(lambda each: {"type": "array", "items": each}),
        inner.map(lambda each: {"additionalProperties": each}),
    ),
    max_leaves=12,
)


@given(st.dictionaries(_NAMES, _SCHEMAS, max_size=3), _SCHEMAS)
def test_any_schema_is_taken_or_refused_in_words(definitions: dict[str, Any], schema: Any) -> None:
    """However it refers to itself, the check ends, leaves it as it was, and a refusal says what is wrong and what to do."""
    root = {**(schema if isinstance(schema, dict) else {}), "$defs": definitions}
    before = json.dumps(root)
    refused = refusal(root)
    assert refused is None or REFUSED.fullmatch(refused.message), refused
    assert refused is None or (refused.param, refused.hint) == ("response_format", "Simplify the schema.")
    assert json.dumps(root) == before
    assert str(refusal(json.loads(before))) == str(refused)


LONG = "a" * (130 * 1024)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": LONG},
        {"const": {"nested": [LONG]}},
        {"enum": [LONG]},
        {"enum": [f"{number:0300}" for number in range(499)]},
        record(**{LONG: TEXT}),
        {"anyOf": [{"const": f"{number:01000}"} for number in range(200)]},
        {"type": "array", "items": {"enum": [LONG[:70_000]]}, "contains": {"const": LONG[:70_000]}},
    ],
)
def test_names_and_constants_that_are_long_together_are_refused(schema: dict[str, Any]) -> None:
    refused = refusal(schema)
    assert refused is not None
    assert refused.message == "'response_format' has names and constants of more than 131072 bytes."


def test_descriptions_may_be_long() -> None:
    check(record(name={"type": "string", "description": LONG, "examples": [LONG], "enum": ["x" * 100_000]}))


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_a_choice_of_long_texts_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match="names and constants"):
        check_grammars({field: [LONG] if field == "guided_choice" else {"choice": [LONG]}})
