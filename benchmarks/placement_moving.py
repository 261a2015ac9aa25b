"""Departures where models may move: room for a pod of 8 GPUs is made by moving others aside, nothing being stopped.

The same arrivals as `placement_departures`; no node is held. What a move costs is left out, so their number is reported.
"""

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aimgpu.domain import Ask, Placement, Refusal
from aimgpu.placement import Snapshot, apply_plan
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.planner import plan_for
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.scoring.weights import COMING_AND_GOING
from aimgpu.placement.session import PlacementSession
from benchmarks.placement_departures import LARGE, arrivals_of, replay
from benchmarks.placement_openb import MIB, ask_of, snapshot_of

if TYPE_CHECKING:
    from aimgpu.placement.scoring.fleet import Charge

LIMITS = Limits(may_stop=False, may_change_layouts=False, most_moves=16, most_tried=6)


class MovingEngine:
    """Places pod after pod; where one of 8 GPUs finds no room, the planner is asked to make some."""

    def __init__(self, cluster: Any, trace: Any) -> None:  # noqa: ANN401 - the scorer's own types
        self._asks = [ask_of(kind, number) for number, kind in enumerate(trace.kinds)]
        self._large = {number for number, kind in enumerate(trace.kinds) if kind[2] == LARGE}
        self._mix = Mix(counts=tuple((ask, int(count)) for ask, count in zip(self._asks, trace.count, strict=True)))
        self._session = self._begin(snapshot_of(cluster))
        self._without_gpu: dict[str, Charge] = {}  # pods that take CPU alone: no Snapshot knows them
        self._known_cpu: Counter[int] = Counter()  # of these, by node, that the session's first Snapshot counts
        self._known_host: Counter[int] = Counter()
        self._count = 0
        self.moves, self.plans, self.plan_seconds = 0, 0, 0.0

    def place(self, kind: int, memory_mib: int) -> str | None:
        """The name to release it by; None where it was refused."""
        self._count += 1
        ask = replace(self._asks[kind], name=f"pod{self._count}", host_memory_bytes=memory_mib * MIB)
        if not ask.devices:
            return self._place_without_gpu(ask)
        if isinstance(self._session.place(ask), Placement):
            return ask.name
        return self._make_room(ask) if kind in self._large else None

    def release(self, name: str) -> None:
        """Give back what a pod holds."""
        charge = self._without_gpu.pop(name, None)
        if charge is None:
            self._session.release(name)
        else:
            self._session.chooser.release(charge)

    def _place_without_gpu(self, ask: Ask) -> str | None:
        chooser = self._session.chooser
        kind = chooser.kind_of(ask)
        node = chooser.choose(kind, ask.host_memory_bytes)
        if node is None:
            return None
        charge = self._without_gpu[ask.name] = chooser.charge_for(kind, node, ask)
        chooser.take(charge)
        return ask.name

    def _make_room(self, ask: Ask) -> str | None:
        start = time.process_time()
        snapshot = self._whole_snapshot()
        plan = plan_for(snapshot, ask, LIMITS)
        self.plans += 1
        placed = not isinstance(plan, Refusal)
        if not isinstance(plan, Refusal):
            self.moves += len(plan.moved)
            self._session = self._begin(apply_plan(snapshot, plan))
            self._known_cpu, self._known_host = self._cpu_and_host()
        self.plan_seconds += time.process_time() - start
        return ask.name if placed else None

    def _whole_snapshot(self) -> Snapshot:
        """With what pods without a GPU take of each node's CPU and memory."""
        cpu, host = self._cpu_and_host()
        snapshot = self._session.snapshot
        index = self._session.fleet.index
        nodes = tuple(
            replace(
                node,
                used_cpu_millis=node.used_cpu_millis + cpu[index[node.name]] - self._known_cpu[index[node.name]],
                used_host_memory_bytes=node.used_host_memory_bytes
                + host[index[node.name]]
                - self._known_host[index[node.name]],
            )
            for node in snapshot.nodes
        )
        return replace(snapshot, nodes=nodes)

    def _cpu_and_host(self) -> tuple[Counter[int], Counter[int]]:
        cpu, host = Counter[int](), Counter[int]()
        for charge in self._without_gpu.values():
            cpu[charge.node] += charge.cpu_millis
            host[charge.node] += charge.host_memory_bytes
        return cpu, host

    def _begin(self, snapshot: Snapshot) -> PlacementSession:
        return PlacementSession(snapshot, mix=self._mix, weights=COMING_AND_GOING)


def run_moving(scorer: Any, cluster: Any, trace: Any, seed: int) -> dict[str, float]:  # noqa: ANN401, ARG001
    cluster.reset(np.random.default_rng(seed).permutation(len(cluster.rows)))
    engine = MovingEngine(cluster, trace)
    arrivals = arrivals_of(trace, cluster.total, seed)
    result = replay(trace, arrivals, engine.place, engine.release)
    return {
        **result,
        "alloc": 100 * result["allocated_milli"] / cluster.total,
        "moves_per_1000_pods": 1000 * engine.moves / len(arrivals.pods),
        "plan_seconds": engine.plan_seconds / max(engine.plans, 1),
    }
