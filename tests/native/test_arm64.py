"""The library built for arm64, and run: its programs under qemu-user, against the same driver that is not there.

The region is this machine's own, so locks, waits, start times and layout are those of a real kernel; only the instructions
are emulated. Debian: apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
"""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.native.conftest import ARM64_COMPILER, ARM64_ROOT, ARM64_RUNNER

from aimgpu.domain import Priority
from aimgpu.errors import ShareInUse
from aimgpu.isolation.critical_signal import CriticalSignal
from aimgpu.units import GIB, MIB

UNIT = 4 * MIB
PATIENCE_SECONDS = 120.0


@pytest.fixture
def arm(make_rig: Callable[[str], Any]) -> Any:
    for program in (ARM64_COMPILER, ARM64_RUNNER):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} (Debian: apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross)")
    if not Path(ARM64_ROOT, "lib/ld-linux-aarch64.so.1").exists():
        pytest.skip("no arm64 C library (Debian: apt-get install libc6-dev-arm64-cross)")
    return make_rig("arm64")


def hammer(rig: Any) -> Path:
    path: Path = rig.tools.folder / "hammer"
    return path if path.exists() else rig.tools.program("hammer", link=("libcuda.so.1",))


def test_64_threads_in_8_processes_take_exactly_the_cap(arm: Any) -> None:
    arm.admit(cap_bytes=1 * GIB)
    arm.driver.call_ns = 50_000
    running = [arm.start(hammer(arm), "greedy", 8, UNIT) for _ in range(8)]
    taken = sum(int(process.stdout.readline()) for process in running)
    assert taken == arm.driver.used == arm.driver.peak == arm.used() == 1 * GIB
    assert arm.region.read_use()[0].denied >= 64


def test_plain_pooled_and_mapped_memory_is_counted_and_given_back(arm: Any) -> None:
    arm.admit(cap_bytes=1 * GIB)
    arm.driver.pool_grain = 32 * MIB
    for process in [arm.start(hammer(arm), "churn", 8, 150, seed) for seed in range(3)]:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, (out, err)
    assert 512 * MIB < arm.driver.peak <= 1 * GIB
    arm.region.reap()
    assert arm.used() == 0


def test_killed_processes_give_back_and_forks_have_their_own_account(arm: Any) -> None:
    arm.admit(cap_bytes=256 * MIB)
    for _ in range(5):
        process = arm.start(hammer(arm), "greedy", 2, UNIT)
        assert int(process.stdout.readline()) == 256 * MIB
        process.kill()
        process.wait()
        arm.driver.used = 0  # as the real driver does when a process dies
    process = arm.start(hammer(arm), "fork", 1, UNIT)
    assert int(process.stdout.readline()) == 5 * UNIT
    (use,) = arm.region.read_use()
    assert sorted(slot.used_bytes for slot in use.processes) == [UNIT, 2 * UNIT, 2 * UNIT]
    for slot in use.processes:
        os.kill(slot.pid, signal.SIGKILL)


def test_the_cap_is_changed_from_outside(arm: Any) -> None:
    arm.admit(cap_bytes=128 * MIB)
    process = arm.start(hammer(arm), "greedy", 1, UNIT)
    process.stdout.readline()
    with pytest.raises(ShareInUse):
        arm.region.resize("tenant", 127 * MIB)
    arm.region.resize("tenant", 192 * MIB)
    assert int(arm.start(hammer(arm), "greedy", 1, UNIT).stdout.readline()) == 64 * MIB


def test_a_region_of_another_version_is_refused(arm: Any) -> None:
    arm.admit(cap_bytes=64 * MIB)
    arm.region.header.version += 1
    out, err = arm.start(hammer(arm), "greedy", 1, UNIT).communicate("\n", timeout=PATIENCE_SECONDS)
    assert int(out) == 0
    assert "has another version: device allocations are refused (fail closed)" in err


def test_best_effort_waits_for_the_request_and_goes_on_after_it(arm: Any) -> None:
    arm.admit("critical", priority=Priority.HIGH)
    arm.admit("hog", priority=Priority.LOW)
    arm.region.header.hang_ns = arm.region.header.starve_ns = 1_000_000_000_000
    arm.driver.kernel_ns = 1_000_000
    critical = arm.start(hammer(arm), "greedy", 1, 2 * GIB, tenant="critical")  # there, and holds something
    critical.stdout.readline()
    request = CriticalSignal(arm.region, "critical")
    request.begin()
    hog = arm.start(hammer(arm), "launchers", 4, 20, tenant="hog")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while arm.region.header.waiters == 0:
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(0.001)
    assert arm.driver.launches == 0
    request.end()
    out, err = hog.communicate(timeout=PATIENCE_SECONDS)
    assert hog.returncode == 0, (out, err)
    assert arm.driver.launches == 80
    use = next(one for one in arm.region.read_use() if one.name == "hog")
    assert use.waited_seconds > 0
    assert use.overruns == 0
