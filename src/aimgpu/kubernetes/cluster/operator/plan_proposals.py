"""Which layouts would let pending pods run. Pure: pods that wait and nodes go in, a PartitionPlan for each change comes out.

Only nodes on which no pod holds a share are proposed, so that nothing is evicted for a guess. What a pod needs is found by
`pending_pods`: a partition of a mode, or memory that no partition of the present layout has.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aimgpu.kubernetes.cluster.operator.pending_pods import WHOLE, LayoutNeed, PendingPod, offers_profiles
from aimgpu.kubernetes.cluster.operator.plan_vocabulary import NodeView
from aimgpu.kubernetes.vocabulary.annotations import GpuRequest
from aimgpu.units import MIB

Object = dict[str, Any]
PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4, "CPX": 8}  # of a GPU with eight dies


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """GPUs of one node that should have another layout, and the pods that could run then."""

    node: str
    gpus: tuple[int, ...]
    layout: str  # "CPX/NPS1"
    pods: tuple[str, ...]

    def to_json(self) -> Object:
        return {"node": self.node, "gpus": list(self.gpus), "layout": self.layout, "pods": list(self.pods)}


def propose(pending: Sequence[PendingPod], nodes: Sequence[NodeView]) -> list[Proposal]:
    """The fewest GPUs that the pods need, each for one layout; a pod that no idle GPU can serve is left out."""
    waiting, found = list(pending), []
    for node in nodes:
        if node.pods or node.cordoned:
            continue
        groups: dict[str, tuple[list[int], list[str]]] = {}
        for gpu in node.gpus:
            layout, served = _best_layout(gpu, node, waiting)
            if layout is None:
                continue
            waiting = [pod for pod in waiting if pod not in served]
            indexes, names = groups.setdefault(layout, ([], []))
            indexes.append(int(gpu["index"]))
            names += [pod.name for pod in served]
        found += [
            Proposal(node=node.name, gpus=tuple(indexes), layout=layout, pods=tuple(names))
            for layout, (indexes, names) in sorted(groups.items())
        ]
    return found


def _best_layout(gpu: Mapping[str, Any], node: NodeView, waiting: Sequence[PendingPod]) -> tuple[str | None, list[PendingPod]]:
    """Of the layouts that the GPU can have, the one under which most of the pods run that cannot run as it is."""
    current = str(gpu.get("layout"))
    best: tuple[str | None, list[PendingPod]] = (None, [])
    cannot = [pod for pod in waiting if not all(_choose(need, gpu, node, current) for need in pod.needs)]
    for name in gpu.get("layouts") or ():
        if str(name) == current:
            continue
        served = _served(gpu, node, str(name), cannot)
        if len(served) > len(best[1]):
            best = (str(name), served)
    return best


def _served(gpu: Mapping[str, Any], node: NodeView, layout: str, waiting: Sequence[PendingPod]) -> list[PendingPod]:
    """Those that fit at once: whole partitions by count, shares by memory."""
    count = PARTITIONS.get(layout.partition("/")[0], 1)
    free = [int(gpu["memoryBytes"]) // count] * count
    served = []
    for pod in waiting:
        left = list(free)
        if all(_take(need, gpu, node, layout, left) for need in pod.needs):
            free = left
            served.append(pod)
    return served


def _take(alternatives: Sequence[LayoutNeed], gpu: Mapping[str, Any], node: NodeView, layout: str, free: list[int]) -> bool:
    """Whether one of them has room; what it takes is then gone from `free`."""
    chosen = _choose(alternatives, gpu, node, layout)
    wanted = 0 if chosen is None else _memory(chosen.request, gpu, len(free))
    place = None if chosen is None else next((index for index, left in enumerate(free) if left >= wanted), None)
    if place is None:
        return False
    free[place] -= wanted
    return True


def _choose(alternatives: Sequence[LayoutNeed], gpu: Mapping[str, Any], node: NodeView, layout: str) -> LayoutNeed | None:
    return next((one for one in alternatives if _reaches(one, gpu, node) and _suits(one, gpu, layout)), None)


def _reaches(need: LayoutNeed, gpu: Mapping[str, Any], node: NodeView) -> bool:
    """Whether the GPU's partitions are offered the way that the pod asks."""
    if need.product not in (None, gpu.get("product")):
        return False
    return offers_profiles(node.resources) if need.resource is not None else not node.resources


def _suits(need: LayoutNeed, gpu: Mapping[str, Any], layout: str) -> bool:
    if need.partitioned and layout.partition("/")[0] == WHOLE:
        return False
    return (need.request.sized_by_model and need.partitioned) or _fits(need.request, gpu, layout)


def _fits(request: GpuRequest, gpu: Mapping[str, Any], layout: str) -> bool:
    compute, _, memory = layout.partition("/")
    if request.compute_mode not in (None, compute) or request.memory_mode not in (None, memory):
        return False
    if request.compute_mode is None and request.memory_mode is None and request.sized_by_model:
        return compute == WHOLE  # its size is not known here; the largest partition is the safe answer
    count = PARTITIONS.get(compute, 1)
    return _memory(request, gpu, count) <= int(gpu["memoryBytes"]) // count


def _memory(request: GpuRequest, gpu: Mapping[str, Any], count: int) -> int:
    partition = int(gpu["memoryBytes"]) // count
    if request.memory_mib is not None:
        return request.memory_mib * MIB
    if request.fraction_ppm is not None:
        whole = partition if request.wants_partition else int(gpu["memoryBytes"])
        return whole * request.fraction_ppm // 1_000_000
    return partition


def plan_for(proposal: Proposal, auto: Mapping[str, Any]) -> Object:
    """The PartitionPlan that carries a proposal out; equal proposals have one name."""
    name = auto["metadata"]["name"]
    text = f"{proposal.node}/{proposal.gpus}/{proposal.layout}"
    compute, _, memory = proposal.layout.partition("/")
    spec = auto["spec"]
    layout = {"computeMode": compute, **({"memoryMode": memory} if memory else {})}
    chosen: Object = {
        "nodeSelector": {"kubernetes.io/hostname": proposal.node},
        "gpus": list(proposal.gpus),
        "layout": layout,
        "drainTimeoutSeconds": int(spec.get("drainTimeoutSeconds") or 600),
    }
    if spec.get("applier"):
        chosen["applier"] = spec["applier"]
    return {
        "apiVersion": auto["apiVersion"],
        "kind": "PartitionPlan",
        "metadata": {
            "name": f"{name[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}",
            "ownerReferences": [
                {"apiVersion": auto["apiVersion"], "kind": "PartitionPlan", "name": name, "uid": auto["metadata"]["uid"]}
            ],
        },
        "spec": chosen,
    }
