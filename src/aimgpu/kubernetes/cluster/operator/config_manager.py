"""Layouts by AMD's Device Config Manager instead of our node agent: a taint, a label, and reading back. Pure.

It watches a label of the node for a profile of its ConfigMap, and works while a taint keeps GPU users away. Two programs that
set layouts would undo each other's work for ever, so a plan is carried out by one of them.
"""

from collections.abc import Mapping
from typing import Any

from aimgpu.kubernetes.cluster.operator.plan_vocabulary import (
    APPLY_SECONDS,
    SETTLE_SECONDS,
    NodeView,
    Object,
    PlanAction,
    Transition,
    with_phase,
)

DCM_TAINT = {"key": "amd-dcm", "value": "up", "effect": "NoExecute"}  # as AMD's guide has it: evicts what uses the GPUs
DCM_PROFILE = "dcm.amd.com/gpu-config-profile"  # label of a node


def uses_device_config_manager(spec: Mapping[str, Any]) -> bool:
    return spec.get("applier") == "DeviceConfigManager"


def profile_of(spec: Mapping[str, Any]) -> str:
    """As its own default configuration names them, unless another is named."""
    layout = spec["layout"]
    memory = str(layout.get("memoryMode") or "NPS1")
    return str(spec.get("profile") or f"{layout.get('computeMode')}_{memory}_all".lower())


def wrong_applier(spec: Mapping[str, Any], view: NodeView) -> str | None:
    """Why this applier cannot carry the plan out on this node; None: it can."""
    if not uses_device_config_manager(spec):
        if view.profile is None:
            return None
        return (
            f"AMD's Device Config Manager sets this node's layouts (profile {view.profile}); "
            f"set applier: DeviceConfigManager, or remove the label {DCM_PROFILE}"
        )
    if spec["layout"].get("mig"):
        return "AMD's Device Config Manager sets no MIG layouts"
    if spec.get("gpus") is not None and not spec.get("profile"):
        return "a profile of AMD's Device Config Manager is for all GPUs of a node: leave gpus out, or name a profile"
    return None


def ordered_step(spec: Mapping[str, Any], step: Transition) -> Transition:
    """A step of draining, with the manager's order in place of ours where the node is empty."""
    if not uses_device_config_manager(spec):
        return step
    if step.status["phase"] == "Applying":
        return Transition(status=step.status, actions=(PlanAction.SET_PROFILE,), profile=profile_of(spec))
    if step.status["phase"] == "Failed":  # nothing was changed yet
        return Transition(status=step.status, actions=(PlanAction.UNCORDON,))
    return step


def follow_manager(
    spec: Mapping[str, Any], status: Object, view: NodeView, targets: Mapping[str, str], now: float
) -> Transition:
    """Applying: it has its order. WaitingForDriver: it works. Verifying: the node agent reads the layouts back."""
    profile, phase = profile_of(spec), status["phase"]
    if phase == "Applying":
        if view.profile != profile or not view.has_taint(DCM_TAINT):
            return Transition(status=status, actions=(PlanAction.SET_PROFILE,), profile=profile)
        return Transition(status=with_phase(status, "WaitingForDriver", f"the Device Config Manager applies {profile}", now))
    current = {str(gpu["id"]): str(gpu["layout"]) for gpu in view.gpus}
    applied = all(current.get(gpu, "").lower() == layout.lower() for gpu, layout in targets.items())
    if applied and phase == "WaitingForDriver":
        return Transition(status=with_phase(status, "Verifying", "the node agent reads the layouts back", now))
    late = now - float(status.get("since") or now)
    if applied and late >= SETTLE_SECONDS:
        fresh = with_phase(status, "Succeeded", "the layouts were applied and read back", now)
        return Transition(status=fresh, actions=(PlanAction.RELEASE, PlanAction.UNCORDON))
    if late > APPLY_SECONDS:
        message = f"the Device Config Manager did not apply {profile} within {APPLY_SECONDS:.0f} s"
        fresh = with_phase(status, "Failed", f"{message}; the profile from before is restored", now)
        actions = (PlanAction.RESTORE_PROFILE, PlanAction.RELEASE, PlanAction.UNCORDON)
        return Transition(status=fresh, actions=actions, profile=status.get("profileBefore"))
    return Transition(status=status)


def node_order(view: NodeView, action: PlanAction, profile: str | None) -> Object:
    """The change of the Node for one of the manager's actions; empty: none is needed."""
    others = view.taints_without(DCM_TAINT)
    if action is PlanAction.RESTORE_PROFILE:
        return {"metadata": {"labels": {DCM_PROFILE: profile}}}
    if action is PlanAction.RELEASE:
        if view.keeps_taint or not view.has_taint(DCM_TAINT):
            return {}
        return {"metadata": {"resourceVersion": view.version}, "spec": {"taints": others}}
    metadata = {"resourceVersion": view.version, "labels": {DCM_PROFILE: profile}}
    return {"metadata": metadata, "spec": {"taints": [*others, DCM_TAINT]}}
