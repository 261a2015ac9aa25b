"""Which layouts would let pending pods run. Pure: pods that wait and nodes go in, a PartitionPlan for each change comes out.

Only nodes on which no pod holds a share are proposed, so that nothing is evicted for a guess. What a pod asks for is read from
its annotations: a partition of a mode, or memory that no partition of the present layout has.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.admission.annotations import GpuRequest, parse_annotations
from aimgpu.kubernetes.operator.plan_vocabulary import NodeView
from aimgpu.units import MIB

Object = dict[str, Any]
PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4, "CPX": 8}  # of a GPU with eight dies
_WHOLE = "SPX"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPod:
    """A pod that kube-scheduler found no GPU for."""

    name: str  # namespace/name
    request: GpuRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """GPUs of one node that should have another layout, and the pods that could run then."""

    node: str
    gpus: tuple[int, ...]
    layout: str  # "CPX/NPS1"
    pods: tuple[str, ...]

    def to_json(self) -> Object:
        return {"node": self.node, "gpus": list(self.gpus), "layout": self.layout, "pods": list(self.pods)}


def find_pending(pods: Sequence[Mapping[str, Any]], now: float, least_seconds: float, read_time: Any) -> list[PendingPod]:  # noqa: ANN401 - a function
    """Of ours, that kube-scheduler could not place for at least so long; oldest first."""
    found = []
    for pod in pods:
        conditions = {each["type"]: each for each in (pod.get("status") or {}).get("conditions") or ()}
        scheduled = conditions.get("PodScheduled") or {}
        if scheduled.get("status") != "False" or pod["metadata"].get("deletionTimestamp"):
            continue
        since = read_time(scheduled.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
        try:
            request = parse_annotations(pod["metadata"].get("annotations") or {}, pod["spec"])
        except InvalidInput:  # admission refuses such a pod; this one was changed since
            continue
        if request is not None and now - since >= least_seconds:
            name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            found.append((since, PendingPod(name=name, request=request)))
    return [pod for _, pod in sorted(found, key=lambda each: (each[0], each[1].name))]


def propose(pending: Sequence[PendingPod], nodes: Sequence[NodeView]) -> list[Proposal]:
    """The fewest GPUs that the pods need, each for one layout; a pod that no idle GPU can serve is left out."""
    waiting, found = list(pending), []
    for node in nodes:
        if node.pods or node.cordoned:
            continue
        groups: dict[str, tuple[list[int], list[str]]] = {}
        for gpu in node.gpus:
            layout, served = _best_layout(gpu, waiting)
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


def _best_layout(gpu: Mapping[str, Any], waiting: Sequence[PendingPod]) -> tuple[str | None, list[PendingPod]]:
    """Of the layouts that the GPU can have, the one under which most of the pods run that cannot run as it is."""
    current = str(gpu.get("layout"))
    best: tuple[str | None, list[PendingPod]] = (None, [])
    for name in gpu.get("layouts") or ():
        if str(name) == current:
            continue
        served = _served(gpu, str(name), [pod for pod in waiting if not _fits(pod.request, gpu, current)])
        if len(served) > len(best[1]):
            best = (str(name), served)
    return best


def _served(gpu: Mapping[str, Any], layout: str, waiting: Sequence[PendingPod]) -> list[PendingPod]:
    """Those that fit at once: whole partitions by count, shares by memory."""
    compute = layout.partition("/")[0]
    count = PARTITIONS.get(compute, 1)
    free = [int(gpu["memoryBytes"]) // count] * count
    served = []
    for pod in waiting:
        if not _fits(pod.request, gpu, layout):
            continue
        wanted = _memory(pod.request, gpu, count)
        place = next((index for index, left in enumerate(free) if left >= wanted), None)
        if place is not None:
            free[place] -= wanted
            served.append(pod)
    return served


def _fits(request: GpuRequest, gpu: Mapping[str, Any], layout: str) -> bool:
    compute, _, memory = layout.partition("/")
    if request.compute_mode not in (None, compute) or request.memory_mode not in (None, memory):
        return False
    if request.compute_mode is None and request.memory_mode is None and request.sized_by_model:
        return compute == _WHOLE  # its size is not known here; the largest partition is the safe answer
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
