"""`aimgpu slo`: promises, and whether they hold."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.output import Cell, Column, examples, json_option, print_json, print_table
from aimgpu.cli.running_models import complete_running, connect_or_name_left, deployed_names
from aimgpu.errors import UnknownDeployment
from aimgpu.home import find_home
from aimgpu.units import format_duration_ms

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


@click.command(
    epilog=examples(
        "aimgpu slo", "aimgpu slo chat", "aimgpu slo --on kubernetes", "aimgpu slo --json | jq '.models.chat.targets'"
    )
)
@click.argument("models", nargs=-1, shell_complete=complete_running)
@on_option
@json_option
def slo(models: tuple[str, ...], as_json: bool, cluster: ClusterTarget | None) -> None:
    """What was promised and what was kept over the last six hours. Failures count; a burn of 1 spends the budget exactly.

    A model gets a promise by `slo:` in the stack file. The last line has the bounds of the queue, which `queue:` there sets.
    """
    scores, known = _read_here(models) if cluster is None else _read_in_cluster(cluster, models)
    if models:
        if unknown := [name for name in models if name not in scores["models"] and name not in known]:
            raise UnknownDeployment.of(*unknown, known={*scores["models"], *known})
        scores["models"] = {name: score for name, score in scores["models"].items() if name in models}
    if as_json:
        print_json(scores)
        return
    rows = list(_rows(scores))
    if rows:
        print_table(COLUMNS, rows)
    else:
        named = f" to {', '.join(models)}" if models else ""
        click.echo(f"Nothing was promised{named}: add `slo: {{ttft_p95: 500ms}}` to a model of the stack file.")
    for device, pressure in scores["pressure"].items():
        click.secho(f"{device}: {pressure['reason']}", fg="yellow")
    click.echo(describe_queue(scores["queue"]))


def _read_here(models: tuple[str, ...]) -> tuple[dict[str, Any], set[str]]:
    """The scores, and the names of all models where some without a score are asked for."""
    client = connect_or_name_left(find_home())
    scores = client.read_scores()
    return scores, deployed_names(client.read_status()) if set(models) - scores["models"].keys() else set()


def _read_in_cluster(target: ClusterTarget, models: tuple[str, ...]) -> tuple[dict[str, Any], set[str]]:
    from aimgpu.cli.commands.cluster.serving import (  # noqa: PLC0415 -- a third of a second to import
        read_cluster_names,
        read_cluster_scores,
    )

    scores = read_cluster_scores(target)
    return scores, read_cluster_names(target) if set(models) - scores["models"].keys() else set()


def describe_queue(queue: Mapping[str, Any]) -> str:
    """The stated bounds, in one line."""
    waits = queue["longest_wait_seconds"].items()
    text = "Waits at most: " + ", ".join(f"{name} {format_duration_ms(round(seconds * 1000))}" for name, seconds in waits)
    text += "; waiting at most, for each model: " + ", ".join(f"{name} {most}" for name, most in queue["most_queued"].items())
    running = ", ".join(f"{gpu} {count}" for gpu, count in queue["running"].items())
    return text + (f"; at once on a GPU: {queue['per_gpu']} (now {running or 0})" if queue["per_gpu"] else "")


def read_targets(score: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every promise of a model once, with whom it was made to."""
    own = {name: one for name, one in score["classes"].items() if one["own"]}
    for target in score["targets"]:
        yield "others" if own else "all", target
    for name, one in own.items():
        for target in one["targets"]:
            yield name, target


def _rows(scores: Mapping[str, Any]) -> Iterator[list[str | Cell]]:
    for name, score in scores["models"].items():
        shown = name
        for caller_class, target in (*read_targets(score), *_shared_by_class(score)):
            yield [shown, caller_class, *_target_cells(target)]
            shown = ""


def _shared_by_class(score: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """How a promise that several classes share is kept in each."""
    shared = {name: one for name, one in score["classes"].items() if not one["own"]}
    for name, one in shared.items() if len(shared) > 1 else ():
        for target in one["targets"]:
            yield name, target


def _target_cells(target: Mapping[str, Any]) -> list[str | Cell]:
    kept, left = target["attainment"], target["budget_left"]
    broken = kept is not None and kept < target["target_part"]
    return [
        target["promise"],
        Cell(f"too few: {target['judged']}", "dim")
        if kept is None
        else Cell(f"{kept * 100:.2f}%", "bold red" if broken else "green"),
        Cell(_UNKNOWN if left is None else f"{left:.0%}", "bold red" if left is not None and left < 0 else ""),
        _burn(target["fast_burn"]),
        _burn(target["slow_burn"]),
    ]


def _burn(value: float | None) -> str | Cell:
    return _UNKNOWN if value is None else Cell(f"{value:.1f}x", "yellow" if value > _BURNING else "")


def format_seconds(seconds: float) -> str:
    """Three figures, in the unit that suits."""
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"
