"""Which GPU and which process: by UUID and by a lock, across reordered devices, namespaces, users, stops and dead threads."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.native.conftest import MILLISECOND, PUPPET, Puppet
from tests.native.test_caps import hammer
from tests.native.test_gate import log, use

from aimgpu.domain import Priority
from aimgpu.isolation import layout
from aimgpu.isolation.critical_signal import CriticalSignal
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB, MIB

needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")


def uuid_of(device: int) -> str:
    return "GPU-" + f"a{device}" * 16


def make_regions(rig: Any, count: int, **limits: Any) -> list[Region]:
    rig.driver.devices = count
    regions = []
    for device in range(count):
        region = Region.create(rig.folder / f"gpu{device}.region", device_bytes=80 * GIB, device=uuid_of(device))
        region.admit(TenantLimits(**{"name": "tenant", "cap_bytes": 1 * GIB, "rounding_bytes": 1, **limits}))
        regions.append(region)
    return regions


def paths(regions: list[Region]) -> str:
    return ":".join(str(region.path) for region in regions)


def used(regions: list[Region]) -> list[int]:
    return [region.read_use()[0].used_bytes // MIB for region in regions]


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_child_that_sees_one_of_its_gpus_is_charged_on_that_one(rig: Any, variable: str) -> None:
    regions = make_regions(rig, 2)
    child = Puppet(rig, "tenant", AIMGPU_REGION=paths(regions), **{variable: "1"})
    assert child.do("allocate 100") == 0
    assert used(regions) == [0, 100]
    assert list(rig.driver.used_on)[:2] == [0, 100 * MIB]


def test_reordered_gpus_are_matched_by_uuid(rig: Any) -> None:
    regions = make_regions(rig, 3)
    tenant = Puppet(rig, "tenant", AIMGPU_REGION=paths(regions), CUDA_VISIBLE_DEVICES="2,0,1")
    for ordinal, mib in ((0, 100), (1, 200), (2, 300)):
        tenant.do(f"primary {ordinal}")
        assert tenant.do(f"allocate {mib}") == 0
    assert used(regions) == [200, 300, 100]
    assert [amount // MIB for amount in list(rig.driver.used_on)[:3]] == [200, 300, 100]


def test_a_gpu_that_was_not_granted_is_refused_although_it_comes_first(rig: Any) -> None:
    regions = make_regions(rig, 2)
    tenant = Puppet(rig, "tenant", AIMGPU_REGION=paths(regions[1:]), CUDA_VISIBLE_DEVICES="0,1")
    assert tenant.do("allocate 100") == 2
    tenant.do("primary 1")
    assert tenant.do("allocate 100") == 0
    assert used(regions) == [0, 100]


def test_the_sixty_fourth_region_is_a_region_too(rig: Any) -> None:
    """64 partitions per process; the simulated driver has eight devices, so only the last of the list is visible."""
    regions = [Region.create(rig.folder / f"{i}.region", device_bytes=GIB, device="GPU-" + f"{i:02x}" * 16) for i in range(63)]
    last = make_regions(rig, 1)[0]
    tenant = Puppet(rig, "tenant", AIMGPU_REGION=paths([*regions, last]))
    assert tenant.do("allocate 100") == 0
    assert used([last]) == [100]


@needs_root
def test_a_daemon_in_another_pid_namespace_reaps_no_live_process(rig: Any) -> None:
    """A container's process stays charged however often it is looked at from outside; dead, it is reaped."""
    rig.admit(cap_bytes=1 * GIB)
    environment = rig.environment()
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-I", str(PUPPET)]
    inside = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert inside.stdin is not None
    assert inside.stdout is not None
    inside.stdin.write("allocate 600\n")
    inside.stdin.flush()
    assert inside.stdout.readline() == "ok 0\n"
    (slot,) = rig.region.read_use()[0].processes
    assert slot.pid != inside.pid
    for _ in range(3):
        assert rig.region.reap() == 0
    assert rig.used() == 600 * MIB
    outside = Puppet(rig, "tenant")
    assert outside.do("allocate 600") == 2
    inside.kill()
    inside.communicate()
    deadline = time.monotonic() + 60
    while rig.region.reap() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rig.used() == 0


@needs_root
def test_a_process_in_another_namespace_frees_a_dead_neighbours_memory(rig: Any) -> None:
    rig.admit(cap_bytes=1 * GIB)
    first = Puppet(rig, "tenant")
    assert first.do("allocate 600") == 0
    first.process.kill()
    first.process.wait()
    rig.driver.used = 0
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-I", str(PUPPET)]
    done = subprocess.run(command, env=rig.environment(), input="allocate 600\n", capture_output=True, text=True, check=True)
    assert done.stdout == "ok 0\n"


LEAVES_MAIN = """
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
static int closes;
static void *stay(void *unused)
{
    uint64_t pointer;
    (void)unused;
    sleep(1);
    int code = cuMemAlloc_v2(&pointer, 600u << 20);
    for (int descriptor = 3; closes && descriptor < 1024; descriptor++)
        close(descriptor);
    printf("%d\\n", code);
    fflush(stdout);
    for (;;)
        pause();
    return NULL;
}
int main(int count, char **words)
{
    pthread_t thread;
    (void)words;
    closes = count > 1;
    pthread_create(&thread, NULL, stay, NULL);
    pthread_exit(NULL);
}
"""


@pytest.mark.parametrize("words", [(), ("closes",)])
def test_a_process_whose_main_thread_ended_is_alive(rig: Any, words: tuple[str, ...]) -> None:
    """By the lock that it holds for life. The mapping keeps it, also where the program closes every descriptor."""
    rig.admit(cap_bytes=1 * GIB)
    program = rig.tools.program("leaves_main", link=("libcuda.so.1",), source=LEAVES_MAIN)
    process = rig.start(program, *words)
    assert process.stdout.readline() == "0\n"
    assert Path(f"/proc/{process.pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    assert rig.region.reap() == 0
    assert Puppet(rig, "tenant").do("allocate 600") == 2
    assert rig.used() == 600 * MIB


LEAVES_A_CHILD = """
import ctypes, os, sys
print(ctypes.CDLL('libcuda.so.1').cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(600 << 20)), flush=True)
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.readline()
    os._exit(0)
sys.stdin.readline()
"""


def test_a_dead_process_is_reaped_although_a_child_of_it_lives(rig: Any) -> None:
    """A worker that was forked inherits the mapping, but not the lock of its parent."""
    rig.admit(cap_bytes=1 * GIB)
    process = rig.start(sys.executable, "-I", "-c", LEAVES_A_CHILD)
    assert [process.stdout.readline() for _ in range(2)] == ["0\n", "forked\n"]
    assert rig.region.reap() == 0
    process.kill()
    process.wait()
    assert rig.region.reap() == 1
    assert Puppet(rig, "tenant").do("allocate 600") == 0


def test_a_program_that_closed_its_descriptors_is_alive(rig: Any) -> None:
    """It lost the lock with them; in its own pid namespace it is still seen."""
    rig.admit(cap_bytes=64 * MIB)
    process = rig.start(hammer(rig), "closed", 4 * MIB)
    assert int(process.stdout.readline()) == 64 * MIB
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        assert descriptor.name in ("0", "1", "2") or "region" in str(descriptor.readlink())
    assert rig.region.reap() == 0


def stop_while_it_holds_the_lock(rig: Any, process: Any) -> None:
    for _ in range(2000):
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        if rig.region._is_locked(0):
            return
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.001)
    pytest.fail("never stopped inside the lock")


def test_a_stopped_process_that_holds_a_lock_stops_no_other(rig: Any) -> None:
    """docker pause, a debugger, SIGSTOP: siblings allocate, caps hold and change, and other tenants are reaped."""
    rig.admit(cap_bytes=16 * GIB)
    rig.admit("other", cap_bytes=1 * GIB)
    rig.driver.pool_grain = 1
    Puppet(rig, "tenant").do("allocate 14000")  # near the cap, where allocations take the lock, with room for all
    churner = rig.start(hammer(rig), "churn", 2, 10_000_000, 1)
    while rig.driver.allocations < 100:
        assert churner.poll() is None
    stop_while_it_holds_the_lock(rig, churner)
    held = rig.used()
    sibling = Puppet(rig, "tenant")
    for _ in range(5):
        assert sibling.do("allocate 60") == 0
    assert rig.used() == held + 300 * MIB
    dead = Puppet(rig, "other")
    dead.do("allocate 100")
    dead.process.kill()
    dead.process.wait()
    assert rig.region.reap() == 1
    rig.region.resize("tenant", 17 * GIB)
    assert rig.region.read_use()[0].cap_bytes == 17 * GIB
    os.kill(churner.pid, signal.SIGCONT)
    assert rig.driver.peak <= 17 * GIB


@needs_root
def test_a_container_of_another_user_uses_the_region_and_no_other_user_does(rig: Any, tmp_path_factory: Any) -> None:
    """The file is open to all, its folder to its owner alone: only who gets the file mounted can reach it."""
    folder = tmp_path_factory.mktemp("shm") / "regions"
    region = Region.create(folder / "gpu.region", device_bytes=GIB, mode=0o666)
    region.admit(TenantLimits(name="tenant", cap_bytes=1 * GIB, rounding_bytes=1))
    assert folder.stat().st_mode & 0o777 == 0o700
    as_user = f"import os; os.setuid(65534); os.open({str(region.path)!r}, os.O_RDWR)"
    assert subprocess.run([sys.executable, "-I", "-c", as_user], capture_output=True, check=False).returncode != 0
    mount = Path("/mnt") / f"aimgpu-{os.getpid()}.region"
    inside = (
        f"touch {mount} && mount --bind {region.path} {mount} && "
        f"exec setpriv --reuid 65534 --clear-groups -- sh -c 'exec 9<>{mount} && echo opened'"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", inside], capture_output=True, text=True, check=False)
    mount.unlink(missing_ok=True)
    assert done.stdout == "opened\n", done.stderr
    region.close()


def test_a_tenant_on_two_gpus_launches_on_neither_while_one_is_busy(rig: Any) -> None:
    """A collective of which one rank runs and the other waits would spin beside the critical tenant."""
    regions = make_regions(rig, 2, priority=Priority.LOW)
    for region in regions:
        region.header.hang_ns = region.header.starve_ns = 60_000 * MILLISECOND
    regions[1].admit(TenantLimits(name="critical", cap_bytes=1 * GIB, priority=Priority.HIGH, rounding_bytes=1))
    critical = Puppet(rig, "critical", AIMGPU_REGION=str(regions[1].path), CUDA_VISIBLE_DEVICES="1")
    critical.do("serve 1 0 1")
    ranks = [Puppet(rig, "tenant", AIMGPU_REGION=paths(regions), CUDA_VISIBLE_DEVICES=str(gpu)) for gpu in range(2)]
    for rank in ranks:
        rank.do("launch 1 1000")
        rank.do("sync")
    signal_ = CriticalSignal(regions[1], "critical")
    for round_ in range(1, 6):
        signal_.begin()
        before = rig.driver.launches
        for rank in ranks:
            rank.tell(f"collective {round_} 1000")
        time.sleep(0.05)
        assert rig.driver.launches == before, "not on the idle GPU either"
        signal_.end()
        for rank in ranks:
            rank.wait()
    assert all(use_of(region).overruns == 0 for region in regions)


def use_of(region: Region) -> Any:
    return next(one for one in region.read_use() if one.name == "tenant")


def test_a_rank_whose_peer_has_launched_follows_it(rig: Any) -> None:
    """The window closes between the two launches of a collective: the second is not held back."""
    regions = make_regions(rig, 2, priority=Priority.LOW)
    for region in regions:
        region.header.hang_ns = region.header.starve_ns = 60_000 * MILLISECOND
        region.admit(TenantLimits(name="critical", cap_bytes=1 * GIB, priority=Priority.HIGH, rounding_bytes=1))
    critical = Puppet(rig, "critical", AIMGPU_REGION=str(regions[1].path), CUDA_VISIBLE_DEVICES="1")
    critical.do("serve 1 0 1")
    ranks = [Puppet(rig, "tenant", AIMGPU_REGION=paths(regions), CUDA_VISIBLE_DEVICES=str(gpu)) for gpu in range(2)]
    for rank in ranks:
        rank.do("launch 1 1000")
        rank.do("sync")
    signal_ = CriticalSignal(regions[1], "critical")
    for round_ in range(1, 6):
        ranks[0].tell(f"collective {round_} 1000")  # launched; it spins until its peer comes
        deadline = time.monotonic() + 60
        while rig.driver.arrived[round_] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with signal_:
            ranks[1].do(f"collective {round_} 1000")
            ranks[0].wait()
            before = rig.driver.launches
            ranks[0].tell("launch 1 1000")  # one that nobody waits for is held
            time.sleep(0.02)
            assert rig.driver.launches == before
        ranks[0].wait()
        for rank in ranks:
            rank.do("sync")


def test_a_slot_that_was_reaped_by_mistake_is_taken_again(rig: Any) -> None:
    rig.admit("critical", priority=Priority.HIGH)
    critical = Puppet(rig, "critical")
    critical.do("allocate 100")
    rig.region._layout.tenants[0].processes[0].state = layout.FREE
    time.sleep(0.005)
    critical.do("launch 1")
    assert use(rig, "critical").used_bytes == 100 * MIB
    assert len(log(rig, critical.pid)) == 1
