"""Every kind of allocation at random, from 8 processes with 64 threads each: never over the cap, and all of it returned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aimgpu.units import GIB, KIB, MIB

SOURCE = Path(__file__).parents[2] / "benchmarks" / "isolation_h200" / "random_memory.c"


def build(rig: Any) -> Path:
    link = () if rig.tools.kind == "plain" else ("libaimgpu.so",)
    program: Path = rig.tools.program("random_memory", link=link, source=SOURCE.read_text())
    return program


EVERY_KIND = "spamrto"


def run(rig: Any, *, processes: int, threads: int, seconds: int, kinds: str = EVERY_KIND, **more: str) -> list[dict[str, int]]:
    program = build(rig)
    running = [rig.start(program, threads, seconds, seed, kinds, **more) for seed in range(processes)]
    for process in running:
        assert process.stdout.readline() == "READY\n"
    for process in running:
        process.stdin.write("\n\n\n")
        process.stdin.flush()
    results = []
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, (out, err[-4000:])
        results.append(json.loads(out.splitlines()[-1]))
    return results


def check(rig: Any, results: list[dict[str, int]]) -> None:
    assert rig.driver.peak <= 4 * GIB
    assert rig.driver.peak > 3 * GIB
    assert sum(result["failed"] for result in results) == 0
    assert rig.driver.bad_pools == 0
    assert all(result["granted"] > 100 and result["refused"] > 0 for result in results)
    rig.region.reap()
    assert rig.used() == 0
    assert rig.driver.used == 0


@pytest.mark.parametrize("grain", [1, 32 * MIB])
def test_8_processes_with_64_threads_each_never_pass_the_cap(rig: Any, grain: int) -> None:
    rig.admit(cap_bytes=4 * GIB)
    rig.driver.pool_grain = grain
    rig.driver.device_bytes = 64 * GIB
    rig.driver.call_ns = 100_000
    check(rig, run(rig, processes=8, threads=64, seconds=3))


def test_a_driver_that_takes_more_than_was_asked_for_never_passes_the_cap(rig: Any) -> None:
    """Pools that cannot use what they have free, small allocations that keep a whole block."""
    rig.admit(cap_bytes=4 * GIB, rounding_bytes=2 * MIB)
    rig.driver.pool_grain = 32 * MIB
    rig.driver.pool_scatters = 1
    rig.driver.block_bytes = 2 * MIB
    rig.driver.device_bytes = 64 * GIB
    rig.driver.call_ns = 100_000
    check(rig, run(rig, processes=8, threads=64, seconds=3, kinds="sssspamro"))


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_find_nothing_in_random_allocations(make_rig: Callable[[str], Any], kind: str) -> None:
    rig = make_rig(kind)
    rig.admit(cap_bytes=1 * GIB, rounding_bytes=2 * MIB, context_bytes=64 * MIB)
    rig.driver.block_bytes = 2 * MIB
    rig.driver.stream_bytes = 600 * KIB
    rig.driver.pool_scatters = 1
    run(rig, processes=2, threads=8, seconds=2, ASAN_OPTIONS="detect_leaks=0")
    assert rig.driver.peak <= 1 * GIB
    assert rig.driver.counts > 0, "the driver was asked for its own figure"
