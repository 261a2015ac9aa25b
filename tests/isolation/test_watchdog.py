import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aimgpu import procfs
from aimgpu.domain import Device, DeviceUsage, ForeignProcess, Grant, Level, WatchdogPolicy
from aimgpu.isolation import layout
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.isolation.watchdog import (
    THROTTLED_PPM,
    Violation,
    Watchdog,
    Watched,
    find_attached,
    find_loose,
    judge,
    watch_instance,
)
from aimgpu.units import GIB

MakeDevice = Callable[..., Device]
MakeGrant = Callable[..., Grant]


def usage(*held: tuple[int, int | None]) -> DeviceUsage:
    listed = tuple(ForeignProcess(pid=pid, name=f"p{pid}", memory_bytes=size) for pid, size in held)
    return DeviceUsage(
        device_id="gpu0", used_bytes=None, used_bytes_by_partition={}, utilization_percent=None, processes=listed
    )


@pytest.fixture
def watched(make_device: MakeDevice, make_grant: MakeGrant) -> Watched:
    grant = make_grant(make_device(), level=Level.RUNTIME)
    return Watched(
        instance_id="chat-0",
        grants=(grant,),
        pids=frozenset({10, 11}),
        policy=WatchdogPolicy.WARN,
        interposed=True,
        attached=frozenset({10, 11}),
    )


def test_a_tenant_within_its_grant_is_left_alone(watched: Watched) -> None:
    assert judge([usage((10, 6 * GIB), (11, 4 * GIB))], [watched]) == ()


def test_all_processes_of_a_tenant_count_together(watched: Watched) -> None:
    (verdict,) = judge([usage((10, 6 * GIB), (11, 5 * GIB))], [replace(watched, policy=WatchdogPolicy.STOP)])
    assert (verdict.finding, verdict.action) == (Violation.OVER, WatchdogPolicy.STOP)
    assert "11GiB" in verdict.text
    assert "10GiB" in verdict.text


def test_an_exclusive_grant_is_bounded_by_the_hardware(watched: Watched) -> None:
    exclusive = replace(watched, grants=tuple(replace(grant, exclusive=True) for grant in watched.grants))
    assert judge([usage((10, 60 * GIB))], [exclusive]) == ()


def test_memory_that_the_driver_does_not_tell_is_not_invented(watched: Watched) -> None:
    assert judge([usage((10, None), (11, None))], [watched]) == ()


def test_foreign_processes_are_named_and_never_acted_upon(watched: Watched) -> None:
    (verdict,) = judge([usage((99, 3 * GIB))], [watched])
    assert (verdict.finding, verdict.instance_id, verdict.action) == (Violation.FOREIGN, None, None)
    assert "pid 99" in verdict.text


@pytest.mark.parametrize(
    ("demanded", "policy", "action"),
    [
        (True, WatchdogPolicy.WARN, WatchdogPolicy.STOP),
        (True, WatchdogPolicy.RESTART, WatchdogPolicy.RESTART),
        (False, WatchdogPolicy.WARN, WatchdogPolicy.WARN),
    ],
)
def test_a_process_without_the_library_drops_the_level_or_is_stopped(
    watched: Watched, policy: WatchdogPolicy, action: WatchdogPolicy, *, demanded: bool
) -> None:
    loose = replace(watched, demanded=demanded, policy=policy, attached=frozenset({10}))
    (verdict,) = judge([usage((10, GIB), (11, GIB))], [loose])
    assert (verdict.finding, verdict.pids, verdict.level, verdict.action) == (
        Violation.UNHELD,
        frozenset({11}),
        Level.ADVISORY,
        action,
    )


def test_a_finding_is_acted_upon_once_until_it_was_right_in_between(watched: Watched) -> None:
    acts: list[tuple[str, WatchdogPolicy]] = []
    now = [usage((10, 20 * GIB))]
    dog = Watchdog(lambda: now, lambda: [replace(watched, policy=WatchdogPolicy.RESTART)], lambda *what: acts.append(what))
    dog.look()
    dog.look()
    assert acts == [("chat-0", WatchdogPolicy.RESTART)]
    now[0] = usage((10, GIB))
    assert dog.look() == ()
    now[0] = usage((10, 20 * GIB))
    dog.look()
    assert acts == [("chat-0", WatchdogPolicy.RESTART)] * 2


def test_throttling_lowers_the_compute_share_in_the_region(tmp_path: Path, watched: Watched) -> None:
    region = Region.create(tmp_path / "gpu0.region", device_bytes=80 * GIB)
    region.admit(TenantLimits(name="chat-0", cap_bytes=10 * GIB))
    dog = Watchdog(
        lambda: [usage((10, 20 * GIB), (77, GIB))],
        lambda: [replace(watched, policy=WatchdogPolicy.THROTTLE)],
        lambda *_: pytest.fail("nothing is stopped"),
        lambda: [region],
    )
    assert {verdict.finding for verdict in dog.look()} == {Violation.OVER, Violation.FOREIGN}
    assert region.read_use()[0].compute_ppm == THROTTLED_PPM
    region.close()


def test_real_processes_are_told_apart(tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    """A parent that is in the region and a child that is not, as they are in /proc."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    region = Region.create(tmp_path / "gpu0.region", device_bytes=80 * GIB)
    region.admit(TenantLimits(name="chat-0", cap_bytes=10 * GIB))
    slot = region._layout.tenants[0].processes[0]
    slot.pid, slot.start_ticks, slot.state = parent.pid, procfs.read_start_ticks(parent.pid), layout.ACTIVE
    try:
        grant = make_grant(make_device(), level=Level.RUNTIME)
        seen = watch_instance("chat-0", parent.pid, (grant,), [region])
        assert seen.pids == {parent.pid, child}
        assert (seen.interposed, seen.attached) == (True, frozenset({parent.pid}))
        (verdict,) = judge([usage((parent.pid, GIB), (child, GIB))], [seen])
        assert (verdict.finding, verdict.pids) == (Violation.UNHELD, frozenset({child}))
    finally:
        os.kill(child, 9)
        parent.wait()
        parent.stdout.close()
    assert find_attached([region], [child]) == frozenset()
    assert procfs.read_tree(parent.pid) == frozenset()
    region.close()


def test_a_process_whose_first_context_is_being_made_is_not_taken_for_one_without_the_library(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    """The driver lists it, it has the region mapped, and the library has not attached it yet."""
    region = Region.create(tmp_path / "gpu0.region", device_bytes=80 * GIB)
    region.admit(TenantLimits(name="chat-0", cap_bytes=10 * GIB))
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 4096); print(flush=True); sys.stdin.read()"
    )
    starting = subprocess.Popen([sys.executable, "-c", code, str(region.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert starting.stdout is not None
        starting.stdout.readline()
        grants = (make_grant(make_device(), level=Level.RUNTIME),)
        assert judge([usage((starting.pid, GIB))], [watch_instance("chat-0", starting.pid, grants, [region])]) == ()
        region.path.unlink()  # made again since: what it has mapped holds nobody
        seen = watch_instance("chat-0", starting.pid, grants, [region])
        assert [one.finding for one in judge([usage((starting.pid, GIB))], [seen])] == [Violation.UNHELD]
    finally:
        starting.communicate()
        region.close()


def fake_process(proc: Path, pid: int, *, opens: str, maps: str) -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "fd" / "3").symlink_to("/dev/null")
    (proc / str(pid) / "fd" / "9").symlink_to(opens)
    (proc / str(pid) / "maps").write_text(f"7f00-7f01 r-xp 0 08:01 1   /lib/libc.so.6\n7f02-7f03 rw-s 0 00:1a 2   {maps}\n")


@pytest.mark.parametrize("driver", ["/dev/nvidia-uvm", "/dev/kfd"])
def test_who_uses_a_device_without_a_region_is_loose_though_the_driver_lists_nobody(
    tmp_path: Path, watched: Watched, driver: str
) -> None:
    """In a container the driver may tell pids of the host: then nothing that it lists is known here."""
    region = Region.create(tmp_path / "gpu0.region", device_bytes=80 * GIB)
    proc = tmp_path / "proc"
    fake_process(proc, 1, opens=driver, maps=str(region.path))
    fake_process(proc, 2, opens=driver, maps="/usr/lib/libcuda.so.1")
    fake_process(proc, 3, opens="/dev/nvidiactl", maps="/usr/lib/libnvidia-ml.so.1")  # only looks
    fake_process(proc, 4, opens=driver, maps=f"{region.path} (deleted)")  # made anew since: its limits hold nobody
    fake_process(proc, 6, opens=driver, maps="")
    (proc / "6" / "maps").unlink()  # it ends between two looks, or is not ours to look at
    loose = find_loose([region], [1, 2, 3, 4, 5, 6], proc)
    assert loose == {2, 4}
    (verdict,) = judge([usage((4711, GIB))], [replace(watched, loose=loose, demanded=True)])[:1]
    assert (verdict.finding, verdict.pids, verdict.action) == (Violation.UNHELD, loose, WatchdogPolicy.STOP)
    assert judge([usage()], [replace(watched, loose=loose, interposed=False)]) == ()
    region.close()
