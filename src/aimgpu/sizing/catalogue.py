"""The models that are known by name: those of the package, and those that users add.

A catalogue is CSV text with one model a line, `#` before a comment. Memory that a row lists is kept, and the model is never
sized below it. A row that cannot be true is refused: memory under the raw weights, fewer parameters than its own layers hold.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from difflib import SequenceMatcher
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
COLUMNS = (*_HEAD, *(name for name in _NUMBERS if name not in _SHAPE), *MEMORY_COLUMNS, "gguf", "source")
_GGUF_SUFFIX = "-gguf"
_GGUF_DEFAULT = "q4_k_m"  # of a repository whose quantisation is not named
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
    gguf: str | None = None  # "org/name:TAG" of the hub: the same model as GGUF files

    @property
    def names(self) -> tuple[str, ...]:
        return (self.facts.name, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Models by name, without regard to case. Later rows win, so a user's file overrides the package."""

    rows: tuple[Row, ...]
    _by_name: Mapping[str, Row]

    def row(self, name: str) -> Row | None:
        """By name or alias, whatever the case; None: not in it."""
        return self._by_name.get(name.strip().casefold())

    def find(self, name: str) -> ModelFacts | None:
        """By name or alias, and a repository of GGUF files by the model that it is named after; None: not in it."""
        row = self.row(name)
        return row.facts if row else self._find_gguf(name.strip())

    def near(self, name: str, most: int = 3) -> tuple[str, ...]:
        """Ids to be asked about, never to be taken; best first."""
        meant = resolve(self.rows, name)
        return tuple(row.facts.name for row in ([meant] if meant else search(self.rows, name)[:most]))

    def _find_gguf(self, name: str) -> ModelFacts | None:
        repository, _, tag = name.removeprefix("hf.co/").removeprefix("huggingface.co/").partition(":")
        if "/" not in repository or not repository.casefold().endswith(_GGUF_SUFFIX):
            return None
        wanted = repository.casefold()
        listed = next((row for row in self.rows if row.gguf and row.gguf.partition(":")[0].casefold() == wanted), None)
        ending = _last(wanted).removesuffix(_GGUF_SUFFIX)
        row = listed or next((row for row in self.rows if ending in {_last(one).casefold() for one in row.names}), None)
        if row is None:
            return None
        kind = tag or (row.gguf if listed and row.gguf else "").partition(":")[2] or _GGUF_DEFAULT
        try:
            precision = find_precision(kind).name
        except InvalidInput:  # a mix of somebody's own
            return None
        remark = f"its files are not here: sized as {row.facts.name} in {precision}, by the name of its repository"
        return replace(row.facts, name=name, precision=precision, in_gguf=True, remarks=(*row.facts.remarks, remark))

    def remark(self, name: str) -> str | None:
        """Why a name is not here, if known."""
        return _NO_SUCH_MODEL.get(name.strip().casefold())


# --- names as people type them ---

_WORD = re.compile(r"[a-z]+|\d+(?:\.\d+)*")
_UNSAID = frozenset({"instruct", "chat", "it", "hf", "meta", "gguf"})  # of names: people leave them out
_LEAST_LIKENESS = 0.72
_LONGEST_COMPARED = 64
_LEAST_PART = 3  # letters of a name, to be found in the middle of a word


class _Rank:
    """Of a name, smaller is better."""

    CALLED, RUN, WORDS, PART, LIKE = 0.0, 1.0, 2.0, 3.0, 4.0


def search(rows: Sequence[Row], text: str) -> list[Row]:
    """Models whose name has this in it, best first, then those whose name looks like it. No text: all, small ones first."""
    ranked = sorted((rank, _size(row), number) for number, row in enumerate(rows) if (rank := _rank(row, text)) is not None)
    return [rows[number] for _, _, number in ranked]


def resolve(rows: Sequence[Row], text: str) -> Row | None:
    """The model that must be meant: the only one called so, else the only one with this in its name. Never a typo's."""
    ranks = [(rank, row) for row in rows if (rank := _rank(row, text)) is not None and rank < _Rank.LIKE]
    best = min((rank for rank, _ in ranks), default=None)
    found = [row for rank, row in ranks if rank == best]
    return found[0] if len(found) == 1 and text.strip() else None


def _size(row: Row) -> tuple[bool, int]:
    embeds = row.facts.architecture is not None and row.facts.architecture.kind is ModelKind.ENCODER
    return embeds, row.facts.parameters


def _rank(row: Row, text: str) -> float | None:
    """None: it has nothing of it."""
    if not text.strip():
        return _Rank.PART
    return min((rank for name in row.names if (rank := _rank_name(name, text)) is not None), default=None)


def _rank_name(name: str, text: str) -> float | None:
    wanted, words, last = _words(text), _words(name), _words(_last(name))
    if not wanted:
        return None
    if wanted in (words, last) or (_said(wanted) and _said(wanted) in (_said(words), _said(last))):
        return _Rank.CALLED
    if any(_begins(wanted, words[start:]) for start in range(len(words))):
        return _Rank.RUN
    if _in_order(wanted, words):
        return _Rank.WORDS
    whole, part = "".join(words), "".join(wanted)
    if len(part) >= _LEAST_PART and part.isalpha() and part in whole:
        return _Rank.PART
    likeness = _likeness(_last(text), _last(name))
    return _Rank.LIKE + 1 - likeness if likeness >= _LEAST_LIKENESS else None


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _words(name: str) -> tuple[str, ...]:
    """`Qwen2.5-7B` is qwen 2.5 7 b, however it is written."""
    return tuple(_WORD.findall(name.casefold()))


def _said(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if word not in _UNSAID)


def _fits(wanted: str, word: str) -> bool:
    """Numbers are whole: 3 is not 3.1; letters may begin a word."""
    return word == wanted or (wanted.isalpha() and word.startswith(wanted))


def _begins(wanted: tuple[str, ...], words: tuple[str, ...]) -> bool:
    return len(wanted) <= len(words) and all(map(_fits, wanted, words))


def _in_order(wanted: tuple[str, ...], words: tuple[str, ...]) -> bool:
    left = iter(words)
    return all(any(_fits(one, word) for word in left) for one in wanted)


def _likeness(text: str, name: str) -> float:
    """Of what was typed to the name, or to its beginning, where no more was typed."""
    compared, best = SequenceMatcher(None, autojunk=False), 0.0
    for words in (_words, lambda one: _said(_words(one))):
        ours, theirs = "".join(words(text[:_LONGEST_COMPARED])), "".join(words(name))
        compared.set_seq2(ours)
        for other in {theirs, theirs[: len(ours) + 1]} if ours else ():
            compared.set_seq1(other)
            if compared.quick_ratio() > max(best, _LEAST_LIKENESS):
                best = max(best, compared.ratio())
    return best


def check_against(known: Catalogue, rows: Iterable[Row]) -> None:
    """Refuses a row that makes a known model smaller than it is, such as active parameters of a mixture of experts."""
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
    return Row(facts=facts, aliases=tuple(cells.get("aliases", "").split()), gguf=cells.get("gguf") or None)


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
        "gguf": row.gguf or "",
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
        raise InvalidInput(f"the catalogue file is not CSV: {error}", hint="Give a CSV file with one model a line.") from error


def _check_cells(cells: Mapping[str, str]) -> None:
    """Only what can be written to a line of a file and read back, and names that cannot be taken for a path."""
    for column, text in cells.items():
        if len(text) > _LONGEST_CELL or not text.isprintable():
            _refuse(f"{column} is longer than {_LONGEST_CELL} characters or more than one line of text")
    for name in (cells.get("id", ""), *cells.get("aliases", "").split()):
        if name and (len(name) > _LONGEST_NAME or name.lower().endswith(".gguf") or not _NAME.fullmatch(name)):
            raise InvalidInput(f"{name[:_LONGEST_NAME]!r} is not a model name", hint="Write organisation/model or model:tag.")


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
        _refuse(f"its memory {listed[:20]!r} is not a number of GB")
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
