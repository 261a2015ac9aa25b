"""A part of the openb trace and the order in which its pods come: published nodes and pods (Alibaba, 2023), which are not ours.

The order is the one that the published scores use: the trace's pods shuffled, then more drawn with replacement, until so many
GPUs were asked for. Pods that name a GPU model take any here.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WHOLE = 1000


@dataclass(frozen=True, slots=True)
class TraceNode:
    cpu_millis: int
    memory_mib: int
    gpus: int


@dataclass(frozen=True, slots=True)
class TracePod:
    cpu_millis: int
    memory_mib: int
    milli: int  # of each GPU
    gpus: int

    @property
    def demand(self) -> int:
        return self.milli * self.gpus


def draw(folder: Path, *, part: int, seed: int, asked_percent: int = 130) -> tuple[list[TraceNode], list[TracePod]]:
    """One node of `part`, and pods in their order."""
    generator = np.random.default_rng(seed)
    rows = sorted(_rows(folder / "openb_node_list_gpu_node.csv"), key=lambda row: row["sn"])
    nodes = [TraceNode(int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"])) for row in rows]
    kept = sorted(generator.choice(len(nodes), len(nodes) // part, replace=False).tolist())
    nodes = [nodes[number] for number in kept]
    rows = sorted(_rows(folder / "openb_pod_list_default.csv"), key=lambda row: row["name"])
    pods = [_pod(row) for row in rows]
    limit = asked_percent * WHOLE * sum(node.gpus for node in nodes) // 100
    order, total = list[TracePod](), 0
    shuffled = [pods[number] for number in generator.permutation(len(pods)).tolist()]
    while True:
        pod = shuffled.pop() if shuffled else pods[int(generator.integers(len(pods)))]
        if total + pod.demand > limit:
            return nodes, order
        total += pod.demand
        order.append(pod)


def _pod(row: dict[str, str]) -> TracePod:
    gpus = int(row["num_gpu"])
    milli = min(int(row["gpu_milli"] or 0), WHOLE) if gpus else 0
    return TracePod(int(float(row["cpu_milli"])), int(float(row["memory_mib"])), milli, gpus)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
