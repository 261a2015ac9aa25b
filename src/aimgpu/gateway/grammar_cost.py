"""Bounds on schemas and grammars, which engines compile before they answer: some need minutes for a few kilobytes.

Measured with llama.cpp: an `enum` of 4,000 strings keeps a model busy for 23 s, one of 20,000 for 8 minutes, and no one can
stop it. The cost grows with the square of the alternatives and with the product of nested repetitions, so those are bounded.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from aimgpu.errors import InvalidRequest

MOST_ALTERNATIVES = 500  # entries of all enums of a request together
MOST_COST = 20_000  # nodes of a schema, repeated ones counted as often as they may repeat
MOST_REPEATS = 2_000  # of one item or character
DEEPEST = 32
MOST_GRAMMAR_BYTES = 8 * 1024
MOST_PATTERN_BYTES = 1024

_SCHEMA_FIELDS = ("response_format", "json_schema", "guided_json", "tools", "structured_outputs", "guided_choice", "format")
_TEXT_FIELDS = ("grammar", "guided_grammar", "guided_regex", "regex")
FIELDS = frozenset({*_SCHEMA_FIELDS, *_TEXT_FIELDS})
_REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_COUNTS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


def check_grammars(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest where an engine would spend too long on what its answer must look like."""
    for name in _TEXT_FIELDS:
        if isinstance(fields.get(name), str):
            _check_text(fields[name], MOST_GRAMMAR_BYTES, name)
    for name in _SCHEMA_FIELDS:
        if isinstance(fields.get(name), dict | list):
            _Schema(name).visit({"choice": fields[name]} if name == "guided_choice" else fields[name], 0, 1)


class _Schema:
    """Adds up the cost of one field; raises as soon as it is too much."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._cost = 0
        self._alternatives = 0

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

    def _visit_object(self, schema: Mapping[str, Any], depth: int, times: int) -> None:
        repeats = max([1, *(schema[name] for name in _REPEATS if isinstance(schema.get(name), int))])
        if repeats > MOST_REPEATS:
            self._refuse(f"repeats something more than {MOST_REPEATS} times")
        for name, value in schema.items():
            if name in {"enum", "choice"} and isinstance(value, list):
                self._alternatives += len(value) * times
                if self._alternatives > MOST_ALTERNATIVES:
                    self._refuse(f"has more than {MOST_ALTERNATIVES} enum values")
            elif name in {"pattern", "regex", "grammar"} and isinstance(value, str):
                _check_text(value, MOST_PATTERN_BYTES if name == "pattern" else MOST_GRAMMAR_BYTES, self._param)
            elif isinstance(value, dict | list):
                self.visit(value, depth + 1, times * repeats)

    def _refuse(self, why: str) -> None:
        raise InvalidRequest(f"'{self._param}' {why}.", hint="Simplify the schema.", param=self._param)


def _check_text(text: str, most_bytes: int, param: str) -> None:
    if len(text.encode()) > most_bytes:
        raise InvalidRequest(f"'{param}' holds a grammar of more than {most_bytes} bytes.", param=param)
    product = 1
    for count in _repetitions(text):
        product *= max(count, 1)
        if product > MOST_COST:
            text = f"'{param}' repeats something more than {MOST_COST} times."
            raise InvalidRequest(text, hint="Nested repetitions multiply.", param=param)


def _repetitions(text: str) -> Iterable[int]:
    for found in _COUNTS.finditer(text):
        yield max((int(number) for number in found.groups() if number), default=1)
