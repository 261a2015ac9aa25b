"""`aimgpu top`: what happens now, in the terminal."""

import sys
import time
from collections.abc import Mapping
from json import dumps
from typing import Any

import click

from aimgpu.cli.client import DaemonClient, connect
from aimgpu.cli.commands.watch.slo import format_seconds, read_targets
from aimgpu.cli.output import Cell, Column, examples, json_option, print_table
from aimgpu.cli.views.status import STATE_STYLES, print_simulated, sharing_lines
from aimgpu.home import find_home
from aimgpu.units import format_bytes

_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
_UNKNOWN = "-"
_MODELS = (
    Column("MODEL", fold=False),
    Column("STATE", fold=False),
    Column("REQ/S", right=True, fold=False),
    Column("TOK/S", right=True, fold=False),
    Column("RUNNING", right=True, fold=False),
    Column("WAITING H/M/L", right=True, fold=False),
    Column("TTFT P95", right=True, fold=False),
    Column("TPOT P95", right=True, fold=False),
    Column("FAILED", right=True, fold=False),
    Column("RECALLED", right=True, fold=False),
    Column("BURN", right=True, fold=False),
)
_GPUS = (
    Column("GPU", fold=False),
    Column("NAME"),
    Column("LAYOUT", fold=False),
    Column("GRANTED", right=True, fold=False),
    Column("MEASURED", right=True, fold=False),
    Column("FREE", right=True, fold=False),
)


@click.command(epilog=examples("aimgpu top", "aimgpu top --count 1", "aimgpu top --json --interval 5"))
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many looks. [until Ctrl-C]")
@json_option
def top(interval: float, count: int | None, as_json: bool) -> None:
    """Requests, queues, latencies and GPUs, live. Rates and percentiles are over the last five minutes.

    When the output is no terminal, each look follows the last; with --json, one line each.
    """
    client = connect(find_home())
    looks = 0
    while True:
        _show(client, as_json=as_json)
        looks += 1
        if looks == count:
            return
        time.sleep(interval)


def _show(client: DaemonClient, *, as_json: bool) -> None:
    status, scores = client.read_status(), client.read_scores()
    if as_json:
        click.echo(dumps({"gpus": status["gpus"], **scores}))
    else:
        if sys.stdout.isatty():
            click.echo(_CLEAR, nl=False)
        print_simulated(status)
        print_table(_MODELS, [_model_row(name, score) for name, score in scores["models"].items()])
        click.echo()
        print_table(_GPUS, [_gpu_row(gpu) for gpu in status["gpus"]])
        for line in sharing_lines(scores.get("sharing", {})):
            click.echo(line)
        for device, pressure in scores["pressure"].items():
            click.secho(f"{device}: {pressure['reason']}", fg="yellow")
    sys.stdout.flush()


def _model_row(name: str, score: Mapping[str, Any]) -> list[str | Cell]:
    window = score["windows"][0]
    waiting = score["waiting"]
    burns = [target["fast_burn"] for _, target in read_targets(score) if target["fast_burn"] is not None]
    worst = max(burns, default=None)
    return [
        name,
        Cell(score["state"], STATE_STYLES.get(score["state"], "")),
        _rate(window["requests_per_second"]),
        _rate(window["output_tokens_per_second"]),
        f"{score['in_flight']}/{score['slots']}",
        f"{waiting['high']}/{waiting['medium']}/{waiting['low']}",
        _percentile(window, "ttft"),
        _percentile(window, "tpot"),
        str(window["failures"]),
        str(score["recalls"]),
        _UNKNOWN if worst is None else Cell(f"{worst:.1f}x", "bold red" if worst > 1 else "green"),
    ]


def _gpu_row(gpu: Mapping[str, Any]) -> list[str | Cell]:
    measured = gpu.get("measured_bytes")
    return [
        str(gpu["id"]),
        str(gpu["name"]),
        str(gpu["layout"]),
        format_bytes(gpu["granted_bytes"]),
        _UNKNOWN if measured is None else format_bytes(measured),
        format_bytes(gpu["free_bytes"]),
    ]


def _rate(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1f}"


def _percentile(window: Mapping[str, Any], measure: str) -> str:
    value = window["percentiles"].get(measure, {}).get("p95_seconds")
    return _UNKNOWN if value is None else format_seconds(value)
