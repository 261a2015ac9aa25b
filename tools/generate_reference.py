"""Write the generated pages of docs/reference; with --check, fail when one is out of date.

Each page is a function that returns its text; register it in PAGES. A page says on top that it is generated.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from aimgpu import runtime
from aimgpu.cli.main import cli
from aimgpu.cli.registry import SECTIONS
from aimgpu.daemon.doors import NO, WHO, YES, Asked, Carried, judge, list_doors
from aimgpu.errors import all_errors
from aimgpu.gateway.dialects.table import OPERATIONS
from aimgpu.hardware.amd.recording import summarize_amd
from aimgpu.hardware.known_gpus import SOURCES, KnownGpu, known_gpus
from aimgpu.hardware.nvidia.recording import summarize_nvidia
from aimgpu.hardware.recordings import RecordedDevice
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.monitoring.metrics import METRICS, OPERATOR_METRICS, MetricKind
from aimgpu.placement import ReasonCode
from aimgpu.settings import INTERNAL, SETTINGS
from aimgpu.sizing import Row, built_in
from aimgpu.sizing.catalogue import NO_SUCH_MODELS
from aimgpu.web.doors import Door

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tools import chart_values, entry_points, json_answers, measurements  # noqa: E402 the path is set above

REFERENCE = ROOT / "docs" / "reference"
RECORDINGS = ROOT / "tests" / "recordings"
SUMMARIES: dict[str, Callable[[dict[str, Any]], tuple[RecordedDevice, ...]]] = {
    "amd": summarize_amd,
    "nvidia": summarize_nvidia,
}
_LAYOUTS_SHOWN = 8
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
    text = "Every command takes `--json` ([keys](json.md)) and `--help`. Errors go to stderr, with [these statuses](errors.md)."
    more = "0 is success, 130 follows Ctrl-C, and 1 also an output that nothing reads any more, as after `aimgpu ps | head -1`."
    lines = ["# Commands", "", f"{text} {more}", ""]
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
            f"| {device.product} | {device.market_name} | {device.driver} | {device.memory_bytes} | {', '.join(device.layouts)}"
            f" | {', '.join(recorded['checked'])} | [{recorded['recorded']}](../../{path.relative_to(ROOT)}) |"
            for device in SUMMARIES[recorded["vendor"]](recorded)
        ]
    text = (
        "GPUs that this project was run on, each with a masked recording of what the device answered. `read` means devices, "
        "layouts and usage; what else was tried is named. A listed layout was reported by the device; unless `partition` "
        "stands beside it, it was changed only on stand-ins that follow the vendor's rules. To add a GPU: "
        "`python tools/record_device.py`, or with `--report` from the report of `aimgpu doctor --verify`."
    )
    heads = [
        "| product | name | driver | bytes that can be granted | layouts it reports | tried | recorded |",
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
    for metric in (*METRICS.values(), *OPERATOR_METRICS):
        shown = f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name
        rows.append(f"| `{shown}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |")
    head = [
        "# Metrics",
        "",
        "`GET /metrics` on the daemon's port, in Prometheus's text format; once there is an API key, with one as the bearer",
        'token. `gpu` and `partition` are stable ids. Simulated GPUs carry `simulated="true"`.',
        "`aim_operator_*` are those of the operator on Kubernetes, at its port 9403.",
        "",
        "| metric | kind | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows, ""])


def doors_page() -> str:
    """Made from the routes themselves; tests/daemon/test_doors.py asks each of them under all these circumstances."""
    shown = {YES: "yes", WHO: "401", NO: "403"}
    head = [
        "# Who is let in",
        "",
        "Every path of the daemon's port has one door. The first table shows what each door lets through. `401` asks for a",
        "credential, `403` refuses. *A limited key* has a rate, a priority or a list of models. *The link* is the one that",
        "`aimgpu web` prints: it works once, and its cookie counts for the user who opened it.",
        "*Another host* means that the `Host` header names none of this machine's names: its addresses, `localhost`, its host",
        "name, and those in `AIMGPU_HOSTS`. *Another site* means that the browser names another origin. *Elsewhere* means",
        "another machine, or a request that a proxy passed on. Requests of the page carry `X-Aimgpu-Page: 1`; without it",
        "`judge`, and `change` with the link, answer 403.",
        "",
    ]
    carried = [(False, Carried.NONE), (False, Carried.LINK), (False, Carried.TOKEN)]
    carried += [(True, one) for one in Carried]
    names = [f"{one.value}, {'with keys' if keys else 'no keys made'}" for keys, one in carried]
    rows = []
    for door in Door:
        for name, changes in _PLACES.items():
            asked = (Asked(credential=one, keys=keys, **changes) for keys, one in carried)
            rows.append(f"| `{door}` | {name} | " + " | ".join(shown[judge(door, one)] for one in asked) + " |")
    table = [f"| door | from | {' | '.join(names)} |", "| --- | --- " + "| --- " * len(names) + "|", *rows, ""]
    foot = [
        "With a limited key `metrics` shows the models of that key. `models` answers a limited key for its models only.",
        "The page of a cluster has doors of its own: see [SECURITY.md](../../SECURITY.md).",
        "",
        "| method | path | door |",
        "| --- | --- | --- |",
        *(f"| {one.method} | `{one.path}` | `{one.door}` |" for one in list_doors()),
        "",
    ]
    return "\n".join([*head, *table, *foot])


_PLACES: dict[str, dict[str, bool]] = {
    "this machine": {},
    "another host": {"own_host": False},
    "another site": {"own_site": False},
    "elsewhere": {"local": False},
}


def models_page() -> str:
    rows = sorted(built_in().rows, key=lambda row: row.facts.name.lower())
    head = [
        "# Known models",
        "",
        f"{len(rows)} models that `aimgpu size` knows by name, offline. A name matches exactly, without regard to case;",
        "aliases are other names of the same weights. Shapes are those of each repository's config.json, linked; parameters",
        "are all that must be in memory. `aimgpu catalogue show MODEL` has every number.",
        "",
        "| model | parameters | active | precision | layers | KV heads x size | context | aliases |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    absent = [
        "## Names that no model has",
        "",
        "Lists that circulate name them. They are refused, and no other model answers to them.",
        "",
        *(f"- `{name}`: {why}" for name, why in NO_SUCH_MODELS.items()),
    ]
    return "\n".join([*head, *(_model_line(row) for row in rows), "", *absent, ""])


def gpus_page() -> str:
    """A GPU is marked as seen only where there is a recording of one."""
    head = [
        "# GPU figures",
        "",
        "What `--gpu PRODUCT` and `gpus: {simulated: PRODUCT}` stand for where the machine has no such GPU.",
        'Any spelling of the name is understood: "RTX 4090", "4090", "GeForce RTX 4060 Ti 16GB".',
        "Where a real device answers, its own figures win. Bytes are those that the driver reports in all.",
        "What a display takes of them is memory of others: it is measured on the device and never granted.",
        "**Only GPUs marked as seen were run on** ([recordings](supported.md)); figures of the others are from documents.",
        "",
        "| product | name | memory bytes | GiB | units | layouts | source | seen |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    seen = {device.product for recorded in _recordings() for device in SUMMARIES[recorded["vendor"]](recorded)}
    foot = ["", "Sources:", "", *(f"- `{key}`: {text}." for key, text in SOURCES.items())]
    return "\n".join([*head, *(_gpu_line(gpu, seen) for gpu in known_gpus()), *foot, ""])


def _recordings() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDINGS.glob("*.json"))]


def _model_line(row: Row) -> str:
    facts, shape = row.facts, row.facts.architecture
    active = f"{facts.active_parameters / 1e9:.1f}B" if facts.active_parameters else ""
    if shape is None:
        return (
            f"| {facts.name} | {facts.parameters / 1e9:.2f}B | {active} | {facts.precision} | | | | {', '.join(row.aliases)} |"
        )
    cache = f"MLA {shape.kv_lora_rank}+{shape.rope_head_dim}" if shape.kv_lora_rank else f"{shape.kv_heads} x {shape.head_dim}"
    link = f"[{facts.name}]({facts.source.removeprefix('catalogue: ')})"
    numbers = f"{facts.parameters / 1e9:.2f}B | {active} | {facts.precision} | {shape.layers} | {cache} | {shape.max_context}"
    return f"| {link} | {numbers} | {', '.join(row.aliases)} |"


def _gpu_line(gpu: KnownGpu, seen: set[str]) -> str:
    names = [layout.name for layout in SimulatedHardware([(gpu.product, 1)]).read_devices()[0].layouts]
    more = len(names) - _LAYOUTS_SHOWN
    shown = ", ".join(names[:_LAYOUTS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    shown += f" ({gpu.division})" if gpu.division else ""
    gib = f"{gpu.memory_bytes / 2**30:.2f}"
    name = ", ".join((gpu.market_name, *gpu.aliases))
    figures = f"{gpu.memory_bytes} | {gib} | {gpu.compute_units} | {shown} | {gpu.source}"
    return f"| {gpu.product} | {name} | {figures} | {'yes' if gpu.product in seen else ''} |"


def refusals_page() -> str:
    text = (
        "When a model does not fit, every GPU that was looked at gives its reason: a stable code, a sentence with the numbers, "
        "and the bytes that are short. `aimgpu plan`, `aimgpu explain` and the API show them."
    )
    rows = [f"| `{code.value}` | {code.meaning} |" for code in ReasonCode]
    return "\n".join(["# Why a GPU is refused", "", text, "", "| code | what it means |", "| --- | --- |", *rows, ""])


def runtime_page() -> str:
    """The library, from its docstrings and signatures."""
    lines = ["# The library", "", *(inspect.getdoc(runtime) or "").splitlines(), ""]
    lines += ["[examples/runtime_library.py](../../examples/runtime_library.py) uses every part of it.", ""]
    for name in sorted(runtime.__all__):
        lines += _class_lines(name, getattr(runtime, name))
    return "\n".join(lines)


def _class_lines(name: str, kind: type) -> list[str]:
    lines = [f"## {name}", "", inspect.getdoc(kind) or "", ""]
    if issubclass(kind, StrEnum):
        return [*lines, f"Values: {', '.join(f'`{value}`' for value in kind)}.", ""]
    if is_dataclass(kind):
        types = {field.name: _plain(str(field.type)).replace("|", "\\|") for field in fields(kind)}
        rows = [f"| `{name}` | `{shown}` |" for name, shown in types.items()]
        lines += ["| field | type |", "| --- | --- |", *rows, ""]
    elif not getattr(kind, "_is_protocol", False):
        lines += [f"`{name}{_signature(kind)}`", ""]
    for member, value in sorted(vars(kind).items()):
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if member.startswith("_") or member == "model_ids":
            continue
        if isinstance(value, property):
            lines += [f"- `{member}`: {_first_line(value)}"]
        elif inspect.isfunction(function):
            lines += [f"- `{member}{_signature(function)}`: {_first_line(function)}"]
    return [*lines, ""] if lines[-1] else lines


def _signature(function: Callable[..., object]) -> str:
    text = _plain(str(inspect.signature(function)))
    return re.sub(r"\((?:self|cls)(?:, )?", "(", text)


def _plain(annotation: str) -> str:
    """Types without the modules they live in, defaults as they are written."""
    shown = re.sub(r"<\w+\.(\w+): ('[^']*'|\d+)>", r"\2", annotation)
    shown = re.sub(r"<(?:built-in )?function (\w+)>", r"\1", shown)
    shown = re.sub(r"<(?:class|enum) '([^']*)'>", r"\1", shown)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", shown).replace("'", '"')


def _first_line(value: object) -> str:
    """The whole docstring on one line: a reader of the list wants the rules too."""
    return " ".join((inspect.getdoc(value) or "").split())


def http_paths_page() -> str:
    """From the table that the gateway answers by."""
    head = ["# HTTP paths", "", "What the gateway answers; see [HTTP](http.md) for errors and headers.", ""]
    own = [
        "| `GET /v1/models` | The models, with `state` and `simulated`; as OpenAI's and Anthropic's clients read them. |",
        "| `GET /v1/models/{id}` | One model. |",
        "| `POST /v1/chat/completions` | Chat. |",
        "| `POST /v1/completions` | Complete a text. |",
        "| `POST /v1/embeddings` | Embed texts. |",
        "| `GET /v1/openapi.json` | This list, for programs. |",
    ]
    rows = [f"| `{one.method} {one.path}` | {one.summary} |" for one in OPERATIONS]
    return "\n".join([*head, "| path | what |", "| --- | --- |", *own, *rows, ""])


PAGES: dict[str, Callable[[], str]] = {
    "http-paths.md": http_paths_page,
    "doors.md": doors_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "refusals.md": refusals_page,
    "settings.md": settings_page,
    "cli.md": cli_page,
    "chart-values.md": chart_values.page,
    "supported.md": supported_page,
    "models.md": models_page,
    "gpus.md": gpus_page,
    "measurements.md": measurements.page,
    "runtime.md": runtime_page,
    "isolation-entry-points.md": entry_points.page,
    "json.md": json_answers.page,
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
        print(f"not in src/aimgpu/settings.py: {', '.join(sorted(unknown))}", file=sys.stderr)
    incomplete = chart_values.faults()
    for fault in incomplete:
        print(fault, file=sys.stderr)
    return 1 if stale or unknown or incomplete else 0


if __name__ == "__main__":
    sys.exit(main())
