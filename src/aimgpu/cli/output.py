"""The one way commands print: a table for people (rich on a terminal, plain elsewhere), or JSON."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from json import dumps
from os import environ
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, TextIO, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(slots=True)
class OutputState:
    """What the root context carries: `main` must know how to print an error."""

    as_json: bool


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    header: str
    right: bool = False  # numbers
    fold: bool = True  # on a narrow terminal: wrap, rather than be kept whole
    drop: int = 0  # on a narrow terminal: left out, the highest number first; 0 is never left out


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a rich style ("green", "bold red") that a terminal shows and a pipe does not."""

    text: str
    style: str


def json_option(function: Function) -> Function:
    """Add `--json`; the command gets it as `as_json`."""
    option = click.option("--json", "as_json", is_flag=True, is_eager=True, callback=_note_json, help="Print JSON.")
    return option(function)


def _note_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    state = ctx.find_root().obj
    if value and isinstance(state, OutputState):
        state.as_json = True
    return value


def examples(*lines: str) -> str:
    """The epilog of a command: examples that stay on their own lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """One JSON document on stdout, on one line without `indent`; dataclasses, enums, paths and sets become what JSON knows."""
    click.echo(dumps(value, default=_to_plain, indent=indent))


def print_error(error: Mapping[str, str | None], *, as_json: bool = False) -> None:
    """On stderr: what is wrong and what to do about it."""
    if as_json:
        click.echo(dumps({"error": error}), err=True)
        return
    click.echo(f"{click.style('error:', fg='red', bold=True)} {error['message']}", err=True, color=chosen_colour())
    if error["hint"]:
        click.echo(f"{click.style('hint:', fg='yellow')} {error['hint']}", err=True, color=chosen_colour())


def chosen_colour() -> bool | None:
    """Never where NO_COLOR is set (no-color.org), which click does not look at; else click decides."""
    return False if environ.get("NO_COLOR") else None


def print_table(columns: Sequence[Column | str], rows: Iterable[Sequence[str | Cell]], *, title: str | None = None) -> None:
    """A table on stdout. No rows: the header alone."""
    heads = [Column(column) if isinstance(column, str) else column for column in columns]
    cells = [[Cell(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
    if sys.stdout.isatty():
        heads, cells, left_out = _fit(heads, cells, get_terminal_size().columns)
        _print_rich_table(heads, cells, title)
        if left_out:
            click.echo(f"Not shown on a terminal this narrow: {', '.join(left_out)} (--json has everything).")
    else:
        for line in _plain_lines(heads, cells, title):
            click.echo(line)


def table_width(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]]) -> int:
    """Characters across, when nothing is folded."""
    texts = [[column.header for column in columns], *([c if isinstance(c, str) else c.text for c in row] for row in rows)]
    return sum(max(map(len, cells)) + 2 for cells in zip(*texts, strict=True)) - 2


def wants_colour(stream: TextIO | None = None) -> bool:
    """A terminal whose user did not switch colours off (no-color.org)."""
    return is_terminal(stream) and not environ.get("NO_COLOR")


def clear_screen() -> None:
    """Before the next look at something that is shown live; nothing in a pipe."""
    if is_terminal():
        click.echo("\x1b[H\x1b[2J\x1b[3J", nl=False, color=True)


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person reads along."""
    return (stream or sys.stdout).isatty()


def _fit(columns: list[Column], rows: list[list[Cell]], width: int) -> tuple[list[Column], list[list[Cell]], list[str]]:
    """The table without as many droppable columns as it takes to fit, and the headers of those."""
    left_out: list[str] = []
    while table_width(columns, rows) > width and (most := max(column.drop for column in columns)):
        kept = [number for number, column in enumerate(columns) if column.drop != most]
        left_out += [column.header for column in columns if column.drop == most]
        columns, rows = [columns[number] for number in kept], [[row[number] for number in kept] for row in rows]
    return columns, rows, left_out


def _print_rich_table(columns: list[Column], rows: list[list[Cell]], title: str | None) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 -- rich costs 80 ms, only tables on a terminal need it
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, header_style="bold")
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 1, 0, 0)
    for column in columns:
        table.add_column(column.header, justify="right" if column.right else "left", no_wrap=not column.fold, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    Console(file=sys.stdout, highlight=False).print(table)


def _plain_lines(columns: list[Column], rows: list[list[Cell]], title: str | None) -> Iterable[str]:
    widths = [max([len(column.header), *(len(row[index].text) for row in rows)]) for index, column in enumerate(columns)]
    if title:
        yield title
    yield _plain_line(columns, widths, [column.header for column in columns])
    yield from (_plain_line(columns, widths, [cell.text for cell in row]) for row in rows)


def _plain_line(columns: list[Column], widths: list[int], texts: list[str]) -> str:
    parts = (
        text.rjust(width) if column.right else text.ljust(width)
        for column, width, text in zip(columns, widths, texts, strict=True)
    )
    return "  ".join(parts).rstrip()


def _to_plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "items"):
        return dict(value.items())
    raise TypeError(f"{type(value).__name__} has no JSON form")
