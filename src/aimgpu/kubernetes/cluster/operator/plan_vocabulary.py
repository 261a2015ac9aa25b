"""What is seen of a node of a PartitionPlan, and what can be done to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aimgpu.kubernetes.vocabulary.names import TAINT_NODE

Object = dict[str, Any]
PLAN_TAINT = {"key": TAINT_NODE, "effect": "NoSchedule"}
DONE = ("Succeeded", "Failed")
APPLY_SECONDS = 300.0
SETTLE_SECONDS = 3.0  # with a layout published, before the node is opened: kube-scheduler learns of them by two watches
READ_BACK = "the layouts were read back; kube-scheduler learns of them"
REFUSED_SECONDS = 15.0  # a pod is gone from the API before the kubelet has given its share back; the agent tries again


class PlanAction(StrEnum):
    """What the operator does to a node."""

    CORDON = "cordon"  # with the taint of plans
    UNCORDON = "uncordon"
    EVICT = "evict"
    WANT = "want"  # write the layouts into the GpuNode
    RESTORE = "restore"  # write back those from before
    SET_PROFILE = "set profile"  # taint the node and label it for AMD's Device Config Manager
    RESTORE_PROFILE = "restore profile"  # label it as before
    RELEASE = "release"  # take the manager's taint away


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
    gpus_of: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by pod, if known
    kept: Mapping[str, str] = field(default_factory=dict)  # pods that could not be evicted, with what keeps them
    profile: str | None = None  # that AMD's Device Config Manager is to keep; None: it does not manage this node
    taints: Sequence[Mapping[str, Any]] = ()
    version: str = ""  # of the Node, so that a change of its taints overwrites nothing
    holder: str | None = None  # uid of the plan that changes it; None: none does
    cordoned_by_us: bool = False  # nobody else wants it cordoned
    resources: Sequence[Mapping[str, Any]] = ()  # that its device plugin offers; none: the DRA driver publishes its GPUs
    fixed: str = ""  # why its agent cannot change some layouts
    keeps_taint: bool = False  # the manager's taint was there before the plan and stays

    @property
    def closed(self) -> bool:
        """No pod comes here any more, whichever of cordon and taint it tolerates."""
        return self.cordoned and self.has_taint(PLAN_TAINT)

    def has_taint(self, taint: Mapping[str, Any]) -> bool:
        return any(_is_taint(one, taint) for one in self.taints)

    def taints_without(self, taint: Mapping[str, Any]) -> list[Object]:
        """The others as they are: the list is written as a whole."""
        return [dict(one) for one in self.taints if not _is_taint(one, taint)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The node's new status in the plan, and what to do for it, in order."""

    status: Object
    actions: tuple[PlanAction, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)  # for WANT and RESTORE
    profile: str | None = None  # for SET_PROFILE and RESTORE_PROFILE; None: without one


def _is_taint(one: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    return all(one.get(name) == taint.get(name) for name in ("key", "value", "effect"))


def with_phase(status: Mapping[str, Any], phase: str, message: str, now: float) -> Object:
    """The node's status from now on."""
    return {**status, "phase": phase, "message": message, "since": f"{now:.0f}"}
