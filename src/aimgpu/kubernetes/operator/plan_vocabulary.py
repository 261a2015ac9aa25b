"""What is seen of a node of a PartitionPlan, and what can be done to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Object = dict[str, Any]
DONE = ("Succeeded", "Failed")
APPLY_SECONDS = 300.0
REFUSED_SECONDS = 15.0  # a pod is gone from the API before the kubelet has given its share back; the agent tries again


class PlanAction(StrEnum):
    """What the operator does to a node."""

    CORDON = "cordon"
    UNCORDON = "uncordon"
    EVICT = "evict"
    WANT = "want"  # write the layouts into the GpuNode
    RESTORE = "restore"  # write back those from before
    SET_PROFILE = "set profile"  # taint the node and label it for AMD's Device Config Manager
    RESTORE_PROFILE = "restore profile"  # label it as before
    RELEASE = "release"  # take the taint away


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
    profile: str | None = None  # that AMD's Device Config Manager is to keep; None: it does not manage this node
    taints: Sequence[Mapping[str, Any]] = ()
    version: str = ""  # of the Node, so that a change of its taints overwrites nothing
    holder: str | None = None  # uid of the plan that changes it; None: none does
    cordoned_by_us: bool = False  # nobody else wants it cordoned
    keeps_taint: bool = False  # the manager's taint was there before the plan and stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The node's new status in the plan, and what to do for it, in order."""

    status: Object
    actions: tuple[PlanAction, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)  # for WANT and RESTORE
    profile: str | None = None  # for SET_PROFILE and RESTORE_PROFILE; None: without one


def with_phase(status: Mapping[str, Any], phase: str, message: str, now: float) -> Object:
    """The node's status from now on."""
    return {**status, "phase": phase, "message": message, "since": f"{now:.0f}"}
