"""How well tenants are isolated on one real GPU: `PYTHONPATH=src python3 -m benchmarks.isolation_h200.run`.

Needs PyTorch, a C compiler and an NVIDIA GPU; MPS rows also need nvidia-cuda-mps-control. Everything is a ratio to the same
tenant alone in the same run; cost, gate and long take turns in short windows (paired.py). Changes no setting of the
card. With `--budget`, parts that would begin later are left out and named.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aimgpu.domain import Priority
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB
from benchmarks.isolation_h200.ahead import measure_ahead
from benchmarks.isolation_h200.alternating import measure_alternating, measure_more_alternating
from benchmarks.isolation_h200.bench import CONTEXT, Bench, Member, TenantDied, ask_smi, mps
from benchmarks.isolation_h200.memory import run_memory
from benchmarks.isolation_h200.paired import measure_cost, measure_gate, measure_long
from benchmarks.isolation_h200.random_memory import measure_own_pools, measure_random_memory, measure_streams_and_every_kind
from benchmarks.isolation_h200.stage import Stage
from benchmarks.recording import write_result


def hogs(count: int, like: Member | None = None) -> list[Member]:
    like = like or Member(name="hog", kind="gemm")
    return [replace(like, name=f"hog{i}", seed=10 + i) for i in range(count)]


def critical(kind: str = "decode", priority: Priority | None = None, *, signal: bool = False) -> Member:
    return Member(name="critical", kind=kind, priority=priority, signal=signal)


BEST_EFFORT = Member(name="hog", kind="gemm", priority=Priority.LOW)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--only", default="", help="comma list of parts: " + ", ".join((*PAIRED, *PARTS)))
    parser.add_argument("--name", default="isolation-h200", help="of the results file")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no further part begins")
    parser.add_argument("--out", type=Path, help="folder that gets a copy of the results file")
    arguments = parser.parse_args()
    chosen = [part for part in arguments.only.split(",") if part] or [*PAIRED, *PARTS]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.seconds)
        stage = Stage(bench)
        card = {name: ask_smi(name) for name in ("name", "driver_version", "memory.total")}
        figures: dict[str, Any] = {"card": card}
        bench.save = lambda: save(arguments, figures, bench.rows)
        for part in chosen:
            spent = time.monotonic() - begun
            if spent > arguments.budget:
                bench.rows.append({"row": part, "left_out": f"after {spent:.0f} s"})
                continue
            run_part(bench, stage, figures, part)
            figures.setdefault("part_seconds", {})[part] = round(time.monotonic() - begun - spent, 1)
            bench.save()  # the machine may be taken away before the last part
        stage.close()
    print_table(figures, bench.rows)


def save(arguments: argparse.Namespace, figures: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    command = f"python -m benchmarks.isolation_h200.run {' '.join(sys.argv[1:])}".strip()
    path = write_result(arguments.name, figures, rows, packages=["torch"], command=command)
    if arguments.out is not None:
        shutil.copy(path, arguments.out)


def run_part(bench: Bench, stage: Stage, figures: dict[str, Any], part: str) -> None:
    try:
        if part in PAIRED:
            PAIRED[part](bench, stage, figures)
            return
        stage.close()
        PARTS[part](bench, figures)
    except (TenantDied, OSError, subprocess.SubprocessError) as error:
        stage.close()
        bench.rows.append({"row": part, "failed": str(error)})
        for log in sorted(bench.folder.glob("*.log")):
            print(log.name, log.read_text()[-1500:], flush=True)


def print_table(figures: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """The figures in short, last."""
    for name, value in figures.items():
        if not isinstance(value, Mapping | list):
            print(f"{name}: {value}")
        elif isinstance(value, Mapping):
            print(f"{name}: " + ", ".join(f"{key} {figure}" for key, figure in value.items()))
    for row in rows:
        if "failed" in row or "left_out" in row:
            print(dict(row))


def alone(figures: Mapping[str, Any], name: str) -> float:
    return float(statistics.median(entry[name] for entry in figures["alone"]))


def compare(row: Mapping[str, Any], figures: dict[str, Any], name: str) -> None:
    got = row["critical"]
    total = sum(entry["units_per_second"] for key, entry in row.items() if key.startswith("hog"))
    figures[name] = {
        "p50_x": round(got["request_p50_ms"] / alone(figures, "request_p50_ms"), 3),
        "p95_x": round(got["request_p95_ms"] / alone(figures, "request_p95_ms"), 3),
        "hog_tflops": round(total / 1e12, 1),
        "hog_share_of_idle": round(total / 1e12 / figures["solo_tflops"] / (1 - got["busy_part"]), 3),
    }


def measure_others(bench: Bench, figures: dict[str, Any]) -> None:
    """What the driver alone does: time slices, and MPS with and without a limit."""
    figures["alone"] = [bench.run(f"decode alone ({again})", [critical()])["critical"] for again in range(2)]
    figures["solo_tflops"] = round(bench.run("hog alone", hogs(1), 8)["hog0"]["units_per_second"] / 1e12, 1)
    for count in (1, 2):
        compare(bench.run(f"time-slicing, {count} hog", [critical(), *hogs(count)]), figures, f"time_slicing_{count}")
    with mps(bench.folder) as environment:
        first = replace(critical(), environment=environment)
        hog = Member(name="hog", kind="gemm", environment=environment)
        members = [first, *hogs(1, hog)]
        compare(bench.run("MPS, 1 hog", members), figures, "mps_1")
        limited = {**environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"}
        members = [first, *hogs(1, replace(hog, environment=limited))]
        compare(bench.run("MPS, hog at 40 %", members), figures, "mps_40")


def measure_memory(bench: Bench, figures: dict[str, Any]) -> None:
    row = run_memory(bench, 4, 10 * GIB)
    figures["over_cap_bytes"] = row["over_cap_bytes"]
    region = Region.create(bench.folder / "smi.region", device_bytes=140 * GIB)
    region.admit(TenantLimits(name="looks", cap_bytes=10 * GIB, context_bytes=CONTEXT))
    environment = {"AIMGPU_REGION": str(region.path), "AIMGPU_TENANT": "looks", "LD_PRELOAD": str(bench.library)}
    figures["nvidia_smi_total_mib_inside"] = int(ask_smi("memory.total", environment))
    region.close()


def measure_compute(bench: Bench, figures: dict[str, Any]) -> None:
    row = bench.run("hog alone, compute 30 %", hogs(1, replace(BEST_EFFORT, compute_ppm=300_000)), 8)
    figures["compute_30_percent_of_time"] = round(row["gate"][0]["gpu_seconds"] / row["seconds"], 3)


def measure_transformer(bench: Bench, figures: dict[str, Any]) -> None:
    """A whole transformer beside one training loop, and beside two."""
    server = replace(critical("transformer"), pause=0.1)
    trainer = Member(name="hog", kind="train")
    solo = bench.run("transformer alone", [server])["critical"]
    alone_rate = bench.run("training alone", hogs(1, trainer))["hog0"]["units_per_second"]
    figures["transformer_solo"] = solo
    figures["training_solo_steps"] = round(alone_rate, 2)
    for title, gated, count in (("gate", True, 1), ("gate", True, 2), ("time-slicing", False, 1), ("time-slicing", False, 2)):
        first = replace(server, priority=Priority.HIGH, signal=True) if gated else server
        others = hogs(count, replace(trainer, priority=Priority.LOW) if gated else trainer)
        row = bench.run(f"transformer beside {count} training, {title}", [first, *others])
        got = row["critical"]
        rate_x = sum(row[hog.name]["units_per_second"] for hog in others) / alone_rate
        figures[f"transformer_{title}_{count}"] = {
            "p50_x": round(got["request_p50_ms"] / solo["request_p50_ms"], 3),
            "p95_x": round(got["request_p95_ms"] / solo["request_p95_ms"], 3),
            "training_rate_x": round(rate_x, 3),
            "training_share_of_idle": round(rate_x / (1 - got["busy_part"]), 3),
        }


def measure_mixed(bench: Bench, figures: dict[str, Any]) -> None:
    """Four tenants: a critical one, one between, two best-effort ones; with time-slicing and with the gate."""
    middle = Member(name="middle", kind="transformer", pause=0.3, seed=5)
    trainer = Member(name="hog1", kind="train", seed=11)
    solo = {
        "critical": bench.run("critical alone", [critical()])["critical"],
        "middle": bench.run("middle alone", [middle])["middle"],
        "hog0": bench.run("GEMM alone", hogs(1), 8)["hog0"],
        "hog1": bench.run("training alone", [trainer], 8)["hog1"],
    }
    for title in ("time-slicing", "gate"):
        members = [critical(), middle, *hogs(1), trainer]
        if title == "gate":
            priorities = (Priority.HIGH, Priority.MEDIUM, Priority.LOW, Priority.LOW)
            members = [
                replace(member, priority=priority, signal=priority is not Priority.LOW)
                for member, priority in zip(members, priorities, strict=True)
            ]
        row = bench.run(f"four tenants, {title}", members)
        figures[f"four_tenants_{title}"] = {
            **{
                f"{name}_{quantile}_x": round(row[name][f"request_{quantile}_ms"] / solo[name][f"request_{quantile}_ms"], 3)
                for name in ("critical", "middle")
                for quantile in ("p50", "p95")
            },
            **{
                f"{name}_rate_x": round(row[name]["units_per_second"] / solo[name]["units_per_second"], 3)
                for name in ("hog0", "hog1")
            },
            "critical_busy_part": round(row["critical"]["busy_part"], 3),
            "middle_busy_part": round(row["middle"]["busy_part"], 3),
        }


PAIRED = {
    "cost": measure_cost,
    "gate": measure_gate,
    "long": measure_long,
    "alternating": measure_alternating,
    "alternating-more": measure_more_alternating,
}
PARTS = {
    "ahead": measure_ahead,
    "random": measure_random_memory,
    "random-short": measure_streams_and_every_kind,
    "pools": measure_own_pools,
    "memory": measure_memory,
    "compute": measure_compute,
    "others": measure_others,
    "mixed": measure_mixed,
    "transformer": measure_transformer,
}

if __name__ == "__main__":
    main()
