"""Streams, contexts, captures and threads, as programs use them: the gate keeps its bounds and disturbs none of them."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.native.conftest import MILLISECOND, Puppet
from tests.native.test_gate import be_patient, log, use
from tests.native.test_long_launches import ahead_at_each, pair

from aimgpu.domain import Priority
from aimgpu.isolation.critical_signal import CriticalSignal

__all__ = ["pair"]


def test_no_event_is_recorded_on_a_destroyed_stream(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """Launch on one stream, synchronise, destroy it, launch on the next: with short launches a batch stays open meanwhile."""
    _, hog = pair
    rig.driver.kernel_ns = 10_000
    number = hog.do("stream")
    hog.do(f"launch 3 0 {number}")
    for _ in range(50):
        hog.do(f"launch 1 0 {number}")
        hog.do(f"sync {number}")
        hog.do(f"destroy {number}")
        number = hog.do("stream")
        hog.do(f"launch 1 0 {number}")
    assert rig.driver.bad_streams == 0
    assert use(rig, "hog").gpu_seconds > 0


def test_no_event_of_ours_gets_into_a_capture(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """A stream with an open batch begins to be captured; then another stream launches, and the batch is closed."""
    _, hog = pair
    rig.driver.kernel_ns = 10_000
    first, second = hog.do("stream"), hog.do("stream")
    hog.do(f"launch 3 0 {first}")
    for _ in range(20):
        hog.do(f"launch 1 0 {first}")
        hog.do(f"begin {first}")
        hog.do(f"launch 2 0 {second}")
        hog.do(f"launch 2 0 {first}")
        hog.do(f"finish {first}")
        hog.do(f"launch 1 0 {second}")
        hog.do("sync")
    assert rig.driver.bad_captures == 0


@pytest.mark.parametrize(("count", "rounds"), [(3, 20), (20, 3)])
def test_contexts_in_turn_keep_the_bound_and_leak_no_events(
    rig: Any, pair: tuple[Puppet, Puppet], count: int, rounds: int
) -> None:
    """Also more contexts than there are places for events: the events of another context are destroyed first."""
    _, hog = pair
    rig.driver.kernel_ns = 2 * MILLISECOND
    rig.region.header.absent_ns = 0
    contexts = [hog.do("context") for _ in range(count)]
    for _ in range(rounds):
        for number in contexts:
            hog.do(f"enter {number}")
            hog.do("launch 1")
    assert max(ahead_at_each(log(rig, hog.pid))) == 0
    assert rig.driver.events <= 32
    assert rig.driver.bad_contexts == 0


def test_a_context_that_is_destroyed_takes_its_events_with_it(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    _, hog = pair
    rig.driver.kernel_ns = 10_000
    keeper = hog.do("context")
    for _ in range(10):
        number = hog.do("context")
        hog.do(f"enter {number}")
        hog.do("launch 3")
        hog.do(f"enter {keeper}")
        hog.do(f"destroy_context {number}")
        hog.do("launch 3")
    assert rig.driver.bad_contexts == 0


@pytest.mark.parametrize("how", ["poll", "poll_event"])
def test_polling_one_stream_does_not_finish_the_work_of_another(rig: Any, pair: tuple[Puppet, Puppet], how: str) -> None:
    """A critical tenant computes on one stream and polls a copy on another: best effort stays out until it is done."""
    critical, hog = pair
    be_patient(rig)
    rig.region.header.unwaited_ns = 60_000 * MILLISECOND
    work, side = critical.do("stream"), critical.do("stream")
    critical.do(f"launch 1 400000 {work}")
    hog.tell("launch 2")
    critical.do(f"{how} {side} 200")
    assert log(rig, hog.pid) == []
    critical.do(f"sync {work}")
    hog.wait()
    assert log(rig, hog.pid)[0].at >= log(rig, critical.pid)[-1].ends


def test_one_launch_of_a_tenant_passes_per_bound_whatever_the_number_of_threads(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """Beside a tenant that never rests: more threads, and more processes, take no more of the device."""
    _, hog = pair
    rig.region.header.starve_ns = 100 * MILLISECOND
    rig.region.header.hang_ns = 1_000_000 * MILLISECOND
    hog.do("launch 3 1000")
    other = Puppet(rig, "hog")
    with CriticalSignal(rig.region, "critical"):
        hog.tell("threads 8 1 1000")
        other.do("threads 8 1 1000")
        hog.wait()
    assert use(rig, "hog").overruns == 16
    entries = log(rig, hog.pid, other.pid)[3:]
    assert len(entries) == 16
    # Of all together: a thread that was let go may be kept from the processor until the next one is let go too.
    assert entries[-1].at - entries[0].at > 12 * 100 * MILLISECOND


def test_threads_wait_at_the_same_time(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """No thread waits for a lock that another one holds while it waits at the gate."""
    _, hog = pair
    be_patient(rig)
    hog.do("launch 3 1000")
    with CriticalSignal(rig.region, "critical"):
        hog.tell("threads 8 1 1000")
        deadline = time.monotonic() + 60
        while rig.region.header.waiters < 8:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert len(log(rig, hog.pid)) == 3
    hog.wait()
    assert len(log(rig, hog.pid)) == 11


def test_launches_that_the_driver_blocks_until_another_one_do_not_hang(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """A full queue, lazy loading, or a blocking launch: the second thread's launch gets to the driver."""
    _, hog = pair
    rig.region.header.room_ns = 10 * MILLISECOND
    hog.do("launch 3 1000")
    rig.driver.block_launches = rig.driver.entered + 2
    hog.do("threads 2 1 1000")
    assert len(log(rig, hog.pid)) == 5


@pytest.mark.parametrize("what", ["copy", "clear"])
def test_copies_and_memsets_within_the_device_wait_too(rig: Any, pair: tuple[Puppet, Puppet], what: str) -> None:
    _, hog = pair
    be_patient(rig)
    hog.do(f"{what} 1")
    with CriticalSignal(rig.region, "critical"):
        hog.tell(f"{what} 2")
        deadline = time.monotonic() + 60
        while rig.region.header.waiters == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert len(log(rig, hog.pid)) == 1
    hog.wait()
    assert len(log(rig, hog.pid)) == 3


def test_a_process_of_a_removed_tenant_writes_into_no_other_tenants_slot(rig: Any) -> None:
    rig.admit("first", priority=Priority.LOW)
    old = Puppet(rig, "first")
    old.do("launch 1")
    rig.region.dismiss("first")
    rig.admit("second", priority=Priority.LOW)  # gets the same place
    new = Puppet(rig, "second")
    new.do("launch 1")
    time.sleep(0.01)
    old.do("launch 50")
    places = [(place.pid, place.launched) for place in rig.region._layout.tenants[0].processes if place.pid]
    assert places == [(new.pid, 1)]


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_find_nothing_in_streams_contexts_and_captures(make_rig: Callable[[str], Any], kind: str) -> None:
    """Two tenants with four threads each, the lower one gated and limited; no misuse of a stream, capture or context either."""
    rig = make_rig(kind)
    rig.admit("critical", priority=Priority.HIGH)
    rig.admit("hog", priority=Priority.LOW, compute_ppm=900_000)
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    program = rig.tools.program("mixer", link=("libaimgpu.so", "libcuda.so.1"))
    running = [rig.start(program, 4, 12, tenant=name, **options) for name in ("critical", "hog", "hog")]
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, (out, err[-4000:])
    misuse = (rig.driver.bad_streams, rig.driver.bad_captures, rig.driver.bad_contexts, rig.driver.bad_pools)
    assert misuse == (0, 0, 0, 0)


def test_captured_launches_are_not_unfinished_work(rig: Any, pair: tuple[Puppet, Puppet]) -> None:
    """A critical tenant without signals that captured a graph on a stream that it never waits for."""
    critical, hog = pair
    rig.region.header.unwaited_ns = rig.region.header.hang_ns = rig.region.header.starve_ns = 1_000_000 * MILLISECOND
    rig.driver.kernel_ns = 10_000
    side = critical.do("stream")
    critical.do(f"begin {side}")
    critical.do(f"launch 20 0 {side}")
    critical.do(f"finish {side}")
    main = critical.do("stream")
    critical.do(f"launch 1 0 {main}")
    critical.do(f"sync {main}")
    hog.do("launch 5")
    slot = next(one for one in rig.region._layout.tenants if one.name == b"critical").processes[0]
    assert (slot.launched, slot.done) == (2, 2)
