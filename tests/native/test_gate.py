"""The gate: best-effort launches go into the gaps, one tenant at a time, and nobody waits for ever.

The stand-in driver has one queue and a log of every launch: who, when, and from when to when it ran.
"""

import itertools
import time
from typing import Any

import pytest
from tests.native.conftest import MILLISECOND, Puppet

from aimgpu.domain import Priority
from aimgpu.isolation import layout
from aimgpu.isolation.critical_signal import CriticalSignal
from aimgpu.isolation.region import Region
from aimgpu.units import GIB


@pytest.fixture
def tenants(rig: Any) -> dict[str, Puppet]:
    """A critical tenant that has used the device, and two best-effort ones."""
    for name, priority in (("critical", Priority.HIGH), ("first", Priority.LOW), ("second", Priority.LOW)):
        rig.admit(name, priority=priority)
    rig.driver.kernel_ns = 2 * MILLISECOND
    be_patient(rig)
    made = {name: Puppet(rig, name) for name in ("critical", "first", "second")}
    made["critical"].do("serve 1 0 1")
    return made


def log(rig: Any, *pids: int) -> list[Any]:
    """Launches in the order in which they were made."""
    assert rig.driver.launches <= len(rig.driver.log)
    entries = [rig.driver.log[i] for i in range(rig.driver.launches)]
    return sorted((entry for entry in entries if entry.pid in pids), key=lambda entry: entry.at)


def await_waiter(rig: Any) -> None:
    deadline = time.monotonic() + 60
    while rig.region.header.waiters == 0:
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(0.001)


def be_patient(rig: Any) -> None:
    """A loaded machine may hold anybody up for longer than the bounds that suit a server."""
    rig.region.header.hang_ns = rig.region.header.starve_ns = 1_000_000 * MILLISECOND


def use(rig: Any, name: str) -> Any:
    return next(entry for entry in rig.region.read_use() if entry.name == name)


def test_nobody_waits_where_nobody_is_above(rig: Any) -> None:
    """Tenants of one priority, or alone, are not slowed: launches queue in the driver as ever."""
    rig.admit("one", priority=Priority.LOW)
    rig.driver.kernel_ns = 1000 * MILLISECOND  # which nobody waits for
    one = Puppet(rig, "one")
    one.do("launch 20")
    assert use(rig, "one").waited_seconds == 0
    entries = log(rig, one.pid)
    assert entries[-1].at < entries[5].ends  # far ahead of the device


def test_a_running_request_stops_best_effort_and_its_end_lets_it_go(rig: Any, tenants: dict[str, Puppet]) -> None:
    tenants["first"].do("launch 3")
    signal = CriticalSignal(rig.region, "critical")
    signal.begin()
    begun = time.monotonic_ns()
    tenants["first"].tell("launch 5")
    await_waiter(rig)
    tenants["critical"].do("serve 5 0 1")
    ended = time.monotonic_ns()
    signal.end()
    tenants["first"].wait()
    tenants["first"].do("sync")
    during = [entry for entry in log(rig, tenants["first"].pid) if begun < entry.at < ended]
    assert during == []
    assert len(log(rig, tenants["first"].pid)) == 8
    assert use(rig, "first").overruns == 0


def test_the_first_launches_of_many_threads_wait_too(rig: Any) -> None:
    """Nobody passes while another thread of its process still looks who is above them."""
    for number in range(62):  # a long roster: looking takes a while
        rig.admit(f"other{number}", priority=Priority.HIGH, cap_bytes=1 * GIB)
        rig.region._layout.tenants[number].process_high = layout.PROCESSES
    for name, priority in (("critical", Priority.HIGH), ("hog", Priority.LOW)):
        rig.admit(name, priority=priority, cap_bytes=1 * GIB)
    be_patient(rig)
    Puppet(rig, "critical").do("serve 1 0 1")
    hammer = rig.tools.program("hammer", link=("libcuda.so.1",))
    before = rig.driver.launches
    with CriticalSignal(rig.region, "critical"):
        rig.run(hammer, "volley", 16, 60, tenant="hog")
        assert rig.driver.launches == before
    assert use(rig, "hog").overruns == 0


def test_a_tenant_that_yields_a_share_lets_others_use_that_much(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Half of the device's time while its request runs, in bursts: 80 ms of work take 160 ms, but for the last burst."""
    rig.region.set_yield("critical", 500_000)
    with CriticalSignal(rig.region, "critical"):
        tenants["critical"].do("launch 1")
        tenants["critical"].do("sync")
        tenants["first"].do("launch 40")
        tenants["first"].do("sync")
    entries = log(rig, tenants["first"].pid)
    assert len(entries) == 40
    assert entries[-1].at - entries[0].at >= 110 * MILLISECOND
    assert use(rig, "first").overruns == 0


def test_what_is_used_in_a_pause_is_not_owed_in_the_next_request(rig: Any, tenants: dict[str, Puppet]) -> None:
    """The share is of the time in which somebody has to yield."""
    rig.region.header.quiet_min_ns = rig.region.header.quiet_max_ns = 1  # idle as soon as it has waited for its work
    rig.region.set_yield("critical", 10_000)
    tenants["first"].do("launch 20")
    tenants["first"].do("sync")
    tenant = next(one for one in rig.region._layout.tenants if one.name == b"critical")
    assert tenant.yield_paid_ns == 0


def test_a_tenant_that_yields_everything_holds_nobody_back(rig: Any, tenants: dict[str, Puppet]) -> None:
    rig.region.set_yield("critical", 1_000_000)
    rig.driver.kernel_ns = 100 * MILLISECOND
    with CriticalSignal(rig.region, "critical"):
        tenants["first"].do("launch 10")
    assert use(rig, "first").waited_seconds == 0


def test_a_strict_tenant_is_not_paid_for_by_one_that_yields(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Two critical tenants work; what one of them yields is not the other's."""
    rig.admit("strict", priority=Priority.HIGH)
    Puppet(rig, "strict").do("serve 1 0 1")
    rig.region.set_yield("critical", 1_000_000)
    with CriticalSignal(rig.region, "strict"), CriticalSignal(rig.region, "critical"):
        tenants["first"].tell("launch 1")
        await_waiter(rig)
        assert log(rig, tenants["first"].pid) == []
    tenants["first"].wait()


def test_requests_are_counted_not_flagged(rig: Any, tenants: dict[str, Puppet]) -> None:
    """With two requests in flight, the end of one lets nobody go."""
    signal = CriticalSignal(rig.region, "critical")
    signal.begin()
    signal.begin()
    signal.end()
    tenants["first"].tell("launch 1")
    await_waiter(rig)
    assert log(rig, tenants["first"].pid) == []
    with signal:
        pass
    signal.end()
    signal.end()  # one too many is forgiven
    tenants["first"].wait()


def test_without_signals_work_in_flight_stops_best_effort(rig: Any, tenants: dict[str, Puppet]) -> None:
    """The critical tenant launched and has not waited for it: others stay out until it has, and was quiet."""
    rig.driver.kernel_ns = 30 * MILLISECOND
    rig.region.header.unwaited_ns = 60_000 * MILLISECOND
    tenants["critical"].do("launch 4")
    tenants["first"].tell("launch 1")
    tenants["critical"].do("sync")
    tenants["first"].wait()
    (mine,) = log(rig, tenants["first"].pid)
    assert mine.at >= log(rig, tenants["critical"].pid)[-1].ends


def test_every_process_of_a_critical_tenant_counts(rig: Any, tenants: dict[str, Puppet]) -> None:
    """One of them is idle, the other has work: others stay out until that is done too."""
    rig.driver.kernel_ns = 30 * MILLISECOND
    rig.region.header.unwaited_ns = 60_000 * MILLISECOND
    second = Puppet(rig, "critical")
    second.do("launch 4")
    tenants["critical"].do("serve 1 0 1")
    tenants["first"].tell("launch 1")
    second.do("sync")
    tenants["first"].wait()
    (mine,) = log(rig, tenants["first"].pid)
    assert mine.at >= log(rig, second.pid)[-1].ends
    assert use(rig, "first").overruns == 0


def test_every_process_of_a_gated_tenant_is_gated(rig: Any, tenants: dict[str, Puppet]) -> None:
    """None goes while a request runs, and none has more in flight than one launch."""
    other = Puppet(rig, "first")
    with CriticalSignal(rig.region, "critical"):
        for puppet in (tenants["first"], other):
            puppet.tell("launch 3")
        deadline = time.monotonic() + 60
        while rig.region.header.waiters < 2:
            assert time.monotonic() < deadline, "not both wait"
            time.sleep(0.001)
        assert log(rig, tenants["first"].pid, other.pid) == []
    for puppet in (tenants["first"], other):
        puppet.wait()
    for pid in (tenants["first"].pid, other.pid):
        entries = log(rig, pid)
        assert len(entries) == 3
        assert all(later.at >= earlier.ends for earlier, later in itertools.pairwise(entries))


def test_a_process_that_finds_no_place_is_gated_too(rig: Any, tenants: dict[str, Puppet]) -> None:
    """The 33rd process of a tenant, where a driver needs no context to be made first."""
    first = next(tenant for tenant in rig.region._layout.tenants if tenant.name == b"first")
    first.process_high = layout.PROCESSES
    for slot in first.processes:
        slot.state = 2  # AIM_CLAIMED: taken, and never given back
    with CriticalSignal(rig.region, "critical"):
        tenants["first"].tell("launch 3")
        await_waiter(rig)
        assert log(rig, tenants["first"].pid) == []
    tenants["first"].wait()
    entries = log(rig, tenants["first"].pid)
    assert all(later.at >= earlier.ends for earlier, later in itertools.pairwise(entries))


def test_work_that_nobody_waits_for_is_soon_taken_to_be_done(rig: Any, tenants: dict[str, Puppet]) -> None:
    """A critical model that is being loaded launches now and then and waits for nothing: others need not stand still."""
    tenants["critical"].do("launch 1")
    tenants["first"].do("launch 3")
    assert use(rig, "first").overruns == 0


def test_best_effort_has_one_long_launch_in_flight(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Each starts on an idle device, so a critical launch never waits for more than one."""
    tenants["first"].do("launch 20")
    entries = log(rig, tenants["first"].pid)
    assert all(later.at >= earlier.ends for earlier, later in itertools.pairwise(entries))
    assert use(rig, "first").gpu_seconds >= 0.03


def test_small_launches_share_a_batch(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Not one event each: several are queued, up to the bound."""
    rig.driver.kernel_ns = 100_000
    tenants["first"].do("launch 400")
    entries = log(rig, tenants["first"].pid)
    ahead = [sum(other.ends > entry.at for other in entries[max(0, i - 200) : i]) for i, entry in enumerate(entries)]
    assert max(ahead) > 2
    assert max(ahead) * 100_000 <= 2 * rig.region.header.batch_ns


def test_two_best_effort_tenants_share_one_turn(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Hardly ever do both have work in flight (a process that the kernel delays at the wrong moment may), and both get on."""
    rig.region.header.quantum_ns = 10 * MILLISECOND
    names = ("first", "second")
    seen: list[tuple[int, int]] = []
    while not any(shared := [overlaps <= 8 and changes >= 2 for overlaps, changes in seen]):
        assert len(shared) < 5, seen  # a busy machine gets more than one chance
        before = rig.driver.launches
        for name in names:
            tenants[name].tell("launch 40")
        for name in names:
            tenants[name].wait()
            tenants[name].do("sync")
        assert rig.driver.launches == before + 80
        pairs = itertools.pairwise(log(rig, *(tenants[name].pid for name in names))[-80:])
        changed = [later.at < earlier.ends for earlier, later in pairs if later.pid != earlier.pid]
        seen.append((sum(changed), len(changed)))


def test_a_middle_tenant_goes_before_best_effort(rig: Any, tenants: dict[str, Puppet]) -> None:
    rig.admit("middle", priority=Priority.MEDIUM)
    middle = Puppet(rig, "middle")
    middle.do("serve 1 0 1")
    with CriticalSignal(rig.region, "middle"):
        tenants["first"].tell("launch 2")
        await_waiter(rig)
        middle.do("serve 3 0 1")
        assert log(rig, tenants["first"].pid) == []
    tenants["first"].wait()


def test_who_waits_for_a_middle_tenant_does_not_keep_the_turn_from_it(rig: Any, tenants: dict[str, Puppet]) -> None:
    """The holder of the turn waits for the request, and the request needs the turn: without help that is a standstill."""
    rig.admit("middle", priority=Priority.MEDIUM)
    middle = Puppet(rig, "middle")
    middle.do("serve 1 0 1")
    for _ in range(3):
        tenants["first"].do("launch 3")  # has the turn
        with CriticalSignal(rig.region, "middle"):
            tenants["first"].tell("launch 2")
            await_waiter(rig)
            middle.do("serve 5 0 1")
        tenants["first"].wait()
    assert use(rig, "middle").overruns == use(rig, "first").overruns == 0


def test_a_critical_tenant_that_hangs_stops_nobody_for_ever(rig: Any, tenants: dict[str, Puppet]) -> None:
    rig.region.header.hang_ns = 100 * MILLISECOND
    signal = CriticalSignal(rig.region, "critical")
    signal.begin()
    tenants["first"].do("launch 3")
    assert len(log(rig, tenants["first"].pid)) == 3


def test_a_critical_tenant_that_is_killed_stops_nobody_for_ever(rig: Any, tenants: dict[str, Puppet]) -> None:
    rig.region.header.hang_ns = 100 * MILLISECOND
    rig.region.header.unwaited_ns = 100 * MILLISECOND
    tenants["critical"].do("launch 1")  # never waited for
    tenants["critical"].process.kill()
    tenants["critical"].process.wait()
    tenants["first"].do("launch 3")
    rig.region.reap()
    assert use(rig, "critical").processes == ()


def test_best_effort_gets_something_even_beside_a_tenant_that_never_rests(rig: Any, tenants: dict[str, Puppet]) -> None:
    rig.region.header.starve_ns = 30 * MILLISECOND
    signal = CriticalSignal(rig.region, "critical")
    signal.begin()
    tenants["first"].do("launch 3")
    assert use(rig, "first").overruns >= 3


def test_work_that_waits_for_a_later_launch_does_not_deadlock(rig: Any, tenants: dict[str, Puppet]) -> None:
    """A kernel that never ends by itself: the bound on one's own work lets the next launch through."""
    rig.region.header.room_ns = 50 * MILLISECOND
    rig.driver.kernel_ns = 3_600_000 * MILLISECOND
    tenants["first"].do("launch 5")
    assert use(rig, "first").overruns >= 1


def test_a_holder_of_the_turn_that_dies_is_passed_over(rig: Any, tenants: dict[str, Puppet]) -> None:
    tenants["first"].do("launch 2")
    tenants["first"].process.kill()
    tenants["first"].process.wait()
    tenants["second"].do("launch 3")
    assert rig.region.header.turn != 0
    assert use(rig, "second").overruns == 0


def test_compute_is_kept_over_windows(rig: Any) -> None:
    """A quarter of the device: 60 kernels of 5 ms take at least (300 - window) / 0.25 ms."""
    rig.admit("quarter", priority=Priority.LOW, compute_ppm=250_000)
    rig.driver.kernel_ns = 5 * MILLISECOND
    quarter = Puppet(rig, "quarter")
    quarter.do("launch 60")
    quarter.do("sync")
    entries = log(rig, quarter.pid)
    span = entries[-1].ends - entries[0].at
    assert span >= (300 - 5 - 25 - 10) * MILLISECOND * 4 - 100 * MILLISECOND
    assert use(rig, "quarter").gpu_seconds == pytest.approx(0.3, rel=0.2)


def test_the_quiet_time_is_learnt(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Short pauses within a request, long ones between: others wait for longer than the short, shorter than the long."""
    rig.driver.kernel_ns = 100_000
    tenants["critical"].do("serve 20 80 12")
    assert 0 < use(rig, "critical").quiet_ns < 20 * MILLISECOND


def test_launches_into_a_graph_are_not_gated(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Nothing runs while a graph is recorded, and events of ours would end up in it."""
    signal = CriticalSignal(rig.region, "critical")
    signal.begin()
    tenants["first"].do("capture 50")
    assert use(rig, "first").waited_seconds == 0
    signal.end()


def test_a_sender_that_dies_is_reaped(rig: Any, tenants: dict[str, Puppet]) -> None:
    sender = Region.open(rig.region.path)
    signal = CriticalSignal(sender, "critical")
    signal.begin()
    cell = rig.region._layout.tenants[0].writers[0]
    assert cell.running == 1
    cell.start_ticks += 1  # as if this pid belonged to another process by now
    assert rig.region.reap() == 0, "it still holds its lock"
    sender.close()
    assert rig.region.reap() == 1
    assert (cell.running, cell.pid) == (0, 0)
