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
from benchmarks.isolation_bench import Bench, Member, describe_gate, driver_used_bytes, end, expect, send


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


def run_random_memory(bench: Bench, title: str, *, kinds: int, cap_bytes: int | None, seconds: int = 6) -> dict[str, Any]:
    """8 processes with 64 threads each allocate at random; the driver's own figure is read all the time.

    `cap_bytes` None: without the library, to know what the driver alone does with such a program.
    """
    program = bench.folder / "random_memory"
    source = Path(__file__).with_name("isolation_random_memory.c")
    subprocess.run(["cc", "-O1", "-g", "-rdynamic", "-o", program, source, "-ldl", "-lpthread"], check=True)
    priority = None if cap_bytes is None else Priority.LOW
    member = Member(name="greedy", kind="random", priority=priority, cap_bytes=cap_bytes or 0)
    region = bench.make_region([member])
    environment = {**os.environ, **({} if region is None else bench.preload(region, member))}
    before, most, results = read_used_bytes(), 0, []
    command = [str(program), "64", str(seconds)]
    running = [
        subprocess.Popen(
            [*command, str(seed), str(kinds)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for seed in range(8)
    ]
    try:
        for process in running:
            expect(process, "READY")
        for process in running:
            send(process, "GO")
        deadline = time.monotonic() + seconds + 20
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            most = max(most, read_used_bytes() - before)
            time.sleep(0.002)
        lines = [line for process in running for line in process.stdout or () if line.startswith("{")]
        results = [json.loads(line) for line in lines]
    finally:
        statuses = [process.poll() for process in running]
        end(running)
    counted = 0 if region is None else region.read_use()[0].peak_bytes
    row = {
        "row": f"random memory, 8 processes x 64 threads, {title}",
        "cap_bytes": cap_bytes,
        "driver_most_bytes": most,
        "counted_most_bytes": counted,
        "over_cap_bytes": None if cap_bytes is None else max(0, most - cap_bytes, counted - cap_bytes),
        "statuses": statuses,
        **{name: sum(result[name] for result in results) for name in ("granted", "refused", "failed")},
    }
    if region is not None:
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
