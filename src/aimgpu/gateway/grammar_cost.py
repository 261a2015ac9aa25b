"""Bounds on schemas and grammars, which engines compile before they answer: some need minutes for a few kilobytes.

Measured with llama.cpp: an `enum` of 4,000 strings keeps a model busy for 23 s, one of 20,000 for 8 minutes, and no one can
stop it. The cost grows with the square of the alternatives and with the product of nested repetitions, so those are bounded;
of grammars, patterns and schemas also the number of ways to read a text (`grammars.paths`, `grammars.schema_ways`). Names and
constants are written into the grammar character by character: 0.6 s of CPU per MiB, during which the model answers no one.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import orjson

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.grammars.paths import CostlyGrammar, check_ways
from aimgpu.gateway.grammars.schema_ways import check_schema_ways
from aimgpu.gateway.grammars.syntax import Reference, UnreadableGrammar, parse_grammar, parse_regex

MOST_ALTERNATIVES = 500  # entries of all enums of a request together
MOST_COST = 20_000  # nodes of a schema, repeated ones counted as often as they may repeat
MOST_TEXT_BYTES = 128 * 1024  # names and constants of a schema together
MOST_REPEATS = 2_000  # of one item or character
DEEPEST = 32
MOST_GRAMMAR_BYTES = 8 * 1024
MOST_PATTERN_BYTES = 1024

_SCHEMA_FIELDS = (
    "response_format",
    "json_schema",
    "guided_json",
    "tools",
    "structured_outputs",
    "guided_choice",
    "format",
    "text",  # of the Responses API
    "grammar_triggers",
)
_TEXT_FIELDS = ("grammar", "guided_grammar", "guided_regex", "regex", "guided_whitespace_pattern")
_PATTERNS = frozenset({"pattern", "regex", "grammar", "whitespace_pattern"})
_SCHEMA_TEXTS = frozenset({"guided_json", "json", "json_schema", "structural_tag"})  # vLLM takes these as texts of JSON too
_DOCUMENTS = _SCHEMA_TEXTS | {"schema", "parameters", "input_schema", "format"}
_TRIGGER_PATTERNS = (2, 3)  # llama.cpp's types of a trigger that is a pattern
_GRAMMARS = frozenset({"grammar", "guided_grammar"})
FIELDS = frozenset({*_SCHEMA_FIELDS, *_TEXT_FIELDS})
_CONSTANTS = frozenset({"const", "enum", "choice"})
_REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_INSTEAD = "An engine could work on it for minutes. Use a JSON schema, or a simpler one; operators: AIMGPU_RAW_GRAMMARS."
_COUNTS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


class GrammarPolicy(StrEnum):
    """What callers may send as a grammar or a pattern of their own."""

    CHECKED = "checked"  # what is known to be cheap
    ANY = "any"  # whatever is not too long: callers are trusted not to block a model
    NONE = "none"  # no grammars; patterns and schemas are checked


def check_grammars(fields: Mapping[str, Any], policy: GrammarPolicy = GrammarPolicy.CHECKED) -> None:
    """Raises InvalidRequest where an engine would spend too long on what its answer must look like."""
    for name in _TEXT_FIELDS:
        if isinstance(fields.get(name), str):
            _check_text(fields[name], name, name, policy)
    for name in _SCHEMA_FIELDS:
        if fields.get(name) is not None:
            _Schema(name, policy).visit({"choice" if name == "guided_choice" else name: fields[name]}, -1, 1)


class _Schema:
    """Adds up the cost of one field; raises as soon as it is too much."""

    def __init__(self, param: str, policy: GrammarPolicy) -> None:
        self._param = param
        self._policy = policy
        self._cost = 0
        self._alternatives = 0
        self._text_bytes = 0

    def visit(self, value: object, depth: int, times: int) -> None:
        if depth > DEEPEST:
            self._refuse(f"is nested deeper than {DEEPEST} levels")
        self._cost += times
        if self._cost > MOST_COST:
            self._refuse("is too large, or repeats too much")
        if isinstance(value, dict):
            self._visit_object(value, depth, times)
        elif isinstance(value, list):
            for each in value:
                self.visit(each, depth + 1, times)

    def _visit_document(self, schema: Mapping[str, Any]) -> None:
        """References lead from its beginning."""
        try:
            check_schema_ways(schema)
        except CostlyGrammar as costly:
            self._refuse(str(costly))

    def _visit_object(self, schema: Mapping[str, Any], depth: int, times: int) -> None:
        repeats = max([1, *(schema[name] for name in _REPEATS if isinstance(schema.get(name), int))])
        if repeats > MOST_REPEATS:
            self._refuse(f"repeats something more than {MOST_REPEATS} times")
        for name, value in schema.items():
            self._add_text(name, value)
            if name in {"enum", "choice"} and isinstance(value, list):
                self._alternatives += len(value) * times
                if self._alternatives > MOST_ALTERNATIVES:
                    self._refuse(f"has more than {MOST_ALTERNATIVES} enum values")
            elif isinstance(value, str):
                self._visit_text(name, value, schema, depth)
            elif isinstance(value, dict | list):
                if name == "patternProperties" and isinstance(value, dict):
                    for pattern in value:
                        _check_text(pattern, "pattern", self._param, self._policy)
                self.visit(value, depth + 1, times * repeats)
                if name in _DOCUMENTS and isinstance(value, dict):
                    self._visit_document(value)

    def _add_text(self, name: str, value: object) -> None:
        self._text_bytes += len(name) + (len(orjson.dumps(value)) if name in _CONSTANTS else 0)
        if self._text_bytes > MOST_TEXT_BYTES:
            self._refuse(f"has names and constants of more than {MOST_TEXT_BYTES} bytes")

    def _visit_text(self, name: str, text: str, schema: Mapping[str, Any], depth: int) -> None:
        if name in _PATTERNS:
            _check_text(text, name, self._param, self._policy)
        elif name == "value" and schema.get("type") in _TRIGGER_PATTERNS:
            _check_text(text, "pattern", self._param, self._policy)
        elif name in _SCHEMA_TEXTS and text.lstrip().startswith(("{", "[")):
            with contextlib.suppress(orjson.JSONDecodeError):  # no engine reads it either
                document = orjson.loads(text)
                self.visit(document, depth + 1, 1)
                if isinstance(document, dict):
                    self._visit_document(document)

    def _refuse(self, why: str) -> None:
        raise InvalidRequest(f"'{self._param}' {why}.", hint="Simplify the schema.", param=self._param)


def _check_text(text: str, kind: str, param: str, policy: GrammarPolicy) -> None:
    """`kind`: the name of the field that holds it."""
    most_bytes = MOST_PATTERN_BYTES if kind == "pattern" else MOST_GRAMMAR_BYTES
    if policy is GrammarPolicy.NONE and kind in _GRAMMARS:
        raise InvalidRequest(f"'{param}': this server takes no grammars.", hint=_INSTEAD, param=param)
    if len(text.encode()) > most_bytes:
        raise InvalidRequest(f"'{param}' holds a grammar of more than {most_bytes} bytes.", param=param)
    product = 1
    for count in _repetitions(text):
        product *= max(count, 1)
        if product > MOST_COST:
            text = f"'{param}' repeats something more than {MOST_COST} times."
            raise InvalidRequest(text, hint="Nested repetitions multiply.", param=param)
    problem = None if policy is GrammarPolicy.ANY else _find_problem(text, is_grammar=kind in _GRAMMARS)
    if problem is not None:
        what = "grammar" if kind in _GRAMMARS else "pattern"
        raise InvalidRequest(f"'{param}' holds a {what} that {problem}.", hint=_INSTEAD, param=param)


@functools.lru_cache(maxsize=256)
def _find_problem(text: str, *, is_grammar: bool) -> str | None:
    try:
        if is_grammar:
            check_ways(Reference("root"), parse_grammar(text))
        else:
            check_ways(parse_regex(text), {})
    except UnreadableGrammar:
        return "cannot be read"
    except CostlyGrammar as costly:
        return str(costly)
    except RecursionError:  # groups within rules within groups
        return "is nested too deep"
    return None


def _repetitions(text: str) -> Iterable[int]:
    for found in _COUNTS.finditer(text):
        yield max((int(number) for number in found.groups() if number), default=1)
