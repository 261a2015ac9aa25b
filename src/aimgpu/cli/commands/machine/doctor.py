"""`aimgpu doctor`: what was found here, and what to do about what is missing. Needs no daemon."""

import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from json import dumps
from os import environ
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from aimgpu import wiring
from aimgpu.cli.doctor_checks import (
    Check,
    CheckStatus,
    count_problems,
    find_amd_tool,
    find_daemon,
    find_devices,
    find_engines,
    find_folder,
    find_gpus,
    find_named_program,
    find_newer_limits,
    find_port,
    find_troubles,
)
from aimgpu.cli.options import simulated_option
from aimgpu.cli.output import Cell, Column, examples, is_terminal, json_option, print_json, print_table, table_width
from aimgpu.cli.verify import Outcome, VerifyReport, verify
from aimgpu.cli.views.gpu_names import Rename, names_of
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.protocols import Availability, ServerEngine
from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.files import cache_directory
from aimgpu.hardware.amd.smi import AmdSmi
from aimgpu.hardware.protocols import DeviceReader, Hardware
from aimgpu.home import Home, find_home
from aimgpu.ledger import Owner

if TYPE_CHECKING:
    from aimgpu.domain import Device

_STYLES = {CheckStatus.OK: "green", CheckStatus.NOTE: "yellow", CheckStatus.PROBLEM: "bold red"}


@click.command(
    epilog=examples(
        "aimgpu doctor",
        "aimgpu doctor --port 9000",
        "aimgpu doctor --json",
        "aimgpu doctor --verify                        # try this machine's GPUs, write a report to send in",
        "sudo aimgpu doctor --verify --change-layouts  # also every partition mode; the present one is restored",
    )
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, envvar="AIMGPU_PORT", show_default=True, show_envvar=True)
@click.option("--host", default="127.0.0.1", envvar="AIMGPU_HOST", show_default=True, show_envvar=True)
@click.option("--verify", "trying", is_flag=True, help="Try the GPUs: reading, partition modes, a memory cap, a compute limit.")
@click.option(
    "--change-layouts", is_flag=True, help="With --verify: change to every partition mode, then restore the present one."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("aimgpu-verify.json"),
    show_default=True,
    help="With --verify: the file to write, with a recording of the GPUs that names neither machine nor user.",
)
@click.option(
    "--sysfs",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --verify: also try what a node agent needs that writes layouts there; `aimgpu k8s verify-node` does.",
)
@simulated_option
@json_option
def doctor(
    *,
    port: int,
    host: str,
    trying: bool,
    change_layouts: bool,
    report: Path,
    sysfs: Path | None,
    simulated: GpuChoice | None,
    as_json: bool,
) -> int:
    """Look at GPUs, drivers, engines, the port, permissions and space; report what to do. Fails when there is a problem."""
    if trying:
        home = find_home()
        found = _verify(wiring.choose_hardware(simulated or GpuChoice(), home), home, sysfs, change_layouts=change_layouts)
        return show_report(found, report, as_json=as_json)
    findings = list(_look(host, port))
    problems = count_problems(findings)
    if as_json:
        print_json({"findings": findings, "problems": problems})
    else:
        _print(findings, problems)
    return 1 if problems else 0


def _verify(hardware: Hardware, home: Home, sysfs: Path | None, *, change_layouts: bool) -> VerifyReport:
    """Nothing is changed unless asked for; then no daemon may start meanwhile."""
    owner = Owner.acquire(home.path) if change_layouts else None
    try:
        return verify(hardware, change_layouts=change_layouts, sysfs=sysfs)
    finally:
        if owner is not None:
            owner.release()


def show_report(found: VerifyReport, path: Path, *, as_json: bool) -> int:
    """Write it and print it; returns the exit status."""
    try:
        path.write_text(dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}", hint="Name another file with --report.") from error
    if as_json:
        print_json(found.to_json())
    else:
        _print_report(found, path)
    return 1 if found.failed else 0


def _print_report(found: VerifyReport, path: Path) -> None:
    names = ", ".join(found.gpus)
    click.echo(
        f"Ran on hardware: {names}." if found.real else f"Ran on a SIMULATION ({names}): this is no evidence for real GPUs."
    )
    styles = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.SKIPPED: "yellow"}
    rows = [(trial.gpu, trial.what, Cell(trial.outcome, styles[trial.outcome]), trial.text) for trial in found.trials]
    print_table([Column("GPU", fold=False), Column("TRIED", fold=False), Column("", fold=False), Column("FOUND")], rows)
    sending = "Please send it in with an issue: it has no serial numbers, host or process names." if found.real else ""
    click.echo(f"{found.failed} failed. Report: {path}. {sending}".rstrip())


def _look(host: str, port: int) -> Iterator[Check]:
    home = find_home()
    yield Check(
        topic="Python", verdict=CheckStatus.OK, text=f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield from find_gpus()
    backends = wiring.real_backends()
    rename = _names(backends)
    yield from find_devices(backends, rename)
    yield from find_troubles(backends, rename)
    yield from find_newer_limits()
    smi = AmdSmi()
    if smi.is_installed or any(Path("/sys/module/amdgpu").glob("*")):
        yield from find_amd_tool(smi)
    has_gpu = wiring.has_gpu()
    yield from find_engines(_probe_engines(has_gpu=has_gpu))
    if not has_gpu:
        yield from find_named_program(environ)
    yield find_daemon(home)
    yield find_port(host, port, home)
    yield from find_folder("state", home.path, private=True, setting="AIMGPU_HOME")
    yield from find_folder("cache", cache_directory(), private=False, setting="AIMGPU_CACHE")


def _names(readers: Iterable[DeviceReader]) -> Rename:
    """Numbered as everywhere: through all that can be read."""
    found: list[Device] = []
    for reader in readers:
        with suppress(AimGpuError):
            found.extend(reader.read_devices())
    return names_of(replace(device, index=number) for number, device in enumerate(found))


def _probe_engines(*, has_gpu: bool) -> dict[str, Availability]:
    engines = wiring.make_engines(LocalModelStore(), cache_directory(), has_gpu=has_gpu)
    return {name: engine.availability() for name, engine in engines.items() if not isinstance(engine, ServerEngine)}


def _print(findings: list[Check], problems: int) -> None:
    columns = [Column("", fold=False), Column("WHAT", fold=False), Column("FOUND"), Column("WHAT TO DO")]
    rows = [
        (Cell(finding.verdict, _STYLES[finding.verdict]), finding.topic, finding.text, finding.action or "")
        for finding in findings
    ]
    if is_terminal() and table_width(columns, rows) > get_terminal_size().columns:
        _print_narrow(findings)
    else:
        print_table(columns, rows)
    click.echo(f"{problems} problem{'' if problems == 1 else 's'}." if problems else "No problem found.")


def _print_narrow(findings: list[Check]) -> None:
    """Line by line, so that no path is cut in two."""
    width = max(len(finding.verdict) for finding in findings)
    for finding in findings:
        *bold, colour = _STYLES[finding.verdict].split()
        verdict = click.style(finding.verdict.ljust(width), fg=colour, bold=bool(bold) or None)
        click.echo(f"{verdict}  {finding.topic}: {finding.text}")
        if finding.action:
            click.echo(" " * (width + 2) + finding.action)
