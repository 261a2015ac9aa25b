"""What is seen of a node of a plan, and the changes of the Node itself: whose cordon it is, and which plan holds it. Pure.

A node carries the uid of the plan that changes it. When that plan is deleted, or the operator ended between writing the plan's
last status and acting on it, the next look finds the label and lets the node go.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aimgpu.kubernetes.cluster.operator.config_manager import DCM_PROFILE, DCM_TAINT, node_order, uses_device_config_manager
from aimgpu.kubernetes.cluster.operator.gpu_holders import Holders
from aimgpu.kubernetes.cluster.operator.plan_vocabulary import DONE, PLAN_TAINT, NodeView, Object, PlanAction, Transition
from aimgpu.kubernetes.vocabulary.names import KEEP_TAINT, LABEL_PLAN

MANAGER = "aimgpu"  # as which the operator writes nodes: the API server notes who changed a field last


def wanted_of(gpu_node: Mapping[str, Any]) -> dict[str, str]:
    """Layouts by GPU."""
    return {one["gpu"]: one["layout"] for one in (gpu_node.get("spec") or {}).get("layouts") or ()}


def view_node(
    node: Object, gpu_node: Object, holders: Holders | None = None, kept: Mapping[str, str] | None = None
) -> NodeView:
    """`holders`: pods that hold a share there; `kept`: pods that could not be evicted, with what keeps them."""
    holders = holders or {}
    status: dict[str, Any] = gpu_node.get("status") or {}
    conditions: dict[str, dict[str, Any]] = {one["type"]: one for one in status.get("conditions") or ()}
    condition = conditions.get("LayoutsApplied", {})
    seen = NodeView(
        name=node["metadata"]["name"],
        gpus=tuple(copy.deepcopy(status.get("gpus") or ())),
        wanted=wanted_of(gpu_node),
        refused=condition.get("message") if condition.get("status") == "False" else None,
        fixed=str(conditions.get("LayoutsChangeable", {}).get("message") or ""),
        observed=status.get("observedGeneration") == (gpu_node.get("metadata") or {}).get("generation"),
        cordoned=False,
        pods=tuple(sorted(holders)),
        gpus_of={pod: gpus for pod, gpus in holders.items() if gpus is not None},
        kept={pod: text for pod, text in (kept or {}).items() if pod in holders},
        resources=tuple(copy.deepcopy(status.get("resources") or ())),
    )
    return with_node(seen, node)


def with_node(view: NodeView, node: Object) -> NodeView:
    """The same view after the Node has changed."""
    metadata, spec = node["metadata"], node.get("spec") or {}
    labels = metadata.get("labels") or {}
    return replace(
        view,
        cordoned=bool(spec.get("unschedulable")),
        cordoned_by_us=bool(spec.get("unschedulable")) and _only_we_set_it(metadata),
        profile=labels.get(DCM_PROFILE),
        taints=tuple(copy.deepcopy(spec.get("taints") or ())),
        version=str(metadata.get("resourceVersion") or ""),
        holder=labels.get(LABEL_PLAN),
        keeps_taint=KEEP_TAINT in (metadata.get("annotations") or {}),
    )


def _only_we_set_it(metadata: Mapping[str, Any]) -> bool:
    """By who set `spec.unschedulable`: a person who cordoned the node before the plan or in its course is among them.

    The API server tracks no fields of an object that was made without any, or whose record was cleared: those are let go.
    """
    managers = {
        str(entry.get("manager"))
        for entry in metadata.get("managedFields") or ()
        if "f:unschedulable" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    }
    return managers == {MANAGER} or not metadata.get("managedFields")


def node_change(view: NodeView, action: PlanAction, step: Transition, holder: str) -> Object:
    """The patch of the Node for an action; empty: none is needed."""
    if action is PlanAction.CORDON:  # a cordon of a person stays theirs: what does not change is not noted as ours
        keeps = "true" if view.has_taint(DCM_TAINT) else None
        marks = {"labels": {LABEL_PLAN: holder}, "annotations": {KEEP_TAINT: keeps}}
        taints = [*view.taints_without(PLAN_TAINT), PLAN_TAINT]
        return {"metadata": {"resourceVersion": view.version, **marks}, "spec": {"unschedulable": True, "taints": taints}}
    if action is not PlanAction.UNCORDON:
        return node_order(view, action, step.profile)
    change: Object = {"metadata": {"labels": {LABEL_PLAN: None}, "annotations": {KEEP_TAINT: None}}, "spec": {}}
    if view.cordoned_by_us:
        change["spec"]["unschedulable"] = None
    if view.has_taint(PLAN_TAINT):
        change["spec"]["taints"] = view.taints_without(PLAN_TAINT)
    if change["spec"]:
        change["metadata"]["resourceVersion"] = view.version  # else a cordon or a taint of this moment would be undone
    return change


def is_under_way(status: Mapping[str, Any]) -> bool:
    """Whether a plan is changing the node with this status."""
    return (status.get("phase") or "Pending") not in ("Pending", *DONE)


def let_go(spec: Mapping[str, Any], status: Object) -> Transition:
    """What is left to do on a node that a plan holds and does not work on; one that failed gets its layouts back first."""
    undo: tuple[PlanAction, ...] = ()
    if status.get("phase") == "Failed":
        undo = (PlanAction.RESTORE_PROFILE if uses_device_config_manager(spec) else PlanAction.RESTORE,)
    return Transition(
        status=status,
        actions=(*undo, PlanAction.RELEASE, PlanAction.UNCORDON),
        layouts=dict(status.get("before") or {}),
        profile=status.get("profileBefore"),
    )
