"""The bound on a grammar's ways beside a plain count: never too low, for any small grammar and any short text."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.errors import InvalidRequest
from aimgpu.gateway import grammar_cost
from aimgpu.gateway.grammar_cost import GrammarPolicy, check_grammars
from aimgpu.gateway.grammars import paths
from aimgpu.gateway.grammars.syntax import (
    ANYTHING,
    OTHER,
    Alternatives,
    Characters,
    Node,
    Repeat,
    Sequence,
    UnreadableGrammar,
    mask_of,
    parse_grammar,
    parse_regex,
)

LETTERS = st.sampled_from(["a", "b", "ab"]).map(lambda letters: Characters(mask_of(letters)))
NODES = st.recursive(
    LETTERS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: Sequence(tuple(items))),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: Alternatives(tuple(items))),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(lambda one: Repeat(one[0], one[1], one[1] + one[2])),
    ),
    max_leaves=6,
)


def readings(node: Node, text: str, at: int, path: tuple[int, ...]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Every way to read a part of a text by a node: where it ends, and which characters of the grammar read it."""
    match node:
        case Characters(mask):
            if at < len(text) and mask >> ord(text[at]) & 1:
                yield at + 1, (path,)
        case Sequence(items):
            yield from _chain(items, text, at, path)
        case Alternatives(options):
            for number, option in enumerate(options):
                yield from readings(option, text, at, (*path, number))
        case Repeat(item, least, most):
            for count in range(least, (most or 0) + 1):
                yield from _chain((item,) * count, text, at, path)


def _chain(items: tuple[Node, ...], text: str, at: int, path: tuple[int, ...]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    ends: list[tuple[int, tuple[Any, ...]]] = [(at, ())]
    for number, item in enumerate(items):
        ends = [
            (end, (*before, *taken)) for where, before in ends for end, taken in readings(item, text, where, (*path, number))
        ]
    yield from ends


def most_ways(node: Node, length: int) -> int:
    """Of reading a whole text of at most so many letters; two that use the same characters are one."""
    found = 0
    for size in range(length + 1):
        for text in map("".join, itertools.product("ab", repeat=size)):
            found = max(found, len({taken for end, taken in readings(node, text, 0, ()) if end == size}))
    return found


@settings(max_examples=examples(60))
@given(NODES)
def test_what_passes_has_no_more_ways_than_allowed(node: Node) -> None:
    most, paths.MOST_WAYS = paths.MOST_WAYS, 6
    try:
        paths.check_ways(node, {})
    except paths.CostlyGrammar:
        return
    finally:
        paths.MOST_WAYS = most
    assert most_ways(node, 3) <= 6


@settings(max_examples=examples(20))
@given(st.integers(1, 26), st.integers(1, 30))
def test_a_choice_of_words_that_differ_at_once_passes_whatever_their_number(words: int, length: int) -> None:
    beginnings = [chr(ord("A") + number) for number in range(words)]
    check_grammars({"grammar": "root ::= " + " | ".join(f'"{one}{"x" * length}"' for one in beginnings)})


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('"a"', "[a]"),
        ('"a"', '"\\x61"'),
        ('"a"', '"\\u0061"'),
        ('"ab"', '"a" "b"'),
        ("[a-c]", "[abc]"),
        ("[^a]", "[^\\x61]"),
        ('("a")', '"a"'),
        ('"a"{2}', '"aa"'),
        ('"a"{1,2}', '"a" "a"?'),
        ('"a"*', '"a"{0,}'),
        ('"a" # words\n', '"a"'),
    ],
)
def test_one_thing_written_in_two_ways_is_read_as_the_same(left: str, right: str) -> None:
    def positions(text: str) -> list[int]:
        automaton = paths._Automaton({})
        automaton.add(parse_grammar(f"root ::= {text}")["root"], ())
        return automaton.masks

    assert set(positions(left)) == set(positions(right))


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (r"\d", "0", "a"),
        (r"\D", "a", "0"),
        (r"\w", "_", "-"),
        (r"\s", "\t", "x"),
        (r"[^\d]", "a", "5"),
        (r"[a-cx]", "b", "d"),
        (r"[\]]", "]", "["),
        (r"[a-]", "-", "b"),
        (r"\.", ".", "x"),
        (r"\n", "\n", "n"),
        (r"\x41", "A", "x"),
        (r"\u00e9", "é", "e"),
    ],
)
def test_sets_of_characters_are_read_as_engines_read_them(pattern: str, inside: str, outside: str) -> None:
    node = parse_regex(pattern)
    assert isinstance(node, Characters)
    assert node.mask >> min(ord(inside), OTHER) & 1
    assert not node.mask >> ord(outside) & 1


@pytest.mark.parametrize("pattern", [".", r"\p{L}", "[^a]"])
def test_other_alphabets_belong_to_what_is_open(pattern: str) -> None:
    node = parse_regex(pattern)
    assert isinstance(node, Characters)
    assert node.mask & 1 << OTHER
    assert node.mask & ANYTHING == node.mask


@pytest.mark.parametrize("text", ["(", ")", "[", "[a", "a{", "a{,}", "a{x}", "\\", r"\x4", "(?P<n>", "a**b)"])
def test_a_pattern_that_is_not_finished_is_unreadable(text: str) -> None:
    with pytest.raises(UnreadableGrammar):
        parse_regex(text)


SCHEMA_TEXT = '{"enum": [%s]}' % ",".join(f'"v{number}"' for number in range(5000))  # noqa: UP031
HIDDEN: dict[str, dict[str, Any]] = {
    "a schema as text": {"guided_json": SCHEMA_TEXT},
    "a schema as text with spaces before it": {"guided_json": "  \n" + SCHEMA_TEXT},
    "structured outputs as text": {"structured_outputs": {"json": SCHEMA_TEXT}},
    "a structural tag as text": {"structured_outputs": {"structural_tag": '{"structures": [{"schema": %s}]}' % SCHEMA_TEXT}},  # noqa: UP031
    "a format of the Responses API": {"text": {"format": {"type": "json_schema", "schema": {"enum": ["x"] * 5000}}}},
    "names of properties by a pattern": {"guided_json": {"patternProperties": {"^(a?){300}$": {}}}},
    "a pattern of spaces": {"structured_outputs": {"json": {}, "whitespace_pattern": "(a|a)*"}},
    "an older pattern of spaces": {"guided_whitespace_pattern": "( ?){300}"},
    "a trigger": {"grammar_triggers": [{"type": 2, "value": "(x+x+)+y"}]},
    "a trigger of the whole": {"grammar_triggers": [{"type": 3, "value": "(a|a)*b"}]},
    "a tool's pattern": {"tools": [{"function": {"parameters": {"properties": {"x": {"pattern": "(a?){200}"}}}}}]},
    "alternatives of alternatives": {"guided_json": {"anyOf": [{"anyOf": [{"enum": ["x"] * 90}] * 3}] * 3}},
    "repeats of repeats": {"guided_json": {"maxItems": 1999, "items": {"minItems": 1999, "items": {"type": "string"}}}},
}


@pytest.mark.parametrize("fields", HIDDEN.values(), ids=HIDDEN)
def test_a_costly_schema_is_found_wherever_an_engine_would(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_grammars(fields)
    assert caught.value.param in fields


FINE: dict[str, dict[str, Any]] = {
    "a text that is no schema": {"guided_json": "not JSON at all"},
    "text that begins like one": {"guided_json": "{ not JSON"},
    "a schema as text": {"guided_json": '{"type": "object", "properties": {"a": {"type": "string"}}}'},
    "a word as a trigger": {"grammar_triggers": [{"type": 1, "value": "<tool_call>("}]},
    "a property that is called pattern": {"guided_json": {"properties": {"pattern": {"type": "string"}}}},
    "a property that is called enum": {"guided_json": {"properties": {"enum": {"type": "array"}}}},
    "nothing": {"response_format": None, "tools": None},
    "a text": {"text": "a text"},
    "properties by a pattern": {"guided_json": {"patternProperties": {"^x-[a-z]+$": {"type": "string"}}}},
}


@pytest.mark.parametrize("fields", FINE.values(), ids=FINE)
def test_what_costs_nothing_passes(fields: dict[str, Any]) -> None:
    check_grammars(fields)


@settings(max_examples=examples(35))
@given(st.integers(0, 1200), st.integers(1, 3))
def test_enums_pass_up_to_their_number_wherever_they_stand(count: int, parts: int) -> None:
    schema = {"properties": {str(part): {"enum": [f"{part}-{k}" for k in range(count)]} for part in range(parts)}}
    try:
        check_grammars({"guided_json": schema})
    except InvalidRequest:
        assert count * parts > grammar_cost.MOST_ALTERNATIVES
    else:
        assert count * parts <= grammar_cost.MOST_ALTERNATIVES


@pytest.mark.parametrize("depth", [31, 34, 60])
def test_depth_is_bounded(depth: int) -> None:
    schema: Any = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"not": schema}
    if depth <= grammar_cost.DEEPEST:
        check_grammars({"guided_json": schema})
    else:
        with pytest.raises(InvalidRequest, match="nested deeper"):
            check_grammars({"guided_json": schema})


@pytest.mark.parametrize("policy", GrammarPolicy)
def test_no_policy_lets_a_huge_grammar_or_enum_through(policy: GrammarPolicy) -> None:
    for fields in (
        {"grammar": 'root ::= "' + "a" * 9000 + '"'},
        {"guided_json": {"enum": ["x"] * 501}},
        {"guided_regex": "a{1,200}b{1,200}"},
    ):
        with pytest.raises(InvalidRequest):
            check_grammars(fields, policy)
