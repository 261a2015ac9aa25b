"""Write the generated pages of docs/reference; with --check, fail when one is out of date.

Each page is a function that returns its text; register it in PAGES. A page says on top that it is generated.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from aimgpu.cli.main import cli
from aimgpu.cli.registry import SECTIONS
from aimgpu.cli.settings import INTERNAL, SETTINGS
from aimgpu.errors import all_errors
from aimgpu.hardware.amd.recording import summarize_amd
from aimgpu.hardware.nvidia.recording import summarize_nvidia
from aimgpu.hardware.recordings import RecordedDevice
from aimgpu.monitoring.metrics import METRICS, Kind

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
RECORDINGS = ROOT / "tests" / "recordings"
SUMMARIES: dict[str, Callable[[dict[str, Any]], tuple[RecordedDevice, ...]]] = {
    "amd": summarize_amd,
    "nvidia": summarize_nvidia,
}
_VARIABLE = re.compile(r"AIMGPU_[A-Z0-9]+(?:_[A-Z0-9]+)*")


def errors_page() -> str:
    rows = [f"| `{e.code}` | `{e.__name__}` | {e.exit_status} | {e.http_status} |" for e in all_errors()]
    head = ["# Errors", "", "Every error has a stable code; the command line and the HTTP API use the same ones.", ""]
    heads = ["| code | class | exit status | HTTP status |", "| --- | --- | --- | --- |"]
    foot = ["", "Beside these, wrong usage of a command ends with 2, and Ctrl-C with 130.", ""]
    return "\n".join([*head, *heads, *rows, *foot])


def settings_page() -> str:
    head = ["# Settings", "", "Environment variables that the command reads. Options of a command win over them.", ""]
    rows = [f"| `{setting.name}` | {setting.default} | {setting.meaning} |" for setting in SETTINGS]
    return "\n".join([*head, "| variable | default | meaning |", "| --- | --- | --- |", *rows, ""])


def cli_page() -> str:
    text = "Every command takes `--json` and `--help`. Errors go to stderr and end with [these statuses](errors.md)."
    lines = ["# Commands", "", text, ""]
    context = click.Context(cli, info_name="aimgpu")
    for section, entries in SECTIONS.items():
        if entries:
            lines += [f"## {section}", ""]
        for name in entries:
            command = cli.get_command(context, name)
            if command is not None:
                lines += _command_lines(command, click.Context(command, info_name=name, parent=context))
    return "\n".join(lines)


def supported_page() -> str:
    """Made from recordings of real machines alone, so that it claims nothing that was not seen."""
    rows = []
    for path in sorted(RECORDINGS.glob("*.json")):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        rows += [
            f"| {device.part} | {device.market_name} | {device.driver} | {device.memory_bytes} | {', '.join(device.layouts)} "
            f"| {', '.join(recorded['checked'])} | [{recorded['recorded']}](../../{path.relative_to(ROOT)}) |"
            for device in SUMMARIES[recorded["vendor"]](recorded)
        ]
    text = (
        "GPUs that this project was run on, each with a masked recording of what the device answered. `read` means devices, "
        "layouts and usage; what else was tried is named. A layout that is listed was told by the device; unless `partition` "
        "stands beside it, it was changed only on stand-ins that follow the vendor's rules. To add a GPU: "
        "`python tools/record_device.py`."
    )
    heads = [
        "| part | name | driver | bytes that can be given | layouts it tells | tried | recorded |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join(["# GPUs seen", "", text, "", *heads, *rows, ""])


def _command_lines(command: click.Command, context: click.Context) -> Iterator[str]:
    yield from (f"### `{context.command_path}`", "", "```", *_help_lines(command, context), "```", "")
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from _command_lines(child, click.Context(child, info_name=name, parent=context))


def _help_lines(command: click.Command, context: click.Context) -> list[str]:
    context.terminal_width = 100
    return [line.rstrip() for line in command.get_help(context).splitlines()]


def undocumented_settings() -> set[str]:
    """Variables named in the code that no table knows."""
    files = (path for folder in ("src", "native") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".h"))
    named = {name for path in files for name in _VARIABLE.findall(path.read_text())}
    return named - {setting.name for setting in SETTINGS} - set(INTERNAL)


def metrics_page() -> str:
    rows = []
    for metric in METRICS.values():
        shown = f"{metric.name}_total" if metric.kind is Kind.COUNTER else metric.name
        rows.append(f"| `{shown}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |")
    head = [
        "# Metrics",
        "",
        "`GET /metrics` on the daemon's port, in Prometheus's text format; from another machine with an API key as the bearer",
        'token. `gpu` and `partition` are stable ids. Simulated Devices carry `simulated="true"`.',
        "",
        "| metric | kind | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows, ""])


PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "settings.md": settings_page,
    "cli.md": cli_page,
    "supported.md": supported_page,
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, render in PAGES.items():
        path = REFERENCE / name
        text = f"<!-- Generated by tools/generate_reference.py; run `make docs`. -->\n{render()}"
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}. Run `make docs`.", file=sys.stderr)
    unknown = undocumented_settings()
    if unknown:
        print(f"not in src/aimgpu/cli/settings.py: {', '.join(sorted(unknown))}", file=sys.stderr)
    return 1 if stale or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
