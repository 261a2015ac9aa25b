"""A cluster where instances come and go: Poisson arrivals of the trace's pods, exponential lifetimes, 110 % offered.

Starts empty, runs for some mean lifetimes, and counts from `WARM` on: mean allocation over arrivals, and rejections by class.
The scorer's own FGD runs under the same arrivals for comparison. How many nodes are held for large pods
(`benchmarks.placement.reservation`) was tuned on seeds 1-40; no figure that is reported uses them.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aimgpu.placement.scoring.weights import COMING_AND_GOING
from benchmarks.placement.openb import Engine, ask_of, mix_of, snapshot_of
from benchmarks.placement.reservation import reserve_nodes

WARM, END = 3.0, 4.5  # mean lifetimes
LARGE, WHOLE_MILLI = 8, 1000
COUNTED = ("alloc", "rejected8", "rejected_others", "rejected_whole", "rejected_shares")


@dataclass
class Arrivals:
    pods: Any
    at: Any
    leaves: Any


class Departing(Engine):
    """The engine with the weights for churn, and nodes held for large Asks."""

    weights = COMING_AND_GOING

    @staticmethod
    def held(cluster: Any, trace: Any) -> dict[str, int]:  # noqa: ANN401 - the scorer's own types
        asks = [ask_of(kind, number) for number, kind in enumerate(trace.kinds)]
        return dict(reserve_nodes(snapshot_of(cluster), mix_of(trace, asks)))


def arrivals_of(trace: Any, total_milli: int, seed: int, load: float = 1.1) -> Arrivals:  # noqa: ANN401
    chance = np.random.default_rng(seed)
    rate = load * total_milli / float(trace.demand.mean())
    count = int(rate * END)
    at = np.cumsum(chance.exponential(1 / rate, count))
    return Arrivals(pods=chance.integers(len(trace), size=count), at=at, leaves=at + chance.exponential(1.0, count))


def replay(
    trace: Any,  # noqa: ANN401
    arrivals: Arrivals,
    place: Callable[[int, int], Any],
    release: Callable[[Any], None],
) -> dict[str, float]:
    """Percent rejected by class, and the mean milli allocated; `place` gives a handle or None."""
    leaving: list[tuple[float, int, Any, int]] = []
    used, allocated, count = 0, 0, 0
    seen, failed = Counter[str](), Counter[str]()
    for number, (pod, at, leaves) in enumerate(zip(arrivals.pods, arrivals.at, arrivals.leaves, strict=True)):
        while leaving and leaving[0][0] <= at:
            _, _, handle, demand = heapq.heappop(leaving)
            release(handle)
            used -= demand
        kind, memory, demand = int(trace.kind[pod]), int(trace.mem[pod]), int(trace.demand[pod])
        handle = place(kind, memory)
        if handle is not None:
            heapq.heappush(leaving, (float(leaves), number, handle, demand))
            used += demand
        if at >= WARM:
            classes = _classes(trace.kinds[kind])
            seen.update(classes)
            failed.update(classes if handle is None else ())
            allocated, count = allocated + used, count + 1
    return {"allocated_milli": allocated / count, **{f"rejected{name}": 100 * failed[name] / seen[name] for name in seen}}


def _classes(kind: tuple[int, int, int, str]) -> tuple[str, ...]:
    """What a pod counts for: 8 GPUs, or others, and of those one whole GPU, or a share of one."""
    _, milli, gpus, _ = kind
    if gpus == LARGE:
        return ("8",)
    if gpus != 1:
        return ("_others",)
    return ("_others", "_whole" if milli >= WHOLE_MILLI else "_shares")


def run_engine(scorer: Any, cluster: Any, trace: Any, seed: int) -> dict[str, float]:  # noqa: ANN401, ARG001
    cluster.reset(np.random.default_rng(seed).permutation(len(cluster.rows)))
    engine = Departing(cluster, trace, None, reserved=Departing.held(cluster, trace))
    result = replay(trace, arrivals_of(trace, cluster.total, seed), engine.decide, engine.chooser.release)
    return {**result, "alloc": 100 * result["allocated_milli"] / cluster.total}


def run_fgd(scorer: Any, cluster: Any, trace: Any, seed: int) -> dict[str, float]:  # noqa: ANN401
    cluster.reset(np.random.default_rng(seed).permutation(len(cluster.rows)))
    policy = scorer.FGD(cluster, trace, None)

    def place(kind: int, memory: int) -> Any:  # noqa: ANN401
        found = policy.place(kind, memory)
        if found is None:
            return None
        cluster.take(trace.kinds[kind], memory, *found)
        return trace.kinds[kind], memory, *found

    result = replay(trace, arrivals_of(trace, cluster.total, seed), place, lambda handle: cluster.take(*handle, sign=1))
    return {**result, "alloc": 100 * result["allocated_milli"] / cluster.total}
