"""Race against KAI-Scheduler's own Go benchmarks, algorithm against algorithm, in one run on the same cores.

    python -m benchmarks.placement_race.run --kai DIR     # a checkout of KAI-Scheduler, with Go on the PATH
    ... --snapshot-tool FILE --scorer openb_eval.py --openb DIR     # and its snapshot tool on the openb pods

KAI's AllocateAction benchmarks build a session from a mocked cache and place single-GPU jobs on nodes of eight GPUs; one
operation is one whole cycle. Ours builds the engine from a bare snapshot of the same nodes and places the same jobs, names,
slots and reasons included, on one core. KAI also shares GPUs fairly between four queues here, which ours does not; neither
talks to an API server.
"""

import argparse
import os
import re
import statistics
import subprocess
import time
from pathlib import Path

from aimgpu.domain import Ask, Placement, Whole
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.session import PlacementSession
from benchmarks.placement.openb import device_of
from benchmarks.placement.run import load_scorer
from benchmarks.placement_race.openb import race_openb
from benchmarks.recording import write_result

SIZES = {"SmallCluster": (10, 50), "MediumCluster": (50, 200), "LargeCluster": (100, 500)}
PACKAGE = "./pkg/scheduler/actions"
_LINE = re.compile(r"BenchmarkAllocateAction_(\w+?)(?:-\d+)?\s+\d+\s+([0-9.]+) ns/op")
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kai", type=Path, required=True, help="a checkout of KAI-Scheduler")
    parser.add_argument("--binary", type=Path, help="its benchmarks, already built with `go test -c`")
    parser.add_argument("--snapshot-tool", type=Path, help="its cmd/snapshot-tool, built")
    parser.add_argument("--scorer", type=Path, help="openb_eval.py")
    parser.add_argument("--openb", type=Path, help="folder with the openb CSV files")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    _cycles(run_kai(args.kai, args.binary), figures, rows)
    if args.snapshot_tool:
        race_openb(args.snapshot_tool, load_scorer(args.scorer, args.openb), figures, rows)
    for name, value in figures.items():
        print(f"{name:52} {value:12.1f}")
    command = "python -m benchmarks.placement_race.run --kai DIR --snapshot-tool FILE --scorer openb_eval.py --openb DIR"
    print("wrote", write_result("placement-race", figures, rows, packages=("numpy",), command=command))


def _cycles(theirs: dict[str, list[float]], figures: dict[str, float], rows: list[dict[str, object]]) -> None:
    for name, (nodes, jobs) in SIZES.items():
        ours = statistics.median(cycle_seconds(nodes, jobs) for _ in range(ROUNDS))
        kai = statistics.median(theirs[name])
        figures[f"race.kai.{name}.decisions_per_second"] = round(jobs / kai)
        figures[f"race.ours.{name}.decisions_per_second"] = round(jobs / ours)
        figures[f"race.{name}.times_faster"] = round(kai / ours, 1)
        rows.append({"benchmark": name, "nodes": nodes, "jobs": jobs, "kai_seconds": theirs[name], "our_seconds": ours})


def run_kai(checkout: Path, binary: Path | None) -> dict[str, list[float]]:
    """Seconds of one cycle, by benchmark, each measured three times."""
    flags = ["bench=AllocateAction", "benchtime=3x", "count=3", "run=^$"]
    if binary:
        command = [str(binary), *(f"-test.{flag}" for flag in flags)]
    else:
        command = ["go", "test", PACKAGE, *(f"-{flag}" for flag in flags)]
    folder = checkout / PACKAGE if binary else checkout
    output = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[float]] = {}
    for name, nanoseconds in _LINE.findall(output):
        found.setdefault(name, []).append(float(nanoseconds) / 1e9)
    return found


def cycle_seconds(nodes: int, jobs: int) -> float:
    """Wall seconds from a bare snapshot to the last Placement."""
    snapshot = Snapshot(nodes=tuple(_node(f"node-{number}") for number in range(nodes)))
    asks = [Ask(name=f"job-{number}", want=Whole()) for number in range(jobs)]
    start = time.perf_counter()
    engine = PlacementSession(snapshot, mix=Mix.of(asks))
    placed = sum(isinstance(engine.place(ask), Placement) for ask in asks)
    seconds = time.perf_counter() - start
    if placed != jobs:
        raise RuntimeError(f"{placed} of {jobs} jobs were placed")
    return seconds


def _node(name: str) -> NodeState:
    return NodeState(
        name=name, devices=tuple(DeviceState(device=device_of(f"{name}-{slot}", "gpu", slot)) for slot in range(8))
    )


if __name__ == "__main__":
    main()
