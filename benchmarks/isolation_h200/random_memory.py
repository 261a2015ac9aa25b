"""Random allocations from 8 processes with 64 threads each: what the library counts, beside what the driver holds."""

import ctypes
import json
import os
import subprocess
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from aimgpu.domain import Priority
from aimgpu.isolation.region import Region
from aimgpu.units import GIB, MIB
from benchmarks.isolation_h200.bench import Bench, Member, TenantDied, end, expect, send
from benchmarks.isolation_h200.nvml import Sampler, open_nvml

PROCESSES, THREADS = 8, 64
CAP = 24 * GIB
KINDS = {"small": "s", "large": "p", "async": "a", "mapped": "m", "arrays": "r", "streams": "t"}
EVERY_KIND = "".join(KINDS.values())
CALLS = {"granted": "granted", "refused": "refused", "other_errors": "failed"}
WITH_OWN_POOLS = EVERY_KIND + "o"  # destroyed while their memory lives, which ends programs on driver 580.159.04


def measure_random_memory(bench: Bench, figures: dict[str, Any]) -> None:
    """Each kind alone, then all of them at once."""
    for title, kinds in KINDS.items():
        figures[f"random_{title}"] = run_random_memory(bench, title, kinds=kinds, cap_bytes=CAP, seconds=4)
    measure_every_kind(bench, figures)


def measure_streams_and_every_kind(bench: Bench, figures: dict[str, Any]) -> None:
    """The shortest run that shows whether the cap holds."""
    figures["random_streams"] = run_random_memory(bench, "streams", kinds=KINDS["streams"], cap_bytes=CAP, seconds=4)
    measure_every_kind(bench, figures)


def measure_every_kind(bench: Bench, figures: dict[str, Any]) -> None:
    every = run_random_memory(bench, "every kind", kinds=EVERY_KIND, cap_bytes=CAP, seconds=8)
    figures["random_every_kind"] = every
    figures["random_over_cap_mib"] = every.get("over_cap_mib")


def measure_own_pools(bench: Bench, figures: dict[str, Any]) -> None:
    """With pools that are destroyed while they are in use, without the library and with it."""
    for title, cap in (("own pools, driver alone", None), ("own pools", CAP)):
        figures[f"random_{title}"] = run_random_memory(bench, title, kinds=WITH_OWN_POOLS, cap_bytes=cap, seconds=6)


def run_random_memory(bench: Bench, title: str, *, kinds: str, cap_bytes: int | None, seconds: int) -> dict[str, Any]:
    """The driver's figures while all work, while all hold what they have and stand still, and after everything was freed.

    `cap_bytes` None: without the library, to know what the driver alone does with such a program.
    """
    member = Member(
        name="greedy", kind="random", priority=None if cap_bytes is None else Priority.LOW, cap_bytes=cap_bytes or 0
    )
    region = bench.make_region([member])
    environment = {**os.environ, **({} if region is None else bench.preload(region, member))}
    before = read_used_bytes()
    running = [
        subprocess.Popen(
            [str(build(bench)), str(THREADS), str(seconds), str(seed), kinds],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(PROCESSES)
    ]
    row: dict[str, Any] = {"row": f"random memory, {title}", "cap_mib": mib(cap_bytes or 0)}
    patience = threading.Timer(seconds + 40, lambda: end(running))
    patience.start()
    pids = [process.pid for process in running]
    results = []
    try:
        everyone(running, "READY")
        row["contexts"] = compare(before, pids, region)
        with MemorySampler(before, pids, region) as sampler:
            everyone(running, "HELD", "GO")
        row["most"] = {**sampler.most, "counted": mib(read_peak(region))}
        row["held"] = compare(before, pids, region)
        everyone(running, "FREED", "FREE")
        row["freed"] = compare(before, pids, region)
        results = [json.loads(line) for line in everyone(running, "{", "END")]
        row["statuses"] = [process.wait(timeout=10) for process in running]
    except (TenantDied, BrokenPipeError, subprocess.TimeoutExpired) as error:
        row["died"] = str(error)
    finally:
        patience.cancel()
        row.setdefault("statuses", [process.poll() for process in running])
        end(running)
    if results:
        row |= {title: sum(result[name] for result in results) for title, name in CALLS.items()}
    if cap_bytes is not None and "most" in row:
        row["over_cap_mib"] = max(0.0, row["most"]["driver"] - mib(cap_bytes))
    if region is not None:
        region.close()
    bench.rows.append(row)
    print(json.dumps(row), flush=True)
    return row


def build(bench: Bench) -> Path:
    program = bench.folder / "random_memory"
    if not program.exists():
        source = Path(__file__).with_name("random_memory.c")
        subprocess.run(["cc", "-O1", "-g", "-rdynamic", "-o", program, source, "-ldl", "-lpthread"], check=True)
    return program


def everyone(running: Collection["subprocess.Popen[str]"], word: str, line: str | None = None) -> list[str]:
    for process in running if line is not None else ():
        send(process, str(line))
    return [expect(process, word) for process in running]


def mib(value: float) -> float:
    return round(value / MIB, 1)


def read_counted(region: Region | None) -> int:
    return 0 if region is None else region.read_use()[0].used_bytes


def read_peak(region: Region | None) -> int:
    """The most that was ever granted; a sum over the processes while they work may count a request that is then refused."""
    return 0 if region is None else region.read_use()[0].peak_bytes


def compare(before: int, pids: Collection[int], region: Region | None) -> dict[str, float]:
    """While all processes stand still: the card's figure, the sum of the figures per process, and what is counted, in MiB."""
    counted, card = read_counted(region), read_used_bytes() - before
    begun = time.monotonic()
    listed = read_process_bytes(pids)
    spent = time.monotonic() - begun
    slots = () if region is None else region.read_use()[0].processes
    return {
        "driver": mib(card),
        "driver_by_process": mib(listed),
        "counted": mib(counted),
        "counted_contexts": mib(sum(slot.context_bytes for slot in slots)),
        "surplus": mib(card - counted),
        "asking": sum(slot.asks_driver for slot in slots),
        "list_ms": round(1000 * spent, 3),
    }


class MemorySampler(Sampler):
    """The largest figures while the processes work. A surplus is what the count before and after a reading cannot explain."""

    def __init__(self, before: int, pids: Collection[int], region: Region | None) -> None:
        super().__init__()
        self.most = {"driver": 0.0, "driver_by_process": 0.0, "surplus": 0.0, "samples": 0.0}
        self._before, self._pids, self._region = before, pids, region

    def _run(self) -> None:
        last = read_counted(self._region)
        while not self._done.is_set():
            card = read_used_bytes() - self._before
            now = read_counted(self._region)
            self._note("driver", card)
            self._note("surplus", card - max(last, now))
            if self.most["samples"] % 10 == 0:
                self._note("driver_by_process", read_process_bytes(self._pids))
            self.most["samples"] += 1
            last = now
            time.sleep(0.001)

    def _note(self, name: str, value: int) -> None:
        self.most[name] = max(self.most[name], mib(value))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Listed(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def read_used_bytes() -> int:
    """As `driver_used_bytes`, without starting a program: thousands of times a second."""
    library, device = open_nvml()
    memory = _Memory()
    library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return int(memory.used)


def read_process_bytes(pids: Collection[int]) -> int:
    """The sum over these processes; they are read one after the other, so it can be more than there ever was. 0: not listed."""
    library, device = open_nvml()
    count, listed = ctypes.c_uint(256), (_Listed * 256)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), listed) != 0:
        return 0
    return sum(entry.used for entry in listed[: count.value] if entry.pid in pids and entry.used != (1 << 64) - 1)
