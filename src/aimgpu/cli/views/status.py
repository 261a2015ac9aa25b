"""What the daemon says about itself, for people: a table of instances, where to call, and a line to paste."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from aimgpu.cli.output import Cell, Column, print_table
from aimgpu.units import format_bytes

STATE_STYLES = {
    "ready": "green",
    "loading": "yellow",
    "queued": "yellow",
    "draining": "yellow",
    "sleeping": "cyan",
    "running": "green",
    "ended": "cyan",
    "failed": "bold red",
    "absent": "red",
}
_ONLY_WIDE = ("ENGINE", "REQUESTS", "LEVEL", "MECHANISM", "ENDPOINT")
_LONGEST_COMMAND = 40
_PRIORITIES = ("high", "medium", "low")
COLUMNS = (
    Column("NAME", fold=False),
    Column("MODEL"),
    Column("ENGINE", fold=False, drop=3),
    Column("GPU"),
    Column("MEMORY", right=True, fold=False),
    Column("COMPUTE", fold=False, drop=4),
    Column("REQUESTS", right=True, fold=False, drop=2),
    Column("LEVEL", fold=False, drop=1),
    Column("MECHANISM", fold=False, drop=5),
    Column("STATE", fold=False),
    Column("ENDPOINT", fold=False, drop=6),
)


def simulated_line(status: Mapping[str, Any]) -> str | None:
    """What must stand first when the GPU is not real."""
    if not status.get("simulated"):
        return None
    parts = [str(gpu.get("product") or gpu.get("name") or gpu.get("id")) for gpu in status.get("gpus", [])]
    what = f" ({len(parts)} x {parts[0]})" if parts else ""
    if any(gpu.get("software") for gpu in status.get("gpus", [])):
        return f"SOFTWARE GPU{what}: no card. Limits hold for programs that use it; the models run on the CPU."
    return f"SIMULATED GPU{what}: memory is accounted for, the models run on the CPU."


def print_simulated(status: Mapping[str, Any], *, err: bool = False) -> None:
    """First of all, where the GPU is not real."""
    line = simulated_line(status)
    if line:
        click.secho(line, fg="yellow", bold=True, err=err)


def print_instances(status: Mapping[str, Any], *, wide: bool = False) -> None:
    """A table of what runs and waits, and why something failed."""
    for note in status.get("notes", ()):
        click.secho(f"note: {note}", fg="yellow", err=True)
    instances = [*status.get("instances", []), *({**item, "state": "queued"} for item in status.get("waiting", ()))]
    if not instances:
        click.echo("Nothing runs.")
        return
    rows = [instance_row(instance, status) for instance in instances]
    columns: tuple[Column, ...] = COLUMNS
    if not any(instance.get("compute") for instance in instances):
        columns, rows = _without(columns, rows, "COMPUTE")
    for name in () if wide else _ONLY_WIDE:
        columns, rows = _without(columns, rows, name)
    print_table(columns, rows)
    for line in (*end_lines(instances), *service_lines(instances), *sharing_lines(status.get("sharing", {}))):
        click.echo(line)
    for instance in instances:
        print_failure(str(instance.get("name")), instance)


def _without(
    columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]], name: str
) -> tuple[tuple[Column, ...], list[list[str | Cell]]]:
    """The table without the column of this name."""
    kept = [number for number, column in enumerate(columns) if column.header != name]
    return tuple(columns[number] for number in kept), [[row[number] for number in kept] for row in rows]


def end_lines(instances: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each program that ended: how much of its grant it used."""
    for instance in instances:
        end = instance.get("end") or {}
        if end.get("peak_bytes") is not None:
            peak, granted = (format_bytes(end[key], up=True) for key in ("peak_bytes", "granted_bytes"))
            yield f"{_name(instance)} ended after {end['seconds']} s; it held at most {peak} of {granted}"


def service_lines(instances: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What each grant serves beyond its number of requests, and what stays unused."""
    yield from (f"{_name(instance)}: {text}" for instance in instances for text in instance.get("service", ()))


def sharing_lines(sharing: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One per model that lets lower-priority neighbours work beside it; strict ones, the default, are not listed."""
    lines = []
    for name, entry in sharing.items():
        if entry.get("sharing") == "strict":
            continue
        if entry.get("gate") is False:
            lines.append(f"{name} shares by {entry.get('sharing')}: there is no gate on its GPU, so others are not held back")
            continue
        used = entry.get("promise_used")
        promise = f", {used:.0%} of {entry.get('promise')} used" if isinstance(used, float) else ""
        cost = entry.get("cost")
        promise += f", {cost:.0%} slower for it" if isinstance(cost, float) else ""
        share = entry.get("share", 0)
        others = f"others may use {share:.0%} while it works{_yielded(entry, share)}"
        lines.append(f"{name} shares by {entry.get('sharing')}: {others}{promise}")
    return lines


def _yielded(entry: Mapping[str, Any], share: float) -> str:
    """What the others made of it, as measured."""
    if share >= 1:
        return " (no gate, so what they use is not measured)"
    yielded = entry.get("yielded")
    return f" and used {yielded:.0%} of the GPU's time" if isinstance(yielded, float) else ""


def instance_row(instance: Mapping[str, Any], status: Mapping[str, Any]) -> list[str | Cell]:
    """One row of the table."""
    state = shown_state(instance)
    percent = instance.get("percent")
    shown = f"{state} {percent}%" if state == "loading" and percent is not None else state
    if state == "loading" and instance.get("stage"):
        shown += f" ({instance['stage']})"
    memory = instance.get("memory_bytes")
    return [
        _name(instance),
        _what(instance, status),
        str(instance.get("engine") or "-"),
        _where(instance, status),
        format_bytes(memory, up=True) if memory else "-",
        str(instance.get("compute") or "-"),
        _requests(instance),
        str(instance.get("level") or "-"),
        "-" if instance.get("mechanism") in (None, "none") else str(instance["mechanism"]),
        Cell(shown, STATE_STYLES.get(state.partition(" ")[0], "")),
        str(instance.get("endpoint") or status.get("models_url") or "-") if state in ("ready", "sleeping") else "-",
    ]


def shown_state(instance: Mapping[str, Any]) -> str:
    """A program that is ready runs; one that ended, with its exit code."""
    state, end = str(instance.get("state")), instance.get("end") or {}
    if state == "ready" and instance.get("engine") == "program":
        return "running"
    return f"ended ({end['exit_code']})" if state == "ended" and end.get("exit_code") is not None else state


def _what(instance: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """The model, or the command of a program."""
    commands = {item.get("name"): item.get("command") for item in status.get("deployments", ())}
    command = str(commands.get(instance.get("name")) or "")
    if command:
        return command if len(command) <= _LONGEST_COMMAND else command[: _LONGEST_COMMAND - 1] + "…"
    return str(instance.get("model")).rsplit("/", maxsplit=1)[-1]


def _requests(instance: Mapping[str, Any]) -> str:
    """At once; if each has a cache of its own, with the tokens of each."""
    requests, context = instance.get("concurrency"), instance.get("context_tokens")
    if not requests:
        return "-"
    own = instance.get("kv_tokens") is None and instance.get("kv_cache_bytes")
    return f"{requests} x {context}" if own and context else str(requests)


def print_failure(name: str, instance: Mapping[str, Any]) -> None:
    """Why an instance failed, and what it last said; why one waits."""
    reason = str(instance.get("reason") or "")
    if instance.get("state") == "sleeping" and reason.startswith("waits for room"):
        click.secho(f"{name} {reason}", fg="yellow", err=True)
    if instance.get("state") == "queued" and reason:
        # Of one that is tried again it begins with how often, and when.
        known = reason.startswith(("waits", "failed "))
        click.secho(f"{name} {reason}" if known else f"{name} waits for room: {reason}", fg="yellow", err=True)
    if instance.get("state") != "failed":
        return
    click.secho(f"{name} failed: {instance.get('reason') or 'no reason given'}", fg="red", err=True)
    for line in instance.get("last_lines") or ():
        click.echo(f"    {line}", err=True)
    click.echo(f"  The whole log: aimgpu logs {name}", err=True)


def print_addresses(status: Mapping[str, Any], *, page: str, with_key: bool, applied: Sequence[str] = ()) -> None:
    """The endpoint, the link to the page, and a curl line to paste, for the most important model that was `applied`."""
    models_url = str(status.get("models_url"))
    click.echo(f"\nOpenAI endpoint  {models_url}")
    click.echo(f"Page             {page}\n")
    ready = [instance for instance in status.get("instances", []) if instance.get("state") in ("ready", "sleeping")]
    if ready:
        chosen = min(ready, key=lambda instance: _importance(instance, applied))
        click.echo("Try it:")
        click.echo(curl_line(models_url, str(chosen.get("name")), with_key=with_key) + "\n")


def _importance(instance: Mapping[str, Any], applied: Sequence[str]) -> tuple[bool, int, int]:
    """Sorts what was applied first, then by priority, then as the stack file lists them."""
    name = str(instance.get("name"))
    rank = _PRIORITIES.index(instance.get("priority")) if instance.get("priority") in _PRIORITIES else len(_PRIORITIES)
    return name not in applied, rank, applied.index(name) if name in applied else 0


def curl_line(models_url: str, name: str, *, with_key: bool) -> str:
    """A request that can be pasted."""
    messages = '[{"role": "user", "content": "What is a GPU? Answer in one sentence."}]'
    body = f'{{"model": "{name}", "max_tokens": 100, "messages": {messages}}}'  # bounded: on a CPU a word takes its time
    key = ' -H "Authorization: Bearer $AIMGPU_API_KEY"' if with_key else ""
    url = shlex.quote(f"{models_url}/chat/completions")
    return f"curl -s {url} -H 'Content-Type: application/json'{key} -d '{body}'"


def _where(instance: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """`gpu0/spx-0`."""
    gpu = next((gpu for gpu in status.get("gpus", ()) if gpu.get("id") == instance.get("device")), None)
    if gpu is None:
        return str(instance.get("device") or "-")
    return f"gpu{gpu.get('index')}/{str(instance.get('partition')).rsplit('/', maxsplit=1)[-1]}"


def _name(instance: Mapping[str, Any]) -> str:
    replica = instance.get("replica") or 0
    return f"{instance.get('name')}" if not replica else f"{instance.get('name')}#{replica}"
