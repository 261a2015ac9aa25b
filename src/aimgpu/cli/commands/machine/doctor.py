"""`aimgpu doctor`: what was found here, and what to do about what is missing. Needs no daemon."""

import platform
from collections.abc import Iterator

import click

from aimgpu import wiring
from aimgpu.cli.doctor_checks import (
    Check,
    CheckStatus,
    count_problems,
    find_daemon,
    find_devices,
    find_engines,
    find_folder,
    find_gpus,
    find_port,
    find_troubles,
)
from aimgpu.cli.output import Cell, Column, examples, json_option, print_json, print_table
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.protocols import Availability
from aimgpu.files import cache_directory
from aimgpu.home import find_home

_STYLES = {CheckStatus.OK: "green", CheckStatus.NOTE: "yellow", CheckStatus.PROBLEM: "bold red"}


@click.command(epilog=examples("aimgpu doctor", "aimgpu doctor --port 9000", "aimgpu doctor --json"))
@click.option("--port", type=click.IntRange(0, 65535), default=8080, envvar="AIMGPU_PORT", show_default=True, show_envvar=True)
@click.option("--host", default="127.0.0.1", envvar="AIMGPU_HOST", show_default=True, show_envvar=True)
@json_option
def doctor(port: int, host: str, as_json: bool) -> int:
    """Look at GPUs, drivers, engines, the port, permissions and space; say what to do. Fails when there is a problem."""
    findings = list(_look(host, port))
    problems = count_problems(findings)
    if as_json:
        print_json({"findings": findings, "problems": problems})
    else:
        _print(findings, problems)
    return 1 if problems else 0


def _look(host: str, port: int) -> Iterator[Check]:
    home = find_home()
    yield Check(
        topic="Python", verdict=CheckStatus.OK, text=f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield from find_gpus()
    backends = wiring.real_backends()
    yield from find_devices(backends)
    yield from find_troubles(backends)
    yield from find_engines(_probe_engines())
    yield find_daemon(home)
    yield find_port(host, port, home)
    yield from find_folder("state", home.path, private=True, setting="AIMGPU_HOME")
    yield from find_folder("cache", cache_directory(), private=False, setting="AIMGPU_CACHE")


def _probe_engines() -> dict[str, Availability]:
    engines = wiring.make_engines(LocalModelStore(), cache_directory(), has_gpu=wiring.has_gpu())
    return {name: engine.availability() for name, engine in engines.items()}


def _print(findings: list[Check], problems: int) -> None:
    columns = [Column("", fold=False), Column("WHAT", fold=False), Column("FOUND"), Column("WHAT TO DO")]
    rows = [
        (Cell(finding.verdict, _STYLES[finding.verdict]), finding.topic, finding.text, finding.action or "")
        for finding in findings
    ]
    print_table(columns, rows)
    click.echo(f"{problems} problem{'' if problems == 1 else 's'}." if problems else "No problem found.")
