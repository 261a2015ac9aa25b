"""Starts tenants of the isolation benchmark together, lets them work, and reads what they measured."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aimgpu.domain import Priority
from aimgpu.isolation.building import find_interposer
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB, MIB, PPM

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 90.0  # to start, and to report; a row that takes longer is given up, not the run
CONTEXT = 620 * MIB  # sizing.overhead.CONTEXT_BYTES for NVIDIA; that package needs libraries that a bare machine lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One tenant's process of a row."""

    name: str
    kind: str
    process_of: str | None = None  # the tenant, where one has several processes
    priority: Priority | None = None  # None: without the library
    signal: bool = False
    cap_bytes: int = 40 * GIB
    compute_ppm: int = PPM
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 1
    pause: float = 0.05
    size: int = 8192  # of a hog's matrices

    @property
    def tenant(self) -> str:
        return self.process_of or self.name


class TenantDied(Exception):
    """A tenant ended before it measured anything; its log is printed."""


class Bench:
    def __init__(self, folder: Path, seconds: float, workloads: str = "benchmarks.isolation_h200.workloads") -> None:
        self.folder = folder
        self._workloads = workloads
        self.seconds = seconds
        self.library = find_interposer()
        self.rows: list[dict[str, Any]] = []
        self.save: Callable[[], None] = lambda: None  # writes what was measured so far
        self._count = 0

    def run(self, title: str, members: Sequence[Member], seconds: float | None = None) -> dict[str, Any]:
        """Start all, let them go together, read what they measured."""
        seconds = seconds or self.seconds
        region = self.make_region(members)
        running = [(member, self.start(member, region)) for member in members]
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

    def preload(self, region: Region, member: Member) -> dict[str, str]:
        return {"AIMGPU_REGION": str(region.path), "AIMGPU_TENANT": member.tenant, "LD_PRELOAD": str(self.library)}

    def make_region(self, members: Sequence[Member]) -> Region | None:
        self._count += 1
        if all(member.priority is None for member in members):
            return None
        region = self.create_region(str(self._count))
        for member in members:
            if member.priority is not None:
                region.admit(limits_of(member))
        return region

    def create_region(self, name: str) -> Region:
        return Region.create(self.folder / f"{name}.region", device_bytes=140 * GIB)

    def start(self, member: Member, region: Region | None) -> "subprocess.Popen[str]":
        environment = {**os.environ, **member.environment, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        command = [sys.executable, "-m", self._workloads, member.kind, "--seed", str(member.seed)]
        command += ["--pause", str(member.pause), "--size", str(member.size)]
        if region is not None and member.priority is not None:
            environment |= self.preload(region, member)
            command += ["--signal", f"{region.path}:{member.tenant}"] if member.signal else []
        log = (self.folder / f"{self._count}-{member.name}-{member.seed}.log").open("w")
        with log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
            )


def limits_of(member: Member) -> TenantLimits:
    return TenantLimits(
        name=member.tenant,
        cap_bytes=member.cap_bytes,
        priority=member.priority or Priority.LOW,
        compute_ppm=member.compute_ppm,
        context_bytes=CONTEXT,
    )


def expect(process: "subprocess.Popen[str]", start: str) -> str:
    assert process.stdout is not None  # noqa: S101 opened above
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise TenantDied(f"a tenant died (status {process.wait()})")


def end(processes: Iterable["subprocess.Popen[str]"]) -> None:
    ended = list(processes)
    for process in ended:
        process.kill()
    for process in ended:
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
        f"{name}_p90_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.90 * len(ordered)))], 3),
        f"{name}_worst_ms": round(1000 * ordered[-1], 3),
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
            "longest_launch_ms": round(use.longest_launch_ns / 1e6, 3),
            "held": use.held,
            "held_seconds": round(use.held_seconds, 3),
            "requests": use.requests,
            "touched": use.touched,
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
