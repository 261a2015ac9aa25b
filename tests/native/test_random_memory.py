"""Every kind of allocation at random, from 8 processes with 64 threads each: never over the cap, and all of it returned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aimgpu.units import GIB, MIB

SOURCE = Path(__file__).parents[2] / "benchmarks" / "isolation_random_memory.c"


def build(rig: Any) -> Path:
    link = () if rig.tools.kind == "plain" else ("libaimgpu.so",)
    program: Path = rig.tools.program("random_memory", link=link, source=SOURCE.read_text())
    return program


def run(rig: Any, *, processes: int, threads: int, seconds: int, **more: str) -> list[dict[str, int]]:
    program = build(rig)
    running = [rig.start(program, threads, seconds, seed, 5, **more) for seed in range(processes)]
    for process in running:
        assert process.stdout.readline() == "READY\n"
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    results = []
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, (out, err[-4000:])
        results.append(json.loads(out))
    return results


@pytest.mark.parametrize("grain", [1, 32 * MIB])
def test_8_processes_with_64_threads_each_never_pass_the_cap(rig: Any, grain: int) -> None:
    rig.admit(cap_bytes=4 * GIB)
    rig.driver.pool_grain = grain
    rig.driver.device_bytes = 64 * GIB
    rig.driver.call_ns = 100_000
    results = run(rig, processes=8, threads=64, seconds=3)
    assert rig.driver.peak <= 4 * GIB
    assert rig.driver.peak > 3 * GIB
    assert sum(result["failed"] for result in results) == 0
    assert rig.driver.bad_pools == 0
    assert all(result["granted"] > 100 and result["refused"] > 0 for result in results)
    rig.region.reap()
    assert rig.used() == 0
    assert rig.driver.used == 0


@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_find_nothing_in_random_allocations(make_rig: Callable[[str], Any], kind: str) -> None:
    rig = make_rig(kind)
    rig.admit(cap_bytes=1 * GIB)
    run(rig, processes=2, threads=8, seconds=2, ASAN_OPTIONS="detect_leaks=0")
    assert rig.driver.peak <= 1 * GIB
