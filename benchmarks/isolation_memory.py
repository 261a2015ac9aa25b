"""The memory rows of the isolation benchmark: greedy processes, and random allocations from many threads."""

import ctypes
import functools
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from aimgpu.domain import Priority
from aimgpu.units import GIB
from benchmarks.isolation_bench import PATIENCE_SECONDS, Bench, Member, describe_gate, driver_used_bytes, end, expect, send


def run_memory(bench: Bench, processes: int, cap_bytes: int) -> dict[str, Any]:
    """Several processes of one tenant take all they can, and one that comes late; the driver reports how much that was.

    Contexts count: the tenant may hold no more than its cap by the driver's own figure.
    """
    members = [
        Member(name="greedy", kind="memory", priority=Priority.LOW, cap_bytes=cap_bytes, seed=seed) for seed in range(processes)
    ]
    region = bench.make_region(members)
    before = driver_used_bytes()
    running = [bench.start(member, region) for member in members]
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
        late = bench.start(replace(members[0], seed=processes), region)
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
    bench.rows.append(row)
    print(json.dumps(row), flush=True)
    return row


def run_random_memory(bench: Bench, processes: int, threads: int, cap_bytes: int, seconds: int) -> dict[str, Any]:
    """Allocations of every kind at random; the driver's own figure is read all the time."""
    program = bench.folder / "random_memory"
    source = Path(__file__).with_name("isolation_random_memory.c")
    subprocess.run(["cc", "-O1", "-o", program, source, "-ldl", "-lpthread"], check=True)
    member = Member(name="greedy", kind="random", priority=Priority.LOW, cap_bytes=cap_bytes)
    region = bench.make_region([member])
    assert region is not None  # noqa: S101 it has a priority
    environment = {**os.environ, **bench.preload(region, member)}
    before, most = read_used_bytes(), 0
    running = [
        subprocess.Popen(
            [str(program), str(threads), str(seconds), str(seed)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]
    try:
        for process in running:
            expect(process, "READY")
        for process in running:
            send(process, "GO")
        deadline = time.monotonic() + seconds + PATIENCE_SECONDS
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            most = max(most, read_used_bytes() - before)
            time.sleep(0.002)
        results = [json.loads(expect(process, "{")) for process in running]
    finally:
        end(running)
    (use,) = region.read_use()
    row = {
        "row": f"random memory, {processes} processes x {threads} threads, cap {cap_bytes // GIB} GiB",
        "cap_bytes": cap_bytes,
        "driver_most_bytes": most,
        "counted_most_bytes": use.peak_bytes,
        "over_cap_bytes": max(0, most - cap_bytes, use.peak_bytes - cap_bytes),
        **{name: sum(result[name] for result in results) for name in ("granted", "refused", "failed")},
    }
    region.close()
    bench.rows.append(row)
    print(json.dumps(row), flush=True)
    return row


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@functools.cache
def open_nvml() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    library, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) != 0:
        raise OSError("NVML does not answer")
    return library, device


def read_used_bytes() -> int:
    """As `driver_used_bytes`, without starting a program: thousands of times a second."""
    library, device = open_nvml()
    memory = _Memory()
    library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return int(memory.used)
