"""Race against kube-scheduler in one run on the same cores: its decision alone, and its scheduler_perf with an API server.

    python -m benchmarks.placement_race_kube.run     # builds with Go from the module proxy, into --cache, the first time

1. Algorithm against algorithm: UpdateSnapshot, SchedulePod (default profile), AssumePod of kube-scheduler as a library, no API
   server, no queue, no binding; ours decides and charges through `Engine.place`. 1,213 nodes of eight GPUs, one GPU a pod.
2. scheduler_perf: kube-scheduler with kube-apiserver and etcd in the same run. Its pods a second include their round trips,
   which ours does not make; the mean of its PreFilter, Filter, PreScore and Score is given beside it, measured while the API
   server works on the same cores.

Theirs may use every core, ours uses one. Wall seconds are raced, CPU seconds given too.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aimgpu.domain import Ask, Auto, Placement, Whole
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.scoring.chooser import Chooser
from aimgpu.placement.scoring.fleet import Fleet
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.scoring.valuation import Valuation
from aimgpu.placement.scoring.weights import FILLING_UP
from aimgpu.placement.session import PlacementSession
from benchmarks.placement.openb import device_of
from benchmarks.placement_race_kube.build import Tools, build_tools
from benchmarks.placement_race_kube.perf import gpu_workload, run_perf
from benchmarks.recording import write_result

KUBERNETES, ETCD = "v1.36.3", "v3.6.16"
MIB = 1 << 20
ROUNDS = 3
Figures = dict[str, float]
Rows = list[dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class Load:
    """So many equal pods onto so many equal nodes; those `before` are not timed."""

    nodes: int
    node_gpus: int
    node_cpu_millis: int
    node_memory_mib: int
    before: int
    pods: int
    pod_gpus: int
    pod_cpu_millis: int
    pod_memory_mib: int


GPUS = Load(
    nodes=1213,
    node_gpus=8,
    node_cpu_millis=128_000,
    node_memory_mib=1 << 20,
    before=1000,
    pods=5000,
    pod_gpus=1,
    pod_cpu_millis=4000,
    pod_memory_mib=16_384,
)
BASIC = Load(  # as SchedulingBasic/5000Nodes has it
    nodes=5000,
    node_gpus=0,
    node_cpu_millis=4000,
    node_memory_mib=32_768,
    before=1000,
    pods=1000,
    pod_gpus=0,
    pod_cpu_millis=100,
    pod_memory_mib=500,
)
CLAIMS = Load(  # as SchedulingWithResourceClaimTemplate/2000pods_200nodes has it, its device being a GPU here
    nodes=200,
    node_gpus=10,
    node_cpu_millis=4000,
    node_memory_mib=32_768,
    before=1000,
    pods=1000,
    pod_gpus=1,
    pod_cpu_millis=0,
    pod_memory_mib=0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", default=KUBERNETES, help="version of k8s.io/kubernetes")
    parser.add_argument("--etcd", default=ETCD, help="version of go.etcd.io/etcd/server/v3")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "aimgpu" / "kube", help="where binaries are kept"
    )
    args = parser.parse_args()
    tools = build_tools(args.cache, args.kubernetes, args.etcd)
    figures: Figures = {}
    rows: Rows = [{"part": "versions", "kubernetes": args.kubernetes, "etcd": args.etcd, "go": tools.go}]
    _algorithm(tools, figures, rows)
    with gpu_workload(GPUS.__dict__) as folder:
        found = run_perf(tools.misc, folder, "GPUs/1213Nodes", etcd=tools.etcd)
    _compare("GPUs", found, GPUS, figures, rows)
    found = run_perf(tools.misc, tools.folder("misc"), "SchedulingBasic/5000Nodes", etcd=tools.etcd)
    _compare("SchedulingBasic", found, BASIC, figures, rows)
    claims = "SchedulingWithResourceClaimTemplate/2000pods_200nodes"
    found = run_perf(tools.dra, tools.folder("dra"), claims, etcd=tools.etcd)
    _compare("ResourceClaims", found, CLAIMS, figures, rows)
    for name, value in figures.items():
        print(f"{name:64} {value:12.2f}")
    command = "python -m benchmarks.placement_race_kube.run"
    print("wrote", write_result("placement-race-kube", figures, rows, packages=("numpy",), command=command))


def _algorithm(tools: Tools, figures: Figures, rows: Rows) -> None:
    """kube-scheduler with as many nodes scored as it likes and with all, ours right after each."""
    for name, percent in (("default", 0), ("all_nodes", 100)):
        theirs, ours = tools.algorithm_seconds(GPUS.__dict__, percent), our_seconds(GPUS)
        figures[f"race.kube.algorithm.{name}.decisions_per_second"] = round(GPUS.pods / theirs["seconds"], 1)
        figures[f"race.ours.algorithm.{name}.decisions_per_second"] = round(GPUS.pods / ours["seconds"])
        figures[f"race.kube.algorithm.{name}.times_faster"] = round(theirs["seconds"] / ours["seconds"], 1)
        figures[f"race.kube.algorithm.{name}.cpu_times_less"] = round(theirs["cpu_seconds"] / ours["cpu_seconds"], 1)
        rows.append({"part": "algorithm", "scored": name, **GPUS.__dict__, "kube": theirs, "ours": ours})


def _compare(name: str, theirs: dict[str, float], load: Load, figures: Figures, rows: Rows) -> None:
    ours = our_seconds(load)
    rate = load.pods / ours["seconds"]
    figures[f"race.kube.{name}.pods_per_second"] = round(theirs["pods_per_second"], 1)
    figures[f"race.kube.{name}.decision_ms"] = round(theirs["decision_ms"], 3)
    figures[f"race.ours.{name}.decisions_per_second"] = round(rate)
    figures[f"race.ours.{name}.decision_ms"] = round(1000 / rate, 4)
    figures[f"race.kube.{name}.decision_times_longer"] = round(theirs["decision_ms"] * rate / 1000, 1)
    rows.append({"part": "scheduler_perf", "workload": name, **load.__dict__, "kube": theirs, "ours": ours})


def our_seconds(load: Load) -> dict[str, float]:
    """Wall and CPU seconds of deciding and charging the timed pods, each the median of some runs."""
    runs = [_ours(load) for _ in range(ROUNDS)]
    wall, cpu = (statistics.median(each) for each in zip(*runs, strict=True))
    return {"seconds": wall, "cpu_seconds": cpu}


def _ours(load: Load) -> tuple[float, float]:
    place = _placer(load)
    asks = [_ask(load, number) for number in range(load.before + load.pods)]
    for ask in asks[: load.before]:
        place(ask)
    start, cpu = time.perf_counter(), time.process_time()
    placed = sum(map(place, itertools.islice(asks, load.before, None)))
    wall = time.perf_counter() - start
    if placed != load.pods:
        raise RuntimeError(f"{placed} of {load.pods} pods were placed")
    return wall, time.process_time() - cpu


def _placer(load: Load) -> Callable[[Ask], bool]:
    snapshot, mix = Snapshot(nodes=_nodes(load)), Mix.of([_ask(load, 0)])
    if not load.pod_gpus:
        return _hosts_only(snapshot, mix)
    engine = PlacementSession(snapshot, mix=mix)
    return lambda ask: isinstance(engine.place(ask), Placement)


def _hosts_only(snapshot: Snapshot, mix: Mix) -> Callable[[Ask], bool]:
    """Pods that want no GPU do not pass the engine's door; the chooser behind it takes them."""
    fleet = Fleet(snapshot)
    chooser = Chooser(fleet, Valuation(fleet, mix, FILLING_UP))

    def place(ask: Ask) -> bool:
        kind = chooser.compiled_for(ask)
        node = chooser.choose(kind, ask.host_memory_bytes)
        if node is not None:
            chooser.take(chooser.charge_for(kind, node, ask))
        return node is not None

    return place


def _nodes(load: Load) -> tuple[NodeState, ...]:
    names: Sequence[str] = [f"n{number:05d}" for number in range(load.nodes)]
    return tuple(
        NodeState(
            name=name,
            devices=tuple(DeviceState(device=device_of(f"{name}-{slot}", "gpu", slot)) for slot in range(load.node_gpus)),
            cpu_millis=load.node_cpu_millis,
            host_memory_bytes=load.node_memory_mib * MIB,
        )
        for name in names
    )


def _ask(load: Load, number: int) -> Ask:
    want = Whole(count=load.pod_gpus) if load.pod_gpus else Auto()
    return Ask(
        name=f"p{number}",
        want=want,
        footprint_bytes=None if load.pod_gpus else 0,
        devices=1 if load.pod_gpus else 0,
        cpu_millis=load.pod_cpu_millis,
        host_memory_bytes=load.pod_memory_mib * MIB,
    )


if __name__ == "__main__":
    main()
