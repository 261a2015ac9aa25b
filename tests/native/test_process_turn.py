"""One bound for all processes of a best-effort tenant: together they have no more in flight than one of them may."""

import ctypes
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.native.conftest import MILLISECOND, Puppet
from tests.native.test_caps import hammer
from tests.native.test_gate import log, tenants, use

from aimgpu.domain import Priority
from aimgpu.isolation import layout
from aimgpu.isolation.critical_signal import CriticalSignal

__all__ = ["tenants"]
PATIENCE_NS = 1_000_000 * MILLISECOND


def be_patient(rig: Any) -> None:
    """Nobody passes at a bound, however busy this machine is."""
    rig.region.header.starve_ns = rig.region.header.room_ns = PATIENCE_NS


def outstanding(entries: list[Any]) -> list[int]:
    """At each launch, the device time that was queued already."""
    return [max((earlier.ends - entry.at for earlier in entries[:at]), default=0) for at, entry in enumerate(entries)]


def overlaps(entries: list[Any]) -> int:
    return sum(later.at < earlier.ends for earlier, later in itertools.pairwise(entries))


def test_four_processes_together_have_one_long_launch_in_flight(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Hardly ever two (a process that the kernel delays at the wrong moment, for longer than a launch takes, may)."""
    be_patient(rig)
    length = rig.driver.kernel_ns = 20 * MILLISECOND  # longer than a busy machine lets a process wait for a processor
    processes = [tenants["first"], *(Puppet(rig, "first") for _ in range(3))]
    for puppet in processes:
        puppet.do("launch 3")  # how long one takes is known from here on
        puppet.do("sync")
    known = rig.driver.launches
    for puppet in processes:
        puppet.tell("launch 15")
    for puppet in processes:
        puppet.wait()
        puppet.do("sync")
    entries = log(rig, *(puppet.pid for puppet in processes))[known - 1 :]
    assert len(entries) == 4 * 15
    assert overlaps(entries) <= 12
    assert sum(value > length * 3 // 2 for value in outstanding(entries)) <= 4, "more than one kernel was queued"
    assert use(rig, "first").overruns == 0


def test_small_launches_of_several_processes_stay_below_the_bound(rig: Any, tenants: dict[str, Puppet]) -> None:
    be_patient(rig)
    rig.driver.kernel_ns = 100_000
    processes = [tenants["first"], Puppet(rig, "first"), Puppet(rig, "first")]
    for puppet in processes:
        puppet.do("launch 50")
        puppet.do("sync")
    known = rig.driver.launches
    for puppet in processes:
        puppet.tell("launch 300")
    for puppet in processes:
        puppet.wait()
    entries = log(rig, *(puppet.pid for puppet in processes))[known - 1 :]
    queued = sorted(outstanding(entries))
    assert queued[len(queued) * 95 // 100] <= 2 * rig.region.header.batch_ns
    assert queued[len(queued) // 2] > 100_000, "they still queue behind each other"


def test_the_place_goes_round(rig: Any, tenants: dict[str, Puppet]) -> None:
    be_patient(rig)
    rig.region.header.quantum_ns = 10 * MILLISECOND
    processes = [tenants["first"], Puppet(rig, "first"), Puppet(rig, "first")]
    for puppet in processes:
        puppet.do("serve 1 0 1")  # it runs
    known = rig.driver.launches
    for puppet in processes:
        puppet.tell("launch 40")
    for puppet in processes:
        puppet.wait()
    entries = log(rig, *(puppet.pid for puppet in processes))[known - 1 :]
    halfway = entries[: len(entries) // 2]
    assert {entry.pid for entry in halfway} == {puppet.pid for puppet in processes}


def test_an_idle_process_keeps_the_place_from_nobody(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Neither for a quantum nor for a grace: by its own word it has nothing in flight any more."""
    be_patient(rig)
    rig.region.header.quantum_ns = PATIENCE_NS
    other = Puppet(rig, "first")
    for _ in range(5):
        tenants["first"].do("serve 2 0 1")
        other.do("serve 2 0 1")
    assert use(rig, "first").overruns == 0


def test_a_process_that_is_killed_with_work_in_flight_leaves_its_place(rig: Any, tenants: dict[str, Puppet]) -> None:
    be_patient(rig)
    rig.region.header.quantum_ns = PATIENCE_NS
    first, other = tenants["first"], Puppet(rig, "first")
    other.do("launch 2")
    for _ in range(3):
        victim = Puppet(rig, "first")
        victim.do("launch 3")
        victim.tell("launch 100000")
        deadline = time.monotonic() + 60
        while not log(rig, victim.pid):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        victim.process.kill()
        victim.process.wait()
        other.do("launch 3")
        first.do("launch 3")
    assert use(rig, "first").overruns == 0


def test_a_waiter_that_is_killed_is_asked_once(rig: Any, tenants: dict[str, Puppet]) -> None:
    be_patient(rig)
    rig.region.header.quantum_ns = MILLISECOND
    victim = Puppet(rig, "first")
    with CriticalSignal(rig.region, "critical"):
        victim.tell("launch 5")
        deadline = time.monotonic() + 60
        while rig.region.header.waiters == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        victim.process.kill()
        victim.process.wait()
        slot = next(one for one in tenant_of(rig, "first").processes if one.pid == victim.pid)
        slot.turn_wait_ns = 1  # as if it had waited for the place
    tenants["first"].do("launch 20")
    assert slot.turn_wait_ns == 0
    assert use(rig, "first").overruns == 0


def test_dates_far_ahead_stop_nobody(rig: Any, tenants: dict[str, Puppet]) -> None:
    be_patient(rig)
    other = Puppet(rig, "first")
    other.do("launch 1")
    other.do("sync")
    for slot in tenant_of(rig, "first").processes:
        slot.inflight_until_ns = (1 << 64) - 1
    tenant_of(rig, "first").process_turn = 77
    tenants["first"].do("launch 3")
    tenant_of(rig, "first").process_turn = (1 << 64) - 1
    tenants["first"].do("launch 3")
    assert use(rig, "first").overruns == 0


def test_work_that_waits_for_another_process_does_not_deadlock(rig: Any, tenants: dict[str, Puppet]) -> None:
    """A kernel that never ends by itself, and its peer launches beside it: the bound on one's own work lets them through."""
    rig.region.header.room_ns = 50 * MILLISECOND
    rig.driver.kernel_ns = 3_600_000 * MILLISECOND
    other = Puppet(rig, "first")
    tenants["first"].tell("launch 4")
    other.do("launch 4")
    tenants["first"].wait()


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_find_nothing_in_a_process_turn(make_rig: Callable[[str], Any], kind: str) -> None:
    rig = make_rig(kind)
    for name, priority in (("critical", Priority.HIGH), ("first", Priority.LOW)):
        rig.admit(name, priority=priority)
    rig.driver.kernel_ns = 200_000
    rig.region.header.quantum_ns = MILLISECOND
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    rig.run(hammer(rig), "launch", 1, tenant="critical", **options)
    processes = [rig.start(hammer(rig), "launchers", 3, 40, tenant="first", **options) for _ in range(3)]
    processes.append(rig.start(hammer(rig), "launchers", 2, 40, tenant="critical", **options))
    for process in processes:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, (out, err[-4000:])
    assert rig.driver.launches == 1 + 3 * 3 * 40 + 2 * 40


@pytest.mark.parametrize(
    ("kind", "seed"), [("plain", 3), *(pytest.param("asan", seed, marks=pytest.mark.rest) for seed in (1, 3))]
)
def test_a_region_that_is_scribbled_on_stops_no_process_turn(make_rig: Callable[[str], Any], kind: str, seed: int) -> None:
    """Random bytes over turns, places and dates: everybody ends in his own time, without a signal."""
    rig = make_rig(kind)
    for name, priority in (("critical", Priority.HIGH), ("first", Priority.LOW)):
        rig.admit(name, priority=priority)
    rig.driver.kernel_ns = 200_000
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    rig.run(hammer(rig), "launch", 1, tenant="critical", **options)
    processes = [rig.start(hammer(rig), "launchers", 2, 20, tenant="first", **options) for _ in range(3)]
    processes.append(rig.start(hammer(rig), "launchers", 2, 20, tenant="critical", **options))
    dice = random.Random(seed)
    with rig.region.path.open("r+b") as file:
        while any(process.poll() is None for process in processes):
            file.seek(dice.choice([dice.randrange(200, 600), dice.randrange(4096, 4096 + 2 * ctypes.sizeof(layout.Tenant))]))
            file.write(dice.randbytes(dice.choice([1, 4, 8])))
            file.flush()
            time.sleep(0.0005)
    assert [process.returncode for process in processes] == [0] * 4, [process.stderr.read()[-3000:] for process in processes]


def tenant_of(rig: Any, name: str) -> Any:
    return next(one for one in rig.region._layout.tenants if one.name == name.encode())
