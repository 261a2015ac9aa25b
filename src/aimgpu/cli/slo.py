"""`aimgpu slo`: promises, and whether they hold."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from aimgpu.cli.client import connect
from aimgpu.cli.home import find_home
from aimgpu.cli.output import Cell, Column, examples, json_option, print_json, print_table

COLUMNS = (
    Column("MODEL", fold=False),
    Column("CLASS", fold=False),
    Column("PROMISE"),
    Column("KEPT", right=True, fold=False),
    Column("BUDGET LEFT", right=True, fold=False),
    Column("BURN 5M", right=True, fold=False),
    Column("BURN 1H", right=True, fold=False),
)
_BURNING = 1.0
_UNKNOWN = "-"


@click.command(epilog=examples("aimgpu slo", "aimgpu slo chat", "aimgpu slo --json | jq '.models.chat.targets'"))
@click.argument("models", nargs=-1)
@json_option
def slo(models: tuple[str, ...], as_json: bool) -> None:
    """What was promised and what was kept over the last six hours. Failures count; a burn of 1 spends the budget exactly.

    A model gets a promise by `slo:` in the stack file.
    """
    scores = connect(find_home()).read_scores()
    if models:
        scores["models"] = {name: score for name, score in scores["models"].items() if name in models}
    if as_json:
        print_json(scores)
        return
    rows = list(_rows(scores))
    if rows:
        print_table(COLUMNS, rows)
    else:
        click.echo("Nothing was promised: add `slo: {ttft_p95: 500ms}` to a model of the stack file.")
    for device, pressure in scores["pressure"].items():
        click.secho(f"{device}: {pressure['reason']}", fg="yellow")


def _rows(scores: Mapping[str, Any]) -> Iterator[list[str | Cell]]:
    for name, score in scores["models"].items():
        for target in score["targets"]:
            yield [name, "all", *_target_cells(target)]
        for priority, of_class in score["classes"].items():
            if len(score["classes"]) > 1:
                for target in of_class["targets"]:
                    yield ["", priority, *_target_cells(target)]


def _target_cells(target: Mapping[str, Any]) -> list[str | Cell]:
    seconds = target["target_seconds"]
    promise = f"{target['target_part'] * 100:.4g}% {target['name'].removesuffix('_p95')}"
    if seconds is not None:
        promise += f" <= {format_seconds(seconds)}"
    kept, left = target["attainment"], target["budget_left"]
    broken = kept is not None and kept < target["target_part"]
    return [
        promise,
        Cell(_UNKNOWN if kept is None else f"{kept * 100:.2f}%", "bold red" if broken else "green"),
        Cell(_UNKNOWN if left is None else f"{left:.0%}", "bold red" if left is not None and left < 0 else ""),
        _burn(target["fast_burn"]),
        _burn(target["slow_burn"]),
    ]


def _burn(value: float | None) -> str | Cell:
    return _UNKNOWN if value is None else Cell(f"{value:.1f}x", "yellow" if value > _BURNING else "")


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"
