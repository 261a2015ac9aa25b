"""How well tenants are kept apart on one real GPU: `PYTHONPATH=src python3 -m benchmarks.isolation_h200`.

Needs PyTorch, a C compiler and an NVIDIA GPU; MPS rows also need nvidia-cuda-mps-control. Everything is a ratio to the same
tenant alone in the same run. Changes no setting of the card.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aimgpu.domain import Priority, Vendor
from aimgpu.isolation.building import find_interposer
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.sizing.overhead import CONTEXT_BYTES
from aimgpu.units import GIB, PPM
from benchmarks.recording import write_result

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 90.0  # to start, and to say what was measured; a row that takes longer is given up, not the run
CONTEXT = CONTEXT_BYTES[Vendor.NVIDIA]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One tenant's process of a row."""

    name: str
    kind: str
    priority: Priority | None = None  # None: without the library
    signal: bool = False
    cap_bytes: int = 40 * GIB
    compute_ppm: int = PPM
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 1
    pause: float = 0.05


class TenantDied(Exception):
    """A tenant ended before it measured anything; its log is printed."""


class Bench:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.library = find_interposer()
        self.rows: list[dict[str, Any]] = []
        self._count = 0

    def run(self, title: str, members: Sequence[Member], seconds: float | None = None) -> dict[str, Any]:
        """Start all, let them go together, read what they measured."""
        seconds = seconds or self.seconds
        region = self._region(members)
        running = [(member, self._start(member, region)) for member in members]
        patience = threading.Timer(2 * PATIENCE_SECONDS + seconds, lambda: end(process for _, process in running))
        patience.start()
        try:
            for _, process in running:
                expect(process, "READY")
            for member, process in running:
                told = seconds + (1.0 if member.kind in ("gemm", "train") and len(members) > 1 else 0.0)
                send(process, f"GO {told}")
            results = {member.name: json.loads(expect(process, "{")) for member, process in running}
        finally:
            patience.cancel()
            end(process for _, process in running)
        row = {**summarise(title, members, results), "seconds": seconds}
        if region is not None:
            row["gate"] = describe_gate(region)
            region.close()
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return row

    def run_memory(self, processes: int, cap_bytes: int) -> dict[str, Any]:
        """Several processes of one tenant take all they can, and one that comes late; the driver says how much that was.

        Contexts count: the tenant may hold no more than its cap by the driver's own figure.
        """
        members = [
            Member(name="greedy", kind="memory", priority=Priority.LOW, cap_bytes=cap_bytes, seed=seed)
            for seed in range(processes)
        ]
        region = self._region(members)
        before = driver_used_bytes()
        running = [self._start(member, region) for member in members]
        try:
            for process in running:
                expect(process, "READY")
            contexts = driver_used_bytes() - before
            charged = sum(slot.context_bytes for use in region.read_use() for slot in use.processes) if region else 0
            for process in running:
                send(process, "GO 0")
            for process in running:
                expect(process, "HELD")
            held = driver_used_bytes() - before
            late = self._start(replace(members[0], seed=processes), region)
            running.append(late)
            late_line = next((line for line in late.stdout or () if line.startswith("READY")), None)
            held = max(held, driver_used_bytes() - before)
            running.remove(late)
            late.kill()
            for process in running:
                send(process, "END")
            results = [json.loads(expect(process, "{")) for process in running]
        finally:
            end(running)
        allocated = sum(result["allocated"] for result in results)
        row = {
            "row": f"memory, {processes} processes of one tenant, cap {cap_bytes // GIB} GiB",
            "cap_bytes": cap_bytes,
            "allocated_bytes": allocated,
            "driver_bytes": held,  # contexts included
            "driver_context_bytes": contexts,
            "charged_context_bytes": charged,
            "late_process": "refused its context" if late_line is None else "started",
            "over_cap_bytes": max(0, allocated - cap_bytes, held - cap_bytes),
            "ways": {result["way"] + str(number): result["allocated"] for number, result in enumerate(results)},
            "shown_total_bytes": [result["total"] for result in results],
            "shown_properties_bytes": [result["properties_total"] for result in results],
        }
        if region is not None:
            row["gate"] = describe_gate(region)
            region.close()
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return row

    def _region(self, members: Sequence[Member]) -> Region | None:
        self._count += 1
        if all(member.priority is None for member in members):
            return None
        region = Region.create(self.folder / f"{self._count}.region", device_bytes=140 * GIB)
        for member in members:
            if member.priority is not None:
                region.admit(
                    TenantLimits(
                        name=member.name,
                        cap_bytes=member.cap_bytes,
                        priority=member.priority,
                        compute_ppm=member.compute_ppm,
                        context_bytes=CONTEXT,
                    )
                )
        return region

    def _start(self, member: Member, region: Region | None) -> "subprocess.Popen[str]":
        environment = {**os.environ, **member.environment, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        command = [sys.executable, "-m", "benchmarks.isolation_workloads", member.kind, "--seed", str(member.seed)]
        command += ["--pause", str(member.pause)]
        if region is not None and member.priority is not None:
            environment |= {
                "AIMGPU_REGION": str(region.path),
                "AIMGPU_TENANT": member.name,
                "LD_PRELOAD": str(self.library),
            }
            command += ["--signal", f"{region.path}:{member.name}"] if member.signal else []
        log = (self.folder / f"{self._count}-{member.name}-{member.seed}.log").open("w")
        with log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
            )


def expect(process: "subprocess.Popen[str]", start: str) -> str:
    assert process.stdout is not None  # noqa: S101 opened above
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise TenantDied(f"a tenant died (status {process.wait()})")


def end(processes: Iterable["subprocess.Popen[str]"]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def send(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None  # noqa: S101 opened above
    process.stdin.write(line + "\n")
    process.stdin.flush()


def summarise(title: str, members: Sequence[Member], results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"row": title}
    servers = [result for result in results.values() if "requests" in result]
    window = (servers[0]["begun"], servers[0]["ended"]) if servers else None
    for member in members:
        result = results[member.name]
        if "requests" in result:
            row[member.name] = {
                "requests": len(result["requests"]),
                **quantiles("request", result["requests"]),
                **quantiles("step", result["steps"]),
                "busy_part": result["busy"] / (result["ended"] - result["begun"]),
                "busy_seconds": round(result["busy"], 3),
            }
        else:
            row[member.name] = {"units_per_second": rate(result, window)}
    return row


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"{name}_p50_ms": round(1000 * statistics.median(ordered), 3),
        f"{name}_p95_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 3),
        f"{name}_p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
    }


def rate(result: Mapping[str, Any], window: tuple[float, float] | None) -> float:
    begun, ended = window or (result["begun"], result["ended"])
    marks = [(when, done) for when, done in result["marks"] if begun <= when <= ended]
    if len(marks) < 2:  # noqa: PLR2004
        return 0.0
    return float(result["units_each"] * (marks[-1][1] - marks[0][1]) / (ended - begun))


def describe_gate(region: Region) -> list[dict[str, Any]]:
    return [
        {
            "tenant": use.name,
            "used_bytes": use.used_bytes,
            "peak_bytes": use.peak_bytes,
            "denied": use.denied,
            "gpu_seconds": round(use.gpu_seconds, 3),
            "waited_seconds": round(use.waited_seconds, 3),
            "overruns": use.overruns,
            "quiet_ms": use.quiet_ns / 1e6,
        }
        for use in region.read_use()
    ]


def driver_used_bytes() -> int:
    text = ask_smi("memory.used")
    return int(text) * (1 << 20)


def ask_smi(field_name: str, environment: Mapping[str, str] | None = None) -> str:
    command = ["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **(environment or {})})
    return done.stdout.strip().splitlines()[0]


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """A daemon of our own, in directories of its own; ended with the row."""
    pipe, log = folder / "mps-pipe", folder / "mps-log"
    pipe.mkdir()
    log.mkdir()
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    whole = {**os.environ, **environment}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=whole)
    try:
        yield environment
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, env=whole, timeout=60)
        time.sleep(1)


def hogs(count: int, like: Member | None = None) -> list[Member]:
    like = like or Member(name="hog", kind="gemm")
    return [replace(like, name=f"hog{i}", seed=10 + i) for i in range(count)]


def critical(kind: str = "decode", priority: Priority | None = None, *, signal: bool = False) -> Member:
    return Member(name="critical", kind=kind, priority=priority, signal=signal)


BEST_EFFORT = Member(name="hog", kind="gemm", priority=Priority.LOW)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--only", default="", help="comma list of parts: " + ", ".join(PARTS))
    parser.add_argument("--name", default="isolation-h200", help="of the results file")
    arguments = parser.parse_args()
    chosen = [part for part in arguments.only.split(",") if part] or list(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.seconds)
        card = {name: ask_smi(name) for name in ("name", "driver_version", "memory.total")}
        figures: dict[str, Any] = {"card": card}
        for part in chosen:
            try:
                PARTS[part](bench, figures)
            except TenantDied as error:
                bench.rows.append({"row": part, "failed": str(error)})
                for log in sorted(bench.folder.glob("*.log")):
                    print(log.name, log.read_text()[-1500:], flush=True)
            print(json.dumps({"figures": figures}), flush=True)
            command = f"python -m benchmarks.isolation_h200 {' '.join(sys.argv[1:])}".strip()
            # After every part: the machine may be taken away before the last.
            write_result(arguments.name, figures, bench.rows, packages=["torch"], command=command)


def measure_alone(bench: Bench, figures: dict[str, Any]) -> None:
    """What the library costs, with the same tenant measured twice each way, in turns."""
    steps: dict[bool, list[float]] = {True: [], False: []}
    for again in range(2):
        for loaded in (False, True):
            priority = Priority.HIGH if loaded else None
            row = bench.run(f"decode alone{', library loaded' if loaded else ''} ({again})", [critical(priority=priority)])
            steps[loaded].append(row["critical"]["step_p50_ms"])
            if not loaded:
                figures.setdefault("alone", []).append(row["critical"])
    figures["overhead_step_x"] = round(min(steps[True]) / min(steps[False]), 4)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(2):
        for loaded in (False, True):
            row = bench.run(f"hog alone{', library loaded' if loaded else ''}", hogs(1, BEST_EFFORT if loaded else None), 8)
            rates[loaded].append(row["hog0"]["units_per_second"])
    figures["solo_tflops"] = round(max(rates[False]) / 1e12, 1)
    figures["overhead_gemm_x"] = round(max(rates[False]) / max(rates[True]), 4)


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
    if "gate" in row:  # the hogs go on for a second after the critical tenant ended
        spent = sum(entry["gpu_seconds"] for entry in row["gate"] if entry["tenant"].startswith("hog"))
        figures[name]["hog_time_of_idle"] = round(spent / (row["seconds"] + 1 - got["busy_seconds"]), 3)


def measure_gate(bench: Bench, figures: dict[str, Any]) -> None:
    for signal in (True, False):
        for count in (1, 2):
            title = f"gate, {'signal' if signal else 'no signal'}, {count} hog"
            members = [critical(priority=Priority.HIGH, signal=signal), *hogs(count, BEST_EFFORT)]
            name = f"gate_{'signal' if signal else 'adaptive'}_{count}"
            compare(bench.run(title, members), figures, name)
    figures["lc_p50_x"] = figures["gate_signal_1"]["p50_x"]
    figures["lc_p95_x"] = figures["gate_signal_1"]["p95_x"]
    figures["lc_p95_x_two_hogs"] = figures["gate_signal_2"]["p95_x"]
    figures["be_share_of_idle"] = figures["gate_signal_1"]["hog_share_of_idle"]


def measure_others(bench: Bench, figures: dict[str, Any]) -> None:
    """What the driver alone does: time slices, and MPS with and without a limit."""
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
    row = bench.run_memory(4, 10 * GIB)
    figures["over_cap_bytes"] = row["over_cap_bytes"]
    region = Region.create(bench.folder / "smi.region", device_bytes=140 * GIB)
    region.admit(TenantLimits(name="looks", cap_bytes=10 * GIB, context_bytes=CONTEXT))
    environment = {"AIMGPU_REGION": str(region.path), "AIMGPU_TENANT": "looks", "LD_PRELOAD": str(bench.library)}
    figures["nvidia_smi_total_mib_inside"] = int(ask_smi("memory.total", environment))
    region.close()


def measure_compute(bench: Bench, figures: dict[str, Any]) -> None:
    row = bench.run("hog alone, compute 30 %", hogs(1, replace(BEST_EFFORT, compute_ppm=300_000)), 8)
    figures["compute_30_percent_x"] = round(row["hog0"]["units_per_second"] / 1e12 / figures["solo_tflops"], 3)
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


PARTS = {
    "alone": measure_alone,
    "gate": measure_gate,
    "memory": measure_memory,
    "others": measure_others,
    "compute": measure_compute,
    "mixed": measure_mixed,
    "transformer": measure_transformer,
}

if __name__ == "__main__":
    main()
