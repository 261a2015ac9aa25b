"""Decisions, plans and explanations for people and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from shutil import get_terminal_size
from typing import Any

import click

from aimgpu.cli.output import Cell, Column, is_terminal, print_table, table_width
from aimgpu.cli.views.gpu_names import Rename, names_in_snapshot
from aimgpu.cli.what_if import SizedAsk, World
from aimgpu.domain import GrantedCompute, Placement, Refusal, Slot, granted_to
from aimgpu.domain.codec import encode
from aimgpu.placement import MoveKind, MovePlan, Snapshot, decision_to_json
from aimgpu.placement.explain import Explanation, Verdict
from aimgpu.placement.preemption.planner import BatchPlan
from aimgpu.sizing.surplus import Service, describe_service
from aimgpu.units import format_bytes

_MOST_NAMES = 8
_STYLES = {Verdict.CHOSEN: "bold green", Verdict.WOULD_DO: "", Verdict.CANNOT: "red"}


def plan_json(batch: BatchPlan, sized: Sequence[SizedAsk], snapshot: Snapshot) -> dict[str, Any]:
    """A plan as JSON."""
    plan = batch.plan
    services = {name: encode(service) for name, service in services_of(plan, sized).items()}
    return {
        "simulated": is_simulated(snapshot),
        "fits": not batch.refusals,
        "because": plan.because,
        "cost": encode(plan.cost),
        "steps": [
            {
                "kind": step.kind.value,
                "node": step.node,
                "device": step.device_id,
                "layout": step.after.device.layout.name if step.after else None,
                "reload_driver": step.reload_driver,
                "text": step.text,
            }
            for step in plan.steps
        ],
        "placements": [
            _placement_json(placement, snapshot) | {"service": services.get(placement.ask)} for placement in plan.placements
        ],
        "refusals": [refusal_json(refusal) for refusal in batch.refusals],
        "notes": list(dict.fromkeys(note for each in sized for note in each.notes)),
    }


def _placement_json(placement: Placement, snapshot: Snapshot) -> dict[str, Any]:
    encoded: dict[str, Any] = encode(placement)
    for slot, shown in zip(placement.slots, encoded["slots"], strict=True):
        compute = _compute_of(slot, snapshot)
        shown["compute"] = None if compute is None else compute.to_json()
    return encoded


def _compute_of(slot: Slot, snapshot: Snapshot) -> GrantedCompute | None:
    """Under whichever layout the plan gives the device."""
    devices = [state.device for node, state in snapshot.devices() if node.name == slot.node]
    laid_out = (replace(device, layout=layout) for device in devices for layout in (device.layout, *device.layouts))
    return next((found for found in (granted_to(slot, [device]) for device in laid_out) if found is not None), None)


def refusal_json(refusal: Refusal) -> dict[str, Any]:
    """A refusal as JSON."""
    return decision_to_json(refusal)


def explanation_json(sized: SizedAsk, explanation: Explanation, snapshot: Snapshot) -> dict[str, Any]:
    """An explanation as JSON."""
    decision = decision_to_json(explanation.decision)
    if isinstance(explanation.decision, Placement):
        decision |= _placement_json(explanation.decision, snapshot)
    return {
        "ask": encode(sized.ask),
        "decision": decision,
        "first": list(explanation.first),
        "devices": encode(explanation.devices),
        "mix_shapes": explanation.mix_shapes,
    }


def is_simulated(snapshot: Snapshot) -> bool:
    """Whether any of the GPUs is."""
    return any(state.device.simulated for _, state in snapshot.devices())


def print_notes(sized: Iterable[SizedAsk], world: World) -> None:
    """What the reader must know before the plan."""
    if is_simulated(world.snapshot):
        parts = sorted({state.device.product for _, state in world.snapshot.devices()})
        supposed = world.basis.runnable is None
        what = "planned as for real GPUs of this product" if supposed else "memory is accounted for, models run on the CPU"
        click.echo(f"SIMULATED GPUs ({', '.join(parts)}): {what}.")
    for note in dict.fromkeys(note for each in sized for note in each.notes):
        click.echo(f"Note: {note}")


def print_plan(plan: MovePlan, snapshot: Snapshot) -> None:
    """What is done first, and where each model goes."""
    changes = [step.text for step in plan.steps if step.kind is not MoveKind.PLACE]
    print_changes(changes, snapshot)
    if not changes and not plan.placements:
        click.echo("Nothing to do.")
    rows = plan_rows(plan, snapshot)
    if rows:
        _print_placements(rows, {placement.ask: placement.because for placement in plan.placements})


def _print_placements(rows: Sequence[tuple[str, str, str, str, str]], because: Mapping[str, str]) -> None:
    """The reasons stand beside the placements where there is room, else below them, each once."""
    columns = [Column("NAME"), Column("PARTITION"), Column("MEMORY", right=True), Column("COMPUTE"), Column("ALONE")]
    wide, full = [*columns, Column("BECAUSE")], [(*row, because[row[0]]) for row in rows]
    if not is_terminal() or table_width(wide, full) <= get_terminal_size().columns:
        print_table(wide, full)
        return
    print_table(columns, rows)
    for reason in dict.fromkeys(because.values()):
        click.echo(f"Why {', '.join(name for name, text in because.items() if text == reason)}: {reason}")


def print_service(plan: MovePlan, sized: Iterable[SizedAsk]) -> None:
    """How many requests, and how large a KV cache, the memory of each placement is good for."""
    alike: dict[str, list[str]] = {}
    for name, service in services_of(plan, sized).items():
        for text in (service.text, service.unused_text):
            if text:
                alike.setdefault(text, []).append(name)
    for text, names in alike.items():
        click.echo(f"{', '.join(names)}: {text}")


def services_of(plan: MovePlan, sized: Iterable[SizedAsk]) -> dict[str, Service]:
    """By the name of its ask: what each placement whose model was sized is good for."""
    footprints = {each.ask.name: each.footprint for each in sized if each.footprint is not None}
    return {
        placement.ask: describe_service(footprint, min((slot.memory_bytes for slot in placement.slots), default=0))
        for placement in plan.placements
        if (footprint := footprints.get(placement.ask)) is not None
    }


def print_changes(texts: Sequence[str], snapshot: Snapshot) -> None:
    """What is done first."""
    if texts:
        click.echo("First:")
    rename = names_in_snapshot(snapshot)
    for number, text in enumerate(texts, start=1):
        click.echo(f"  {number}. {rename(text)}")


def plan_rows(plan: MovePlan, snapshot: Snapshot) -> list[tuple[str, str, str, str, str]]:
    """Name, partition, memory, compute and whether it is alone there: one row per slot."""
    rename = names_in_snapshot(snapshot)
    return [
        (
            placement.ask,
            rename(slot.partition_id),
            format_bytes(slot.memory_bytes, up=True),
            compute.text if (compute := _compute_of(slot, snapshot)) else "-",
            "yes" if slot.exclusive else "",
        )
        for placement in plan.placements
        for slot in placement.slots
    ]


def print_refusals(refusals: Iterable[Refusal], snapshot: Snapshot) -> None:
    """Those with the same reasons once, with the names of the others."""
    alike: dict[tuple[int, int], list[Refusal]] = {}
    for refusal in refusals:
        alike.setdefault((id(refusal.reasons), id(refusal.would_fit)), []).append(refusal)
    for first, *others in alike.values():
        _print_refusal(first, names_in_snapshot(snapshot))
        if others:
            names = ", ".join(other.ask for other in others[:_MOST_NAMES])
            more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
            click.echo(f"  The same holds for {names}{more}.")


def _print_refusal(refusal: Refusal, rename: Rename) -> None:
    click.echo(f"\n{rename(refusal.summary)}")
    for reason in refusal.reasons:
        short = f" (short by {format_bytes(reason.short_bytes, up=True)})" if reason.short_bytes else ""
        click.echo(rename(f"  {reason.node}/{reason.device_id}: {reason.text}{short}"))
    for change in refusal.would_fit:
        click.echo(f"  Would fit: {rename(change)}")


def print_explanation(sized: SizedAsk, explanation: Explanation, snapshot: Snapshot) -> None:
    """The decision, and what every GPU offers or lacks."""
    decision = explanation.decision
    if isinstance(decision, Refusal):
        print_refusals([decision], snapshot)
        return
    print_changes(explanation.first, snapshot)
    rename = names_in_snapshot(snapshot)
    where = ", ".join(f"{format_bytes(slot.memory_bytes, up=True)} of {slot.partition_id}" for slot in decision.slots)
    click.echo(rename(f"{sized.ask.name}: {where}. Why: {decision.because}."))
    rows = [
        (
            rename(f"{each.node}/{each.device_id}"),
            Cell(each.verdict.value, _STYLES[each.verdict]),
            "" if each.loss is None else f"{each.loss / 1000:.3f}",
            rename(each.text),
        )
        for each in explanation.devices
    ]
    print_table(["GPU", "VERDICT", Column("LOSS", right=True), "WHY"], rows)
    click.echo("LOSS is the room, in GPUs, that the usual requests could no longer use there; less is better.")
