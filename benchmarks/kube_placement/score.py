"""Allocation recomputed from bindings alone: where each pod is, and on which GPUs. Refuses what cannot be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.kube_placement.trace import WHOLE, TraceNode, TracePod

Binding = tuple[int, tuple[int, ...]]  # a node's number, and numbers of its GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    allocated_percent: float
    bound: int
    refused_that_fit: int  # pods that are not bound, for which the end has room
    refused: Mapping[str, str] = field(default_factory=dict)  # by kind: how many of how many


def score(nodes: Sequence[TraceNode], pods: Sequence[TracePod], bound: Mapping[int, Binding]) -> Score:
    """`bound`: by the pod's number. Raises ValueError where a node or a GPU holds more than it has."""
    cpu = [node.cpu_millis for node in nodes]
    memory = [node.memory_mib for node in nodes]
    gpus = [[WHOLE] * node.gpus for node in nodes]
    for number, (node, places) in bound.items():
        pod = pods[number]
        if len(set(places)) != pod.gpus:
            raise ValueError(f"pod {number} has GPUs {places} and asked for {pod.gpus}")
        cpu[node] -= pod.cpu_millis
        memory[node] -= pod.memory_mib
        for place in places:
            gpus[node][place] -= pod.milli
        if min([cpu[node], memory[node], *gpus[node]]) < 0:
            raise ValueError(f"node {node} holds more than it has with pod {number}")
    refused = [pod for number, pod in enumerate(pods) if number not in bound]
    fitting = [
        pod
        for pod in refused
        if any(
            cpu[node] >= pod.cpu_millis
            and memory[node] >= pod.memory_mib
            and sum(left >= pod.milli for left in gpus[node]) >= pod.gpus
            for node in range(len(nodes))
        )
    ]
    kinds = sorted({_kind(pod) for pod in pods})
    counts = {kind: f"{sum(_kind(pod) == kind for pod in refused)}/{sum(_kind(pod) == kind for pod in pods)}" for kind in kinds}
    used = sum(pods[number].demand for number in bound)
    total = WHOLE * sum(node.gpus for node in nodes)
    return Score(
        allocated_percent=round(100 * used / total, 2), bound=len(bound), refused_that_fit=len(fitting), refused=counts
    )


def _kind(pod: TracePod) -> str:
    if not pod.gpus:
        return "without a GPU"
    return "share" if pod.milli < WHOLE else f"{pod.gpus} whole"
