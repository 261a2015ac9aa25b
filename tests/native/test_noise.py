"""Noise in region files, forks, kills and stops: no crash, no leak, and no wait beyond its bound."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.native.conftest import Puppet
from tests.native.test_caps import hammer

from aimgpu.domain import Priority
from aimgpu.errors import RegionUnusable
from aimgpu.isolation import layout
from aimgpu.isolation.region import Region
from aimgpu.units import MIB

NOISY = """
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
int cuMemFree_v2(uint64_t pointer);
int cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *stream);
int cuMemFreeAsync(uint64_t pointer, void *stream);
int cuCtxSynchronize(void);
int cuLaunchKernel(void *f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *s, void **p, void **e);
static int use(void)
{
    uint64_t pointer;
    if (cuMemAlloc_v2(&pointer, 1 << 20) == 0 && cuMemFree_v2(pointer) != 0)
        return 1;
    if (cuMemAllocAsync(&pointer, 1 << 20, NULL) == 0 && cuMemFreeAsync(pointer, NULL) != 0)
        return 1;
    if (cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0)
        return 1;
    return cuCtxSynchronize();
}
/* The library reads its regions when it is loaded, so each file is used by a program of its own: this one, again. */
int main(int count, char **words)
{
    if (count == 2)
        return use();
    char line[4096];
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\\n")] = 0;
        struct timespec begun, ended;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        pid_t child = fork();
        if (child == 0) {
            setenv("AIMGPU_REGION", line, 1);
            execl(words[0], words[0], "use", (char *)NULL);
            _exit(99);
        }
        int status = 0;
        waitpid(child, &status, 0);
        clock_gettime(CLOCK_MONOTONIC, &ended);
        printf("%d %ld\\n", status, (ended.tv_sec - begun.tv_sec) * 1000 + (ended.tv_nsec - begun.tv_nsec) / 1000000);
        fflush(stdout);
    }
    return 0;
}
"""


def damage(data: bytearray, dice: random.Random) -> bytes:
    """Fields, bytes, whole tenants of noise, or a truncation; often with a header that is still in order."""
    kind = dice.randrange(5)
    if kind == 0:
        return bytes(data[: dice.randrange(len(data))])
    if kind == 1:
        start = dice.choice([0, 4096])
        noise = dice.randbytes(dice.randrange(1, 200 if start == 0 else 8192))
        data[start : start + len(noise)] = noise
    elif kind == 2:
        for _ in range(dice.randrange(1, 200)):
            data[dice.randrange(4096, len(data))] = dice.randrange(256)  # not the bounds: they set how long it waits
    else:
        tenant = layout.RegionLayout.from_buffer(data).tenants[0]
        for _ in range(dice.randrange(1, 12)):
            name, kind_ = dice.choice([field for field in tenant._fields_ if field[0] not in ("name", "state", "epoch")])[:2]
            if isinstance(getattr(tenant, name), int):
                setattr(tenant, name, dice.choice([0, 1, (1 << 31) - 1, (1 << 64) - 1, dice.getrandbits(64)]))
            del kind_
        for slot in tenant.processes:
            slot.state, slot.inflight_until_ns, slot.launch_ns = dice.randrange(4), dice.getrandbits(64), dice.getrandbits(64)
    return bytes(data)


def run_noise(rig: Any, files: int, seed: int, **more: str) -> None:
    rig.admit("critical", priority=Priority.HIGH, cap_bytes=64 * MIB)
    rig.admit("tenant", priority=Priority.LOW, cap_bytes=64 * MIB)
    link = ("libcuda.so.1",) if rig.tools.kind == "plain" else ("libaimgpu.so", "libcuda.so.1")
    process = rig.start(rig.tools.program("noisy", link=link, source=NOISY), **more)
    dice, slowest = random.Random(seed), 0
    whole = rig.region.path.read_bytes()
    target = rig.folder / "noisy.region"
    for number in range(files):
        target.write_bytes(damage(bytearray(whole), dice))
        with contextlib.suppress(RegionUnusable):
            Region.open(target).close()
        process.stdin.write(f"{target}\n")
        process.stdin.flush()
        status, milliseconds = map(int, process.stdout.readline().split())
        assert not os.WIFSIGNALED(status), (number, seed, os.WTERMSIG(status))
        assert os.WEXITSTATUS(status) in (0, 2), (number, seed, status)
        slowest = max(slowest, milliseconds)
        for one in rig.driver.processes:  # the simulated driver has room for 256 processes
            one.pid = 0
        target.unlink()
    assert slowest < 120_000, "every bound is one minute at most"


def test_noise_in_region_files_ends_no_program(rig: Any) -> None:
    run_noise(rig, 40, 11)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_noise_in_a_thousand_region_files_ends_no_program(make_rig: Callable[[str], Any], seed: int) -> None:
    """Ten thousand in all, half of them under sanitizers."""
    kind = "asan" if seed % 2 else "plain"
    run_noise(make_rig(kind), int(os.environ.get("AIMGPU_NOISE_FILES", "1000")), seed, ASAN_OPTIONS="detect_leaks=0")


def test_forks_kills_and_stops_at_random_leave_the_accounting_right(rig: Any) -> None:
    rig.admit(cap_bytes=512 * MIB)
    dice = random.Random(5)
    for round_ in range(6):
        running = [rig.start(hammer(rig), "churn", 4, 100_000_000, seed) for seed in range(3)]
        forker = Puppet(rig, "tenant")
        forker.tell("fork_while_allocating 1000000")  # its children allocate, free and end
        running.append(forker.process)
        goal = rig.driver.allocations + 300
        while rig.driver.allocations < goal:
            victim = dice.choice(running)
            victim.send_signal(signal.SIGSTOP)
            time.sleep(dice.random() / 200)
            victim.send_signal(signal.SIGCONT)
            assert all(process.poll() is None for process in running)
        for process in running:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
        assert rig.driver.peak <= 512 * MIB, round_
        for process in running:
            process.kill()
            process.wait()
        deadline = time.monotonic() + 60
        while rig.used() and time.monotonic() < deadline:
            rig.region.reap()
            time.sleep(0.01)
        assert rig.used() == 0
        rig.driver.used = rig.driver.peak = 0
        for index in range(8):
            rig.driver.used_on[index] = 0
