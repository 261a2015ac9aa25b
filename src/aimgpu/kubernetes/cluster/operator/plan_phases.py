"""What happens next on one node of a PartitionPlan. Pure: what is seen goes in, a new status and actions come out.

Pending → Draining → Applying → Verifying → Succeeded; Failed from any of them, after the old layouts are wanted again. The
layouts from before are in the status before anything changes, so that an operator that takes over can restore them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aimgpu.kubernetes.cluster.operator.config_manager import (
    follow_manager,
    ordered_step,
    uses_device_config_manager,
    wrong_applier,
)
from aimgpu.kubernetes.cluster.operator.plan_vocabulary import (
    APPLY_SECONDS,
    DONE,
    READ_BACK,
    REFUSED_SECONDS,
    SETTLE_SECONDS,
    NodeView,
    Object,
    PlanAction,
    Transition,
    with_phase,
)

_SHOWN = 8  # layouts of a GPU: MIG has dozens


def target_layouts(
    spec: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], fixed: str = ""
) -> tuple[dict[str, str], str | None]:
    """Layouts by GPU that the plan wants of this node, and why it cannot have them. `fixed`: why its agent cannot change some.

    A layout is of one vendor: GPUs of the other are left alone unless the plan names them.
    """
    chosen = spec.get("gpus")
    layout = spec["layout"]
    vendor = "nvidia" if layout.get("mig") else "amd"
    found = {}
    for gpu in gpus:
        if (gpu.get("index") not in chosen) if chosen is not None else (gpu.get("vendor", vendor) != vendor):
            continue
        name = layout.get("mig") or _amd_name(layout, str(gpu.get("layout") or ""))
        legal = {str(each).lower(): str(each) for each in gpu.get("layouts") or ()}
        if name.lower() not in legal and not layout.get("mig"):
            why = f" ({fixed})" if fixed else ""
            others = _listed(list(legal.values()))
            return {}, f"{gpu['id']} ({gpu.get('product')}) cannot have {name}; it can have {others}{why}"
        found[str(gpu["id"])] = legal.get(name.lower(), name)
    return found, None if found else "the node has no GPU that the plan names"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _amd_name(layout: Mapping[str, Any], current: str) -> str:
    memory = layout.get("memoryMode") or current.partition("/")[2] or "NPS1"
    return f"{layout['computeMode']}/{memory}"


def advance(spec: Mapping[str, Any], status: Object, view: NodeView, now: float) -> Transition:
    """One step of one node."""
    phase = status.get("phase") or "Pending"
    if phase in DONE:
        return Transition(status=status)
    targets, problem = target_layouts(spec, view.gpus, view.fixed)
    view = replace(view, pods=pods_in_the_way(spec, targets, view))
    if phase == "Pending":
        return _begin(view, targets, problem or wrong_applier(spec, view), now)
    late = now - float(status.get("since") or now)
    if phase == "Draining":
        left = float(spec.get("drainTimeoutSeconds") or 600) - late
        return ordered_step(spec, _drain(status, view, targets, now, left=left))
    if uses_device_config_manager(spec):
        return follow_manager(spec, status, view, targets, now)
    step = _apply if phase == "Applying" else _verify
    return step(status, view, targets, late, now)


def pods_in_the_way(spec: Mapping[str, Any], targets: Mapping[str, str], view: NodeView) -> tuple[str, ...]:
    """A compute mode or MIG layout changes one GPU; a memory mode, and the Device Config Manager, all of the node."""
    if uses_device_config_manager(spec):
        return view.pods
    current = {str(gpu["id"]): str(gpu["layout"]) for gpu in view.gpus}
    changed = {gpu for gpu, layout in targets.items() if current.get(gpu, "").lower() != layout.lower()}
    if any(layout.partition("/")[2] != current.get(gpu, "").partition("/")[2] for gpu, layout in targets.items()):
        return view.pods
    return tuple(pod for pod in view.pods if changed & view.gpus_of.get(pod, changed))


def _apply(status: Object, view: NodeView, targets: Mapping[str, str], late: float, now: float) -> Transition:
    if view.observed and view.wanted == {**view.wanted, **targets}:
        return Transition(status=with_phase(status, "Verifying", "the agent reads the layouts back", now))
    if late > APPLY_SECONDS:
        return _fail(status, f"the node agent did not act for {APPLY_SECONDS:.0f} s", now)
    return Transition(status=status, actions=(PlanAction.WANT,), layouts=targets)


def _begin(view: NodeView, targets: Mapping[str, str], problem: str | None, now: float) -> Transition:
    before = {str(gpu["id"]): str(gpu["layout"]) for gpu in view.gpus if str(gpu["id"]) in targets}
    fresh: Object = {"name": view.name, "before": before}
    if view.profile is not None:
        fresh["profileBefore"] = view.profile
    if problem is not None:
        return Transition(status=with_phase(fresh, "Failed", problem, now))
    if all(before[gpu].lower() == layout.lower() for gpu, layout in targets.items()):
        return Transition(status=with_phase(fresh, "Succeeded", "the layouts are as wanted", now))
    return Transition(
        status=with_phase(fresh, "Draining", f"{len(view.pods)} pods hold shares", now), actions=(PlanAction.CORDON,)
    )


def _drain(status: Object, view: NodeView, targets: Mapping[str, str], now: float, *, left: float) -> Transition:
    if not view.closed:
        return Transition(status=status, actions=(PlanAction.CORDON,))
    if not view.pods:
        fresh = with_phase(status, "Applying", "no pod holds a share", now)
        return Transition(status=fresh, actions=(PlanAction.WANT,), layouts=targets)
    if left < 0:
        return _fail(status, f"{len(view.pods)} pods were not gone in time: {_named(view)}", now)
    message = f"{len(view.pods)} pods are to be evicted: {_named(view)}"
    return Transition(status={**status, "message": message}, actions=(PlanAction.EVICT,))


def _named(view: NodeView) -> str:
    """The first pods, those that something keeps before the others, with what keeps them."""
    first = sorted(view.pods, key=lambda pod: pod not in view.kept)[:3]
    return ", ".join(f"{pod} ({view.kept[pod]})" if pod in view.kept else pod for pod in first)


def _verify(status: Object, view: NodeView, targets: Mapping[str, str], late: float, now: float) -> Transition:
    current = {str(gpu["id"]): str(gpu["layout"]) for gpu in view.gpus}
    if all(current.get(gpu, "").lower() == layout.lower() for gpu, layout in targets.items()):
        if status.get("message") != READ_BACK:
            return Transition(status=with_phase(status, "Verifying", READ_BACK, now))
        if late < SETTLE_SECONDS:
            return Transition(status=status)
        fresh = with_phase(status, "Succeeded", "the layouts were applied and read back", now)
        return Transition(status=fresh, actions=(PlanAction.UNCORDON,))
    if view.refused is not None and view.observed and late > REFUSED_SECONDS:
        return _fail(status, view.refused, now)
    if late > APPLY_SECONDS:
        return _fail(status, f"the layouts are not as wanted after {APPLY_SECONDS:.0f} s", now)
    return Transition(status=status)


def _fail(status: Object, message: str, now: float) -> Transition:
    """The old layouts are wanted again, and the node takes pods again."""
    fresh = with_phase(status, "Failed", f"{message}; the layouts from before are restored", now)
    return Transition(status=fresh, actions=(PlanAction.RESTORE, PlanAction.UNCORDON), layouts=dict(status.get("before") or {}))


def may_begin(others: Sequence[Mapping[str, Any]], most: int) -> bool:
    """Whether one more node may be taken on. One that failed keeps its place: what went wrong there is not done elsewhere."""
    return sum(one.get("phase") not in ("Pending", "Succeeded", None) for one in others) < most


def whole_phase(nodes: Sequence[Mapping[str, Any]], most: int) -> tuple[str, str]:
    """Of the plan, from its nodes, with a message. `most`: of nodes at a time."""
    phases = [str(node.get("phase") or "Pending") for node in nodes]
    if not phases:
        return "Pending", "no node with GPUs matches"
    failed = [node for node in nodes if node.get("phase") == "Failed"]
    done = sum(phase in DONE for phase in phases)
    stopped = failed and done == len([phase for phase in phases if phase != "Pending"]) and not may_begin(nodes, most)
    if stopped and done < len(phases):
        left = f"; {len(phases) - done} nodes were left as they are"
        return "Failed", f"{failed[0]['name']}: {failed[0].get('message')}{left}"
    if done == len(phases):
        if failed:
            return "Failed", f"{failed[0]['name']}: {failed[0].get('message')}"
        return "Succeeded", f"{len(phases)} nodes have the layout"
    active = next((phase for phase in phases if phase not in ("Pending", *DONE)), "Pending")
    return active, f"{done} of {len(phases)} nodes are done"
