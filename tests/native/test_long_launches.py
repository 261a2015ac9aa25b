"""Long launches: they stay bounded, wait for pauses that they fit into, and a compute ceiling holds with them."""

import itertools
import time
from typing import Any

import pytest
from tests.native.conftest import MILLISECOND, Puppet
from tests.native.test_gate import log, use

from aimgpu.domain import Priority
from aimgpu.isolation import layout
from aimgpu.isolation.critical_signal import CriticalSignal


@pytest.fixture
def pair(rig: Any) -> tuple[Puppet, Puppet]:
    """A critical tenant that has used the device, and a best-effort one."""
    rig.admit("critical", priority=Priority.HIGH)
    rig.admit("hog", priority=Priority.LOW)
    critical, hog = Puppet(rig, "critical"), Puppet(rig, "hog")
    critical.do("serve 1 0 1")
    return critical, hog


def ahead_at_each(entries: list[Any]) -> list[int]:
    """At each launch, how many launches of the same tenant were queued or running."""
    return [sum(other.ends > entry.at for other in entries[:at]) for at, entry in enumerate(entries)]


@pytest.mark.parametrize("milliseconds", [20, 150, 300])
def test_launches_longer_than_the_bound_stay_one_at_a_time(rig: Any, pair: tuple[Puppet, Puppet], milliseconds: int) -> None:
    """Also before their length is known, and although each is longer than the bound for short ones."""
    _, hog = pair
    rig.region.header.absent_ns = 0  # only its own work holds it
    hog.do(f"launch 6 {milliseconds * 1000}")
    entries = log(rig, hog.pid)
    assert len(entries) == 6
    left = [earlier.ends - later.at for earlier, later in itertools.pairwise(entries)]
    assert max(left) <= 2 * MILLISECOND, "what may be left of one while the next is queued, after a second of silence"
    assert use(rig, "hog").overruns == 0


def test_threads_with_long_launches_stay_one_at_a_time(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    _, hog = pair
    rig.region.header.absent_ns = 0
    hog.do("threads 4 2 120000")
    assert max(ahead_at_each(log(rig, hog.pid))) == 0


def test_launches_pass_where_nothing_finishes_for_many_bounds(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """A kernel that waits for a later launch: one is admitted per bound, which grows with each."""
    _, hog = pair
    rig.region.header.room_ns = MILLISECOND
    rig.driver.kernel_ns = 3_600_000 * MILLISECOND
    hog.do("launch 40")
    assert use(rig, "hog").overruns >= 8
    assert len(log(rig, hog.pid)) == 40


def serve_requests(rig: Any, critical: Puppet, pauses_ms: list[float], **signal: Any) -> None:
    """Requests of one short launch each, with these pauses after them."""
    sender = signal.get("sender") or CriticalSignal(rig.region, "critical")
    for pause in pauses_ms:
        with sender:
            critical.do("serve 1 0 1")
        time.sleep(pause / 1000)


def teach(rig: Any, *, pause_ms: float, count: int) -> Any:
    """As if so many requests had come, with pauses of this length between them; the allowance is used up."""
    tenant = next(one for one in rig.region._layout.tenants if one.name == b"critical")
    tenant.pauses[layout.pause_bucket(int(pause_ms * MILLISECOND))] = count
    tenant.writers[0].begun = count
    tenant.writers[0].begun_ns = tenant.writers[0].ended_ns = time.monotonic_ns()
    tenant.spent_ppm = count * rig.region.header.allowance_ppm
    return tenant


def test_a_launch_that_does_not_fit_into_the_expected_pause_waits(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    _, hog = pair
    hog.do("launch 2 190000")  # its length is known now
    hog.do("sync")
    teach(rig, pause_ms=50, count=1000)
    rig.region.header.starve_ns = MILLISECOND
    hog.tell("launch 1 190000")
    deadline = time.monotonic() + 60
    while use(rig, "hog").held == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    tenant = teach(rig, pause_ms=50, count=1000)
    tenant.writers[0].begun += 40  # forty more requests earn two touches
    rig.region.wake()
    hog.wait()
    assert use(rig, "hog").held_seconds > 0
    assert use(rig, "hog").longest_launch_ns == pytest.approx(190 * MILLISECOND, rel=0.1)


def test_a_launch_that_fits_starts_at_once(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    _, hog = pair
    hog.do("launch 2 20000")
    hog.do("sync")
    tenant = teach(rig, pause_ms=900, count=2000)
    tenant.spent_ppm -= 20_000  # two hundredths of a touch are left
    rig.region.header.starve_ns = 60_000 * MILLISECOND
    hog.do("launch 1 20000")
    assert use(rig, "hog").held == 0


def test_a_short_launch_is_never_held_for_the_pause(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    _, hog = pair
    hog.do("launch 2 2000")
    hog.do("sync")
    teach(rig, pause_ms=1, count=1000)
    hog.do("launch 3 2000")
    assert use(rig, "hog").held == 0


def test_what_counts_as_long_follows_the_length_of_requests(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """A request of two seconds does not notice 20 ms."""
    _, hog = pair
    hog.do("launch 2 20000")
    hog.do("sync")
    teach(rig, pause_ms=1, count=1000).writers[0].request_ns = 2_000 * MILLISECOND
    hog.do("launch 1 20000")
    assert use(rig, "hog").held == 0


def test_nothing_is_held_for_ever(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """After its length over the allowance a launch passes, and is counted."""
    _, hog = pair
    rig.region.header.allowance_ppm = 500_000
    hog.do("launch 2 50000")
    hog.do("sync")
    teach(rig, pause_ms=1, count=100_000)
    rig.region.header.starve_ns = MILLISECOND
    hog.do("launch 1 50000")
    assert use(rig, "hog").overruns == 1
    assert use(rig, "hog").held == 1


def test_a_tenant_that_was_not_asked_for_long_holds_nothing(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    _, hog = pair
    hog.do("launch 2 50000")
    hog.do("sync")
    tenant = teach(rig, pause_ms=1, count=1000)
    rig.region.header.absent_ns = 5 * MILLISECOND
    tenant.writers[0].begun_ns = tenant.writers[0].ended_ns = time.monotonic_ns() - 10 * MILLISECOND
    hog.do("launch 1 50000")
    assert use(rig, "hog").held == 0


def test_touched_requests_are_counted(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """A request that begins while a long launch runs; one that begins after it was not touched."""
    critical, hog = pair
    sender = CriticalSignal(rig.region, "critical")
    serve_requests(rig, critical, [0, 0], sender=sender)
    hog.do("launch 1 400000")
    hog.do("sync")
    before = use(rig, "critical")
    assert before.touched == 0, "its length was not known"
    hog.do("launch 1 400000")
    serve_requests(rig, critical, [0], sender=sender)
    hog.do("sync")
    serve_requests(rig, critical, [0], sender=sender)
    hog.do("launch 1")
    hog.do("sync")
    assert use(rig, "critical").touched == 1
    assert use(rig, "critical").requests == 4


def test_at_most_the_allowance_of_requests_is_touched(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """Requests come every 8 ms and the hog launches 400 ms at a time, without end: every launch touches some.

    So long that a request of this process that comes late, on a busy machine, hardly looks like a pause that one fits into.
    """
    critical, hog = pair
    sender = CriticalSignal(rig.region, "critical")
    hog.do("launch 2 400000")
    hog.do("sync")
    serve_requests(rig, critical, [4] * 30, sender=sender)
    hog.tell("launch 4 400000")
    while len(log(rig, hog.pid)) < 6:
        serve_requests(rig, critical, [4], sender=sender)
    hog.wait()
    seen = use(rig, "critical")
    launches = log(rig, hog.pid)[2:]
    assert max(ahead_at_each(launches)) == 0
    assert len(launches) == 4
    spans = [later.at - earlier.ends for earlier, later in itertools.pairwise(launches)]
    assert min(spans) > 15 * 4 * MILLISECOND, "some twenty requests with pauses of 4 ms earn a touch"
    assert seen.touched <= seen.requests * 0.05 + 1


@pytest.mark.parametrize(
    ("ppm", "milliseconds", "count"), [(10_000, 30, 3), (5_000, 12, 3), (100_000, 50, 3), (300_000, 20, 12)]
)
def test_a_ceiling_holds_at_every_percentage_and_length(rig: Any, ppm: int, milliseconds: int, count: int) -> None:
    """The time between the first launch and the last is at least what those before the last cost."""
    rig.admit("limited", priority=Priority.LOW, compute_ppm=ppm)
    limited = Puppet(rig, "limited")
    limited.do(f"launch {count} {milliseconds * 1000}")
    entries = log(rig, limited.pid)
    paid = (count - 1) * milliseconds * MILLISECOND * 1_000_000 // ppm
    assert entries[-1].at - entries[0].at >= paid - 110 * MILLISECOND


def test_a_ceiling_is_kept_through_a_debt_of_minutes(rig: Any) -> None:
    """0.1 % and 120 ms: two minutes for each launch."""
    rig.admit("limited", priority=Priority.LOW, compute_ppm=1_000)
    limited = Puppet(rig, "limited")
    limited.do("launch 1 120000")
    limited.do("sync")
    limited.tell("launch 1 120000")
    time.sleep(1)
    (first,) = log(rig, limited.pid)
    tenant = next(one for one in rig.region._layout.tenants if one.name == b"limited")
    assert (tenant.paid & ((1 << 48) - 1)) / 1e6 - first.at / 1e9 == pytest.approx(120, abs=0.5)
    tenant.paid ^= 1 << 47  # a damaged word is not believed
    limited.wait()


def test_a_ceiling_holds_for_many_processes_together(rig: Any) -> None:
    rig.admit("limited", priority=Priority.LOW, compute_ppm=200_000)
    processes = [Puppet(rig, "limited") for _ in range(8)]
    processes[0].do("launch 1 20000")
    processes[0].do("sync")
    for process in processes:
        process.tell("launch 2 20000")
    for process in processes:
        process.wait()
    entries = log(rig, *(process.pid for process in processes))
    span = entries[-1].at - entries[0].at
    assert span >= (len(entries) - 8) * 20 * MILLISECOND * 5 - 100 * MILLISECOND, "one per process may be paid late"
