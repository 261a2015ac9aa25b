"""The models that are known by name, read from CSV text: the one in the package, and those that users add."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import NoReturn

from aimgpu.errors import InvalidInput
from aimgpu.sizing.model import Architecture, ModelFacts, ModelKind

_MOST_DIGITS = 15
_LONGEST_TEXT = 4 << 20
_TEXT_COLUMNS = ("family", "kind", "tied_embeddings")
_ARCHITECTURE_NUMBERS = tuple(field.name for field in fields(Architecture) if field.name not in _TEXT_COLUMNS)
_REQUIRED = ("id", "parameters", "source")
_REQUIRED_SHAPE = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Models by name, without regard to case. Later rows win, so a user's file overrides the package."""

    rows: tuple["Row", ...]
    _by_name: Mapping[str, "Row"]

    def find(self, name: str) -> ModelFacts | None:
        row = self._by_name.get(name.strip().casefold())
        return row.facts if row else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    facts: ModelFacts
    aliases: tuple[str, ...]


@cache
def built_in() -> Catalogue:
    """The catalogue of the package."""
    text = resources.files("aimgpu.sizing").joinpath("data/catalogue.csv").read_text("utf-8")
    return combine(read_rows(text))


def combine(*sources: Iterable[Row]) -> Catalogue:
    by_name: dict[str, Row] = {}
    for row in (row for rows in sources for row in rows):
        for name in (row.facts.name, *row.aliases):
            by_name[name.casefold()] = row
    return Catalogue(rows=tuple({id(row): row for row in by_name.values()}.values()), _by_name=by_name)


def read_rows(text: str) -> Iterator[Row]:
    """Rows of CSV text; lines that begin with # are comments. A wrong row is refused with its line."""
    if len(text) > _LONGEST_TEXT:
        raise InvalidInput("the catalogue file is larger than 4 MiB", hint="Give a CSV file with one model a line.")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    reader = csv.DictReader(io.StringIO("\n".join(line for _, line in lines)))
    missing = [name for name in _REQUIRED if name not in (reader.fieldnames or ())]
    if missing:
        raise InvalidInput(f"the catalogue file lacks the columns {', '.join(missing)}", hint="See docs/how-to/add-a-model.md.")
    for (number, _), cells in zip(lines[1:], reader, strict=False):
        yield _row({key: (value or "").strip() for key, value in cells.items() if key}, number)


def _row(cells: Mapping[str, str], line: int) -> Row:
    facts = ModelFacts(
        name=cells["id"] or _refuse(line, "has no id"),
        source=f"catalogue: {cells['source']}",
        parameters=_number(cells, "parameters", line) or _refuse(line, "has no parameters"),
        active_parameters=_number(cells, "active_parameters", line) or None,
        precision=cells.get("precision") or "bf16",
        architecture=_architecture(cells, line),
    )
    return Row(facts=facts, aliases=tuple(cells.get("aliases", "").split()))


def _architecture(cells: Mapping[str, str], line: int) -> Architecture | None:
    numbers = {name: _number(cells, name, line) for name in _ARCHITECTURE_NUMBERS if cells.get(name)}
    if not any(name in numbers for name in _REQUIRED_SHAPE):
        return None
    missing = [name for name in _REQUIRED_SHAPE if name not in numbers]
    if missing:
        _refuse(line, f"lacks {', '.join(missing)}")
    return Architecture(
        family=cells.get("family") or "unknown",
        kind=ModelKind(cells.get("kind") or "decoder"),
        tied_embeddings=cells.get("tied_embeddings", "").lower() in ("true", "1", "yes"),
        **numbers,
    )


def _number(cells: Mapping[str, str], name: str, line: int) -> int:
    text = cells.get(name) or "0"
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        _refuse(line, f"has {text[:20]!r} for {name}, not a whole number")
    return int(text)


def _refuse(line: int, why: str) -> NoReturn:
    raise InvalidInput(f"line {line} of the catalogue {why}", hint="Mend the line; numbers are whole and without separators.")
