"""The models that are known by name: those of the package, and those that users add.

A catalogue is CSV text with one model a line, `#` before a comment. Memory that a row lists is kept, and the model is never
sized below it. A row that cannot be true is refused: memory under the raw weights, fewer parameters than its own layers hold.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from functools import cache
from importlib import resources
from typing import NoReturn

from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.sizing.count import parse_parameter_count
from aimgpu.sizing.model import Architecture, ModelFacts, ModelKind
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.shape import least_parameters
from aimgpu.sizing.weights import weight_bytes

_LONGEST_TEXT = 4 << 20
_MOST_DIGITS = 15
_LONGEST_CELL = 1000
GB = 10**9
_MOST_GB = 10**6
_NAME = re.compile(r"\w[\w.+@-]*(?:[/:]\w[\w.+@-]*)*")
_LONGEST_NAME = 200
_TOLERANCE_PERCENT = 90  # people round
_TEXT_FIELDS = ("family", "kind", "tied_embeddings")
_NUMBERS = tuple(field.name for field in fields(Architecture) if field.name not in _TEXT_FIELDS)
_SHAPE = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size")
_OTHER_NAMES = {"model_id": "id", "model": "id", "params": "parameters", "params_listed": "parameters"}
_MEMORY_PRECISIONS = {"mem_fp16_gb": "fp16", "mem_int8_gb": "int8", "mem_int4_gb": "int4"}
MEMORY_COLUMNS = ("memory_gb", *_MEMORY_PRECISIONS)  # memory_gb: of the row's own precision
_HEAD = ("id", "aliases", "parameters", "active_parameters", "precision", "family", "kind", *_SHAPE, "tied_embeddings")
COLUMNS = (*_HEAD, *(name for name in _NUMBERS if name not in _SHAPE), *MEMORY_COLUMNS, "source")
# Names that circulate, but of which no model was ever published.
NO_SUCH_MODELS = {
    "unsloth/Llama-3.2-30B-Vision": "Llama 3.2 Vision comes in 11B and 90B only (unsloth/Llama-3.2-11B-Vision, "
    "unsloth/Llama-3.2-90B-Vision)."
}
_NO_SUCH_MODEL = {name.casefold(): why for name, why in NO_SUCH_MODELS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model of the catalogue."""

    facts: ModelFacts
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Models by name, without regard to case. Later rows win, so a user's file overrides the package."""

    rows: tuple[Row, ...]
    _by_name: Mapping[str, Row]

    def find(self, name: str) -> ModelFacts | None:
        """By name or alias, whatever the case; None: not in it."""
        row = self._by_name.get(name.strip().casefold())
        return row.facts if row else None

    def near(self, name: str) -> str | None:
        """A full id that ends in this name, to be asked about, never to be taken."""
        ending = f"/{name.strip().strip('/').casefold()}"
        return next((row.facts.name for row in self.rows if f"/{row.facts.name}".casefold().endswith(ending)), None)

    def remark(self, name: str) -> str | None:
        """Why a name is not here, where that is known."""
        return _NO_SUCH_MODEL.get(name.strip().casefold())


def check_against(known: Catalogue, rows: Iterable[Row]) -> None:
    """Refuses a row that makes a known model smaller than it is: as many copy the active parameters of a mixture of experts."""
    for row in rows:
        for name in (row.facts.name, *row.aliases):
            facts = known.find(name)
            if facts is not None and row.facts.parameters * 100 < facts.parameters * _TOLERANCE_PERCENT:
                raise InvalidInput(
                    f"{name} is listed with {row.facts.parameters / 1e9:.1f}B parameters, but has "
                    f"{facts.parameters / 1e9:.1f}B: memory for fewer would be under its raw weights",
                    hint="Correct the row, or give a model of your own another id.",
                )


@cache
def built_in() -> Catalogue:
    """The catalogue of the package."""
    text = resources.files("aimgpu.sizing").joinpath("data/catalogue.csv").read_text("utf-8")
    return combine(read_rows(text))


def combine(*sources: Iterable[Row]) -> Catalogue:
    """Both sets of rows; the later ones win."""
    by_id: dict[str, Row] = {}
    by_name: dict[str, Row] = {}
    for row in (row for rows in sources for row in rows):
        by_id[row.facts.name.casefold()] = row
        by_name |= {name.casefold(): row for name in (*row.aliases, row.facts.name)}
    return Catalogue(rows=tuple(by_id.values()), _by_name=by_name)


def read_rows(text: str) -> Iterator[Row]:
    """Rows of CSV text. The first wrong row is refused with its line."""
    if len(text) > _LONGEST_TEXT:
        raise InvalidInput("the catalogue file is larger than 4 MiB", hint="Give a CSV file with one model a line.")
    text = text.removeprefix("\ufeff")  # spreadsheets write one
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.lstrip()[0] != "#"]
    reader = csv.reader(io.StringIO("\n".join(line for _, line in lines)))
    header = [_OTHER_NAMES.get(name.strip().lower(), name.strip().lower()) for name in next(_csv_rows(reader), [])]
    missing = [name for name in ("id", "parameters") if name not in header]
    if missing:
        raise InvalidInput(f"the catalogue file lacks the column {' and '.join(missing)}", hint=f"Known: {', '.join(COLUMNS)}.")
    for number, values in zip((number for number, _ in lines[1:]), _csv_rows(reader), strict=False):
        yield read_row(dict(zip(header, (value.strip() for value in values), strict=False)), f"line {number} of the catalogue")


def read_row(cells: Mapping[str, str], where: str) -> Row:
    """One row from its cells; `where` names it in a refusal."""
    try:
        _check_cells(cells)
        facts = ModelFacts(
            name=cells.get("id") or _refuse("it has no id"),
            source=f"catalogue: {cells.get('source') or 'no source given'}",
            parameters=parse_parameter_count(cells.get("parameters") or ""),
            active_parameters=_number(cells, "active_parameters") or None,
            precision=find_precision(cells.get("precision") or "bf16").name,
            architecture=_architecture(cells),
        )
        _check_truth(facts)
        facts = replace(facts, listed_memory=_listed_memory(facts, cells))
    except AimGpuError as error:
        name = repr(cells["id"][:_LONGEST_NAME])[1:-1] if cells.get("id") else "a model without id"
        raise InvalidInput(f"{where} ({name}): {error.message}", hint=error.hint) from error
    return Row(facts=facts, aliases=tuple(cells.get("aliases", "").split()))


def write_rows(rows: Iterable[Row]) -> str:
    """CSV text that `read_rows` reads back the same."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(row, name) for name in COLUMNS])
    return out.getvalue()


def _cell(row: Row, column: str) -> str:
    facts, architecture = row.facts, row.facts.architecture
    special = {
        "id": facts.name,
        "aliases": " ".join(row.aliases),
        "parameters": str(facts.parameters),
        "active_parameters": str(facts.active_parameters or ""),
        "precision": facts.precision,
        "source": facts.source.removeprefix("catalogue: "),
        **_memory_cells(facts),
    }
    if column in special:
        return special[column]
    value = getattr(architecture, column) if architecture else None
    if value is None or (not value and column != "attention_layers"):  # whose 0 is not its default
        return ""
    return str(value).lower() if value is True else str(value)


def _memory_cells(facts: ModelFacts) -> dict[str, str]:
    """Exact: what is read back is the same number of bytes."""
    own = "fp16" if facts.precision == "bf16" else facts.precision
    listed = {precision: str(Decimal(size) / GB) for precision, size in facts.listed_memory}
    cells = {column: listed.get(precision, "") for column, precision in _MEMORY_PRECISIONS.items()}
    return {"memory_gb": "" if own in _MEMORY_PRECISIONS.values() else listed.get(own, ""), **cells}


def _csv_rows(reader: Iterable[list[str]]) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise InvalidInput(f"the catalogue file is no CSV: {error}", hint="Give a CSV file with one model a line.") from error


def _check_cells(cells: Mapping[str, str]) -> None:
    """Only what can be written to a line of a file and read back, and names that cannot be taken for a path."""
    for column, text in cells.items():
        if len(text) > _LONGEST_CELL or not text.isprintable():
            _refuse(f"{column} is longer than {_LONGEST_CELL} characters or more than one line of text")
    for name in (cells.get("id", ""), *cells.get("aliases", "").split()):
        if name and (len(name) > _LONGEST_NAME or name.lower().endswith(".gguf") or not _NAME.fullmatch(name)):
            raise InvalidInput(f"{name[:_LONGEST_NAME]!r} is no name of a model", hint="Write organisation/model or model:tag.")


def _architecture(cells: Mapping[str, str]) -> Architecture | None:
    numbers = {name: _number(cells, name) for name in _NUMBERS if cells.get(name)}
    if not any(name in numbers for name in _SHAPE):
        return None
    missing = [name for name in _SHAPE if not numbers.get(name)]  # none of them can be 0
    if missing:
        _refuse(f"its shape lacks {', '.join(missing)}")
    kind = cells.get("kind") or ModelKind.DECODER.value
    if kind not in list(ModelKind):
        _refuse(f"its kind is {kind!r}, known are {', '.join(ModelKind)}")
    return Architecture(
        family=cells.get("family") or "unknown",
        kind=ModelKind(kind),
        tied_embeddings=cells.get("tied_embeddings", "").lower() in ("true", "1", "yes"),
        **numbers,
    )


def _check_truth(facts: ModelFacts) -> None:
    if facts.architecture is not None and facts.parameters < least_parameters(facts.architecture):
        held = least_parameters(facts.architecture)
        _refuse(f"it lists {facts.parameters} parameters, but its layers hold {held}; all experts must be in memory")


def _listed_memory(facts: ModelFacts, cells: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """By precision; the more exact column wins over memory_gb where a row has both for one precision."""
    listed: dict[str, int] = {}
    for column in MEMORY_COLUMNS:
        if text := cells.get(column):
            precision = _MEMORY_PRECISIONS.get(column, facts.precision)
            listed["fp16" if precision == "bf16" else precision] = _memory_bytes(facts, precision, text)
    return tuple(listed.items())


def _memory_bytes(facts: ModelFacts, precision: str, listed: str) -> int:
    try:
        memory = Decimal(listed)
    except InvalidOperation:
        _refuse(f"its memory {listed[:20]!r} is no number of GB")
    raw = weight_bytes(facts, precision)
    if memory.is_finite() and memory > _MOST_GB:  # first: a number with a large exponent cannot be multiplied
        _refuse(f"its {precision} memory of {listed[:20]} GB is more than {_MOST_GB} GB")
    if not memory.is_finite() or memory * GB < raw:
        _refuse(f"its {precision} memory of {listed[:20]} GB is under its raw weights of {raw / GB:.1f} GB")
    return int(memory * GB)


def _number(cells: Mapping[str, str], name: str) -> int:
    text = cells.get(name) or "0"
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        _refuse(f"{name} is {text[:20]!r}, not a whole number")
    return int(text)


def _refuse(why: str) -> NoReturn:
    raise InvalidInput(why, hint="Correct the row; the model's config.json has the numbers.")
