"""The events of an apply, shown as they come, and what they came to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from aimgpu.cli.client import error_from_json
from aimgpu.cli.output import print_table
from aimgpu.cli.progress import ProgressDisplay
from aimgpu.cli.views.gpu_names import Rename, names_in_status
from aimgpu.cli.views.status import print_failure
from aimgpu.errors import AimGpuError, PlacementRefused


@dataclass(slots=True)
class ApplyOutcome:
    """What an apply came to."""

    steps: list[Mapping[str, Any]] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    queued: list[str] = field(default_factory=list)  # of the unchanged: those that wait for room
    beside: list[str] = field(default_factory=list)  # they run and are not in the stack
    refusals: list[Mapping[str, Any]] = field(default_factory=list)
    error: AimGpuError | None = None
    failed: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by instance, its last state event
    rename: Rename = str  # of GPUs, for people

    @property
    def applied(self) -> list[str]:
        """The deployments that the stack asks for, started now or running before."""
        started = [str(step.get("deployment")) for step in self.steps if step.get("kind") not in {"release", "unload"}]
        return list(dict.fromkeys([*started, *self.unchanged]))


def follow_apply(events: Iterable[Mapping[str, Any]], display: ProgressDisplay, before: Mapping[str, Any]) -> ApplyOutcome:
    """Read the stream to its end; `before`, the daemon's status, has the GPUs' names."""
    outcome = ApplyOutcome(rename=names_in_status(before))
    for event in events:
        match event.get("event"):
            case "plan":
                outcome.steps = list(event.get("steps", []))
                outcome.unchanged = list(event.get("unchanged", []))
                outcome.queued = list(event.get("queued", []))
                outcome.beside = list(event.get("beside", []))
                outcome.refusals = list(event.get("refusals", []))
            case "refused":
                _note_refusal(outcome, event)
            case "progress":
                display.update_bytes(str(event.get("what")), int(event.get("done_bytes") or 0), event.get("total_bytes"))
            case "step":
                display.print_line(outcome.rename(str(event.get("text"))))
            case "state":
                _show_state(outcome, event, display)
            case "error":
                outcome.error = error_from_json(_renamed(event.get("error") or event, outcome.rename))
    return outcome


def print_unlisted_failures(outcome: ApplyOutcome, status: Mapping[str, Any]) -> None:
    """Why a start failed of which the ledger keeps nothing, as one that another command released meanwhile."""
    listed = {instance.get("id") for instance in status.get("instances", ())}
    for instance, event in outcome.failed.items():
        if instance not in listed:
            print_failure(str(event.get("deployment")), event)


def print_beside(outcome: ApplyOutcome) -> None:
    """Models that run and are not in the file."""
    if outcome.beside:
        text = f"Not in this stack, and left as they are: {', '.join(outcome.beside)} (--prune removes them)"
        click.secho(text, fg="yellow", err=True)


def print_plan(outcome: ApplyOutcome) -> None:
    """What an apply would do."""
    print_beside(outcome)
    if outcome.queued:
        names = ", ".join(outcome.queued)
        click.echo(f"Queued, and still without room: {names} (`aimgpu ps` shows why, --make-room would make room)")
    if not outcome.steps:
        click.echo("Nothing to do." if outcome.queued else "Nothing to do: everything runs as it should.")
        return
    rows = [
        (str(step.get("kind")), str(step.get("deployment")), outcome.rename(str(step.get("text")))) for step in outcome.steps
    ]
    print_table(["STEP", "NAME", "WHAT"], rows)
    unchanged = [name for name in outcome.unchanged if name not in outcome.queued]
    if unchanged:
        click.echo(f"Unchanged: {', '.join(unchanged)}")


def refusal_error(outcome: ApplyOutcome, alone: str | None = None) -> PlacementRefused:
    """All refusals as one error: why, device by device, and what would make it fit; `alone`: what the only ask is of."""
    lines, hints = [], []
    for refusal in outcome.refusals:
        ask, summary = str(refusal.get("ask") or refusal.get("deployment")), str(refusal.get("summary") or refusal.get("text"))
        name = ask.removesuffix("-0") if alone else ask  # which is of its first replica
        verdict = summary.removeprefix(f"{ask} ")
        lines.append(f"{name}: {summary}" if verdict == summary else f"{name} {verdict}")
        reasons = [f"{reason.get('device')}: {reason.get('text')}" for reason in refusal.get("reasons", [])]
        lines += [f"  {reason}" for reason in reasons if not summary.endswith(f" on {reason}")]  # the only GPU's stands there
        hints += [str(way) for way in refusal.get("would_fit", [])]
    ways = "\n  ".join(dict.fromkeys(hints))
    text = outcome.rename("\n".join(lines))
    hint = f"What would fit:\n  {outcome.rename(ways)}" if ways else None
    return PlacementRefused(f"the {alone or 'stack'} does not fit, nothing was started\n{text}", hint=hint)


def _note_refusal(outcome: ApplyOutcome, event: Mapping[str, Any]) -> None:
    """The plan may have shown it already, with the reasons."""
    found = event.get("refusals")
    if found:
        outcome.refusals = list(found)
    elif not outcome.refusals:
        outcome.refusals.append(event)


def _renamed(body: Mapping[str, Any], rename: Rename) -> Mapping[str, Any]:
    """What people read of it."""
    return {**body, **{key: rename(str(body[key])) for key in ("message", "text", "hint", "reason") if body.get(key)}}


def _show_state(outcome: ApplyOutcome, event: Mapping[str, Any], display: ProgressDisplay) -> None:
    name, state, percent = str(event.get("deployment")), str(event.get("state")), event.get("percent")
    instance = str(event.get("instance") or name)
    if state == "failed":
        outcome.failed[instance] = _renamed(event, outcome.rename)
    else:
        outcome.failed.pop(instance, None)
    stage = event.get("stage")
    display.update_state(name, f"{state} ({stage})" if stage and state == "loading" else state, percent)
