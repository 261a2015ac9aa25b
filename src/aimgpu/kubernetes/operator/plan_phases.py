"""What happens next on one node of a PartitionPlan. Pure: what is seen goes in, a new status and actions come out.

Pending → Draining → Applying → Verifying → Succeeded; Failed from any of them, after the old layouts are wanted again. The
layouts from before are in the status before anything changes, so that an operator that takes over can restore them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Object = dict[str, Any]
DONE = ("Succeeded", "Failed")
APPLY_SECONDS = 300.0


class PlanAction(StrEnum):
    """What the operator does to a node."""

    CORDON = "cordon"
    UNCORDON = "uncordon"
    EVICT = "evict"
    WANT = "want"  # write the layouts into the GpuNode
    RESTORE = "restore"  # write back those from before


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What is seen of a node now."""

    name: str
    gpus: Sequence[Mapping[str, Any]]  # of the GpuNode's status
    wanted: Mapping[str, str]  # of the GpuNode's spec: layouts by GPU
    refused: str | None  # why the agent has not applied what is wanted; None: it has, or has not looked yet
    observed: bool  # the agent has seen the newest spec
    cordoned: bool
    pods: tuple[str, ...]  # that hold a share here, as namespace/name


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The node's new status in the plan, and what to do for it, in order."""

    status: Object
    actions: tuple[PlanAction, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)  # for WANT and RESTORE


def target_layouts(spec: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], str | None]:
    """Layouts by GPU that the plan wants of this node, and why it cannot have them."""
    chosen = spec.get("gpus")
    layout = spec["layout"]
    found = {}
    for gpu in gpus:
        if chosen is not None and gpu.get("index") not in chosen:
            continue
        name = layout.get("mig") or _amd_name(layout, str(gpu.get("layout") or ""))
        legal = {str(each).lower(): str(each) for each in gpu.get("layouts") or ()}
        if name.lower() not in legal and not layout.get("mig"):
            return {}, f"{gpu['id']} ({gpu.get('product')}) cannot have {name}; it can have {', '.join(legal.values())}"
        found[str(gpu["id"])] = legal.get(name.lower(), name)
    return found, None if found else "the node has no GPU that the plan names"


def _amd_name(layout: Mapping[str, Any], current: str) -> str:
    memory = layout.get("memoryMode") or current.partition("/")[2] or "NPS1"
    return f"{layout['computeMode']}/{memory}"


def advance(spec: Mapping[str, Any], status: Object, view: NodeView, now: float) -> Transition:
    """One step of one node."""
    phase = status.get("phase") or "Pending"
    if phase in DONE:
        return Transition(status=status)
    targets, problem = target_layouts(spec, view.gpus)
    if phase == "Pending":
        return _begin(view, targets, problem, now)
    late = now - float(status.get("since") or now)
    if phase == "Draining":
        return _drain(status, view, targets, now, left=float(spec.get("drainTimeoutSeconds") or 600) - late)
    step = _apply if phase == "Applying" else _verify
    return step(status, view, targets, late, now)


def _apply(status: Object, view: NodeView, targets: Mapping[str, str], late: float, now: float) -> Transition:
    if view.observed and view.wanted == {**view.wanted, **targets}:
        return Transition(status=_status(status, "Verifying", "the agent reads the layouts back", now))
    if late > APPLY_SECONDS:
        return _fail(status, f"the node agent did not act for {APPLY_SECONDS:.0f} s", now)
    return Transition(status=status, actions=(PlanAction.WANT,), layouts=targets)


def _begin(view: NodeView, targets: Mapping[str, str], problem: str | None, now: float) -> Transition:
    before = {str(gpu["id"]): str(gpu["layout"]) for gpu in view.gpus}
    fresh = {"name": view.name, "before": before}
    if problem is not None:
        return Transition(status=_status(fresh, "Failed", problem, now))
    if all(before[gpu].lower() == layout.lower() for gpu, layout in targets.items()):
        return Transition(status=_status(fresh, "Succeeded", "the layouts are as wanted", now))
    return Transition(
        status=_status(fresh, "Draining", f"{len(view.pods)} pods hold shares", now), actions=(PlanAction.CORDON,)
    )


def _drain(status: Object, view: NodeView, targets: Mapping[str, str], now: float, *, left: float) -> Transition:
    if not view.cordoned:
        return Transition(status=status, actions=(PlanAction.CORDON,))
    if not view.pods:
        fresh = _status(status, "Applying", "no pod holds a share", now)
        return Transition(status=fresh, actions=(PlanAction.WANT,), layouts=targets)
    if left < 0:
        return _fail(status, f"{len(view.pods)} pods were not gone in time: {', '.join(view.pods[:3])}", now)
    message = f"{len(view.pods)} pods are to be evicted: {', '.join(view.pods[:3])}"
    return Transition(status={**status, "message": message}, actions=(PlanAction.EVICT,))


def _verify(status: Object, view: NodeView, targets: Mapping[str, str], late: float, now: float) -> Transition:
    current = {str(gpu["id"]): str(gpu["layout"]) for gpu in view.gpus}
    if all(current.get(gpu, "").lower() == layout.lower() for gpu, layout in targets.items()):
        fresh = _status(status, "Succeeded", "the layouts were applied and read back", now)
        return Transition(status=fresh, actions=(PlanAction.UNCORDON,))
    if view.refused is not None and view.observed:
        return _fail(status, view.refused, now)
    if late > APPLY_SECONDS:
        return _fail(status, f"the layouts are not as wanted after {APPLY_SECONDS:.0f} s", now)
    return Transition(status=status)


def _fail(status: Object, message: str, now: float) -> Transition:
    """The old layouts are wanted again, and the node takes pods again."""
    fresh = _status(status, "Failed", f"{message}; the layouts from before are restored", now)
    return Transition(status=fresh, actions=(PlanAction.RESTORE, PlanAction.UNCORDON), layouts=dict(status.get("before") or {}))


def _status(status: Mapping[str, Any], phase: str, message: str, now: float) -> Object:
    return {**status, "phase": phase, "message": message, "since": f"{now:.0f}"}


def whole_phase(nodes: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Of the plan, from its nodes, with a message."""
    phases = [str(node.get("phase") or "Pending") for node in nodes]
    if not phases:
        return "Pending", "no node with GPUs matches"
    failed = [node for node in nodes if node.get("phase") == "Failed"]
    done = sum(phase in DONE for phase in phases)
    if done == len(phases):
        if failed:
            return "Failed", f"{failed[0]['name']}: {failed[0].get('message')}"
        return "Succeeded", f"{len(phases)} nodes have the layout"
    active = next((phase for phase in phases if phase not in ("Pending", *DONE)), "Pending")
    return active, f"{done} of {len(phases)} nodes are done"
