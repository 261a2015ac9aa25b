"""`aimgpu top`: what the page shows, in the terminal."""

import sys
import time
from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

import click

from aimgpu.cli.client import DaemonClient
from aimgpu.cli.commands.watch.slo import format_seconds
from aimgpu.cli.options import INTERVAL
from aimgpu.cli.output import Cell, Column, clear_screen, examples, json_option, print_table, wants_colour
from aimgpu.cli.running_models import connect_or_name_left
from aimgpu.cli.views.gpu_bar import draw_gpu
from aimgpu.cli.views.status import STATE_STYLES, print_simulated, sharing_lines
from aimgpu.home import find_home
from aimgpu.units import format_bytes

_UNKNOWN = "-"
_LOW_BUDGET = 0.25
_MODELS = (
    Column("MODEL", fold=False),
    Column("STATE", fold=False),
    Column("WHERE", fold=False, drop=1),
    Column("LEVEL", fold=False, drop=3),
    Column("GRANTED", right=True, fold=False),
    Column("MEASURED", right=True, fold=False, drop=4),
    Column("REQ/S", right=True, fold=False),
    Column("TOK/S", right=True, fold=False, drop=4),
    Column("RUN", right=True, fold=False),
    Column("WAIT H/M/L", right=True, fold=False, drop=2),
    Column("TTFT P95", right=True, fold=False),
    Column("TPOT P95", right=True, fold=False, drop=4),
    Column("FAILED", right=True, fold=False, drop=5),
    Column("BUDGET", right=True, fold=False),
    Column("BURN", right=True, fold=False, drop=6),
    Column("SLEEPS IN", right=True, fold=False, drop=7),
)


@click.command(epilog=examples("aimgpu top", "aimgpu top --count 1", "aimgpu top --json --interval 5"))
@click.option("--interval", type=INTERVAL, default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many looks. [until Ctrl-C]")
@json_option
def top(interval: float, count: int | None, as_json: bool) -> None:
    """GPUs with the shares of every model, requests, queues, latencies and error budgets, live.

    Rates and percentiles are over the last five minutes, budgets over six hours; the tightest promise is shown. When the output
    is not a terminal, each look follows the last; with --json, one line each.
    """
    client = connect_or_name_left(find_home())
    looks = 0
    while True:
        _show(client, as_json=as_json)
        looks += 1
        if looks == count:
            return
        time.sleep(interval)


def _show(client: DaemonClient, *, as_json: bool) -> None:
    state, scores = client.read_state(), client.read_scores()
    if as_json:
        click.echo(dumps({**scores, **{name: section for name, section in state.items() if name not in ("queue", "models")}}))
    else:
        clear_screen()
        print_simulated(client.read_status())
        for gpu in state["gpus"]:
            for line in draw_gpu(gpu, colour=wants_colour()):
                click.echo(line)
        click.echo()
        print_table(_MODELS, [_model_row(model, state["gpus"]) for model in state["models"]])
        for line in _remarks(state, scores):
            click.secho(line, fg="yellow")
    sys.stdout.flush()


def _remarks(state: Mapping[str, Any], scores: Mapping[str, Any]) -> Sequence[str]:
    reasons = [f"{model['name']}: {model['reason']}" for model in state["models"] if model["reason"]]
    pressure = [f"{device}: {one['reason']}" for device, one in state["queue"]["pressure"].items()]
    return [*sharing_lines(scores.get("sharing", {})), *reasons, *pressure]


def _model_row(model: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> list[str | Cell]:
    traffic = model["traffic"] or {}
    waiting = traffic.get("waiting", {})
    return [
        model["name"],
        Cell(_state(model), STATE_STYLES.get(model["state"], "")),
        _places(model, gpus),
        model["level"] or _UNKNOWN,
        format_bytes(model["granted_bytes"], up=True) if model["granted_bytes"] else _UNKNOWN,
        _UNKNOWN if model["measured_bytes"] is None else format_bytes(model["measured_bytes"], up=True),
        _rate(traffic.get("requests_per_second")),
        _rate(traffic.get("tokens_per_second")),
        f"{traffic['running']}/{traffic['slots']}" if traffic else _UNKNOWN,
        "/".join(str(waiting[name]) for name in ("high", "medium", "low")) if waiting else _UNKNOWN,
        _latency(traffic.get("ttft_p95_seconds"), _target(model, "ttft")),
        _latency(traffic.get("tpot_p95_seconds"), _target(model, "tpot")),
        str(traffic.get("failures", _UNKNOWN)),
        _budget(model["targets"]),
        _burn(model["targets"]),
        _sleeps_in(model),
    ]


def _state(model: Mapping[str, Any]) -> str:
    return str(model["state"]) + ("" if model["percent"] is None else f" {model['percent']}%")


def _places(model: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> str:
    numbers = {gpu["id"]: gpu["index"] for gpu in gpus}
    places = [place for instance in model["instances"] for place in instance["places"]]
    found = list(dict.fromkeys(f"gpu{numbers.get(place['gpu'], '?')}/{place['partition']}" for place in places))
    return ", ".join(found[:2]) + (f" +{len(found) - 2}" if len(found) > 2 else "") if found else _UNKNOWN  # noqa: PLR2004


def _target(model: Mapping[str, Any], measure: str) -> float | None:
    found = [one["target_seconds"] for one in model["targets"] if one["name"].startswith(measure) and one["target_seconds"]]
    return min(found, default=None)


def _latency(seconds: float | None, target: float | None) -> str | Cell:
    if seconds is None:
        return _UNKNOWN
    text = format_seconds(seconds)
    return text if target is None else Cell(f"{text}/{format_seconds(target)}", "green" if seconds <= target else "bold red")


def _budget(targets: Sequence[Mapping[str, Any]]) -> str | Cell:
    left = min((one["budget_left"] for one in targets if one["budget_left"] is not None), default=None)
    if left is None:
        return _UNKNOWN
    return Cell(f"{left:.0%}", "bold red" if left <= 0 else "yellow" if left < _LOW_BUDGET else "green")


def _burn(targets: Sequence[Mapping[str, Any]]) -> str | Cell:
    worst = max((one["fast_burn"] for one in targets if one["fast_burn"] is not None), default=None)
    return _UNKNOWN if worst is None else Cell(f"{worst:.1f}x", "bold red" if worst > 1 else "green")


def _sleeps_in(model: Mapping[str, Any]) -> str:
    if model["sleep_at"] is None:
        return _UNKNOWN
    minutes, seconds = divmod(max(0, round(model["sleep_at"] - time.time())), 60)
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def _rate(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1f}"
