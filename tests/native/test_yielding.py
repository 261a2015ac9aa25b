"""Beside a tenant that yields a share of the device: when a best-effort launch passes, and what it pays."""

import time
from typing import Any

import pytest
from tests.native.conftest import MILLISECOND, Puppet

from aimgpu.domain import Priority
from aimgpu.isolation.critical_signal import CriticalSignal

ALMOST_A_SECOND = 999_999_999
IN_PAUSE, NOT_IN_PAUSE, LIGHT, FILLING = range(4)


@pytest.fixture
def tenants(rig: Any) -> dict[str, Puppet]:
    rig.admit("critical", priority=Priority.HIGH)
    rig.admit("batch", priority=Priority.LOW)
    header = rig.region.header
    header.hang_ns = header.starve_ns = 1_000_000 * MILLISECOND  # a loaded machine may hold anybody up for longer
    rig.driver.kernel_ns = 1 * MILLISECOND
    made = {name: Puppet(rig, name) for name in ("critical", "batch")}
    made["critical"].do("serve 1 0 1")
    return made


def launches(rig: Any, puppet: Puppet) -> list[Any]:
    entries = [rig.driver.log[number] for number in range(rig.driver.launches)]
    return sorted((entry for entry in entries if entry.pid == puppet.pid), key=lambda entry: entry.at)


def await_waiter(rig: Any) -> None:
    deadline = time.monotonic() + 60
    while rig.region.header.waiters == 0:
        assert time.monotonic() < deadline, "nothing waits"


def test_a_long_launch_waits_until_the_device_has_a_pause(rig: Any, tenants: dict[str, Puppet]) -> None:
    rig.region.set_yield("critical", 900_000)
    rig.region.header.pause_wait_ns = ALMOST_A_SECOND
    with CriticalSignal(rig.region, "critical"):
        tenants["critical"].do("launch 1")  # finished or not: the tenant has not asked yet
        tenants["batch"].tell("launch 1")
        await_waiter(rig)
        assert launches(rig, tenants["batch"]) == []
        tenants["critical"].do("sync")
        tenants["batch"].wait()
    assert rig.region.header.admitted[IN_PAUSE] == 1


def test_it_does_not_wait_for_a_pause_for_ever(rig: Any, tenants: dict[str, Puppet]) -> None:
    rig.region.set_yield("critical", 900_000)
    with CriticalSignal(rig.region, "critical"):
        tenants["critical"].do("launch 1")
        tenants["batch"].do("launch 1")
    assert rig.region.header.admitted[NOT_IN_PAUSE] == 1


def test_short_launches_pass_beside_work_without_waiting_for_each_other(rig: Any, tenants: dict[str, Puppet]) -> None:
    """So that a step is queued as a whole and runs in one piece."""
    header = rig.region.header
    header.light_ns = header.overdraft_ns = header.pause_wait_ns = ALMOST_A_SECOND
    tenants["batch"].do("launch 1 500000")
    tenants["batch"].do("sync")  # its length is known from here on
    rig.region.set_yield("critical", 900_000)
    with CriticalSignal(rig.region, "critical"):
        tenants["critical"].do("launch 1")
        tenants["batch"].do("launch 3 500000")
    last = launches(rig, tenants["batch"])[-3:]
    assert last[2].at < last[0].ends
    assert header.admitted[LIGHT] == 3


def test_what_passes_is_paid_before_more_does(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Six launches of 2 ms are 12 ms of device time, 1200 ms at one percent; one of them, and a little, may be overdrawn."""
    rig.driver.kernel_ns = 2 * MILLISECOND
    tenants["batch"].do("launch 2")
    tenants["batch"].do("sync")
    rig.region.header.light_ns = ALMOST_A_SECOND
    rig.region.set_yield("critical", 10_000)
    with CriticalSignal(rig.region, "critical"):
        tenants["critical"].do("launch 1")
        tenants["critical"].do("sync")
        assert tenants["batch"].do("timed 6") >= 500


def test_launches_that_fit_into_a_pause_of_the_steps_are_free(rig: Any, tenants: dict[str, Puppet]) -> None:
    tenants["batch"].do("launch 2")
    tenants["batch"].do("sync")
    tenant = next(one for one in rig.region._layout.tenants if one.name == b"critical")
    rig.region.header.fill_ns = 1_000
    rig.region.set_yield("critical", 1_000)
    with CriticalSignal(rig.region, "critical"):
        tenants["critical"].do("launch 1")
        tenants["critical"].do("sync")
        tenant.step_pause_ns = 60_000 * MILLISECOND  # as if it launched once a minute
        tenants["batch"].do("launch 20")
    assert rig.region.header.admitted[FILLING] == 20
    assert tenant.yield_paid_ns == 0


def is_queued(rig: Any, batch: Puppet) -> bool:
    """Whether the second of two launches was made before the first had ended."""
    batch.do("launch 2")
    batch.do("sync")
    first, second = launches(rig, batch)[-2:]
    return bool(second.at < first.ends)


def await_queue(rig: Any, batch: Puppet) -> None:
    """A loaded machine may make the second launch late."""
    deadline = time.monotonic() + 60
    while not is_queued(rig, batch):
        assert time.monotonic() < deadline, "each waits for the other to end"


def test_while_the_tenant_that_yields_is_idle_short_work_is_queued(rig: Any, tenants: dict[str, Puppet]) -> None:
    """The device would be idle from the end of a launch until the next one is made."""
    rig.region.header.silence_ns = 600 * 1000 * MILLISECOND
    assert not any(is_queued(rig, tenants["batch"]) for _ in range(5)), "the tenant is strict"
    rig.region.set_yield("critical", 100_000)
    await_queue(rig, tenants["batch"])


@pytest.mark.parametrize("share", [0, 100_000])
def test_while_it_is_idle_nothing_is_queued_behind_long_work(rig: Any, tenants: dict[str, Puppet], share: int) -> None:
    """Its next launch would have to wait for all of it."""
    rig.region.header.absent_ns = 1  # it is not the pause that holds long launches back here
    tenants["batch"].do("launch 1 200000")
    tenants["batch"].do("sync")
    rig.region.set_yield("critical", share)
    tenants["batch"].do("launch 3 200000")
    first, second, third = launches(rig, tenants["batch"])[-3:]
    assert first.ends <= second.at
    assert second.ends <= third.at


def test_behind_a_strict_tenant_short_work_is_queued_after_a_long_silence(rig: Any, tenants: dict[str, Puppet]) -> None:
    """The device would be idle between launches although no request has come for long."""
    rig.region.header.silence_ns = 1
    await_queue(rig, tenants["batch"])


def test_the_first_sign_of_a_strict_tenant_ends_the_queue(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Neither a request that ended a moment ago nor a launch counts as silence."""
    rig.region.header.silence_ns = 1
    await_queue(rig, tenants["batch"])
    rig.region.header.silence_ns = 600 * 1000 * MILLISECOND
    with CriticalSignal(rig.region, "critical"):
        pass
    assert not any(is_queued(rig, tenants["batch"]) for _ in range(5))
    tenants["critical"].do("launch 1")
    tenants["critical"].do("sync")
    assert not any(is_queued(rig, tenants["batch"]) for _ in range(5))


def test_little_is_ahead_of_the_first_launch_after_a_silence(rig: Any, tenants: dict[str, Puppet]) -> None:
    """Whatever a best-effort tenant does: at most 2 ms of work that had begun, and one launch of 1 ms behind it."""
    rig.region.header.silence_ns = 1
    await_queue(rig, tenants["batch"])
    tenants["batch"].do("launch 40")
    tenants["batch"].do("sync")
    found = launches(rig, tenants["batch"])[-40:]
    assert max(entry.ends - entry.at for entry in found) <= 3.5 * MILLISECOND


def test_before_a_request_reaches_the_engine_nothing_is_paid(rig: Any, tenants: dict[str, Puppet]) -> None:
    """The engine parses and schedules it first; a tenant that yields leaves that time to others, until it launches."""
    tenants["batch"].do("launch 2")
    tenants["batch"].do("sync")
    rig.region.set_yield("critical", 10_000)
    tenant = next(one for one in rig.region._layout.tenants if one.name == b"critical")
    with CriticalSignal(rig.region, "critical"):
        tenants["batch"].do("launch 20")
        assert tenant.yield_paid_ns == 0
        tenants["critical"].do("launch 1")
        tenants["batch"].do("launch 1")
        assert tenant.yield_paid_ns != 0


def test_many_short_launches_are_queued_behind_the_work_of_a_step(rig: Any, tenants: dict[str, Puppet]) -> None:
    """While the tenant that yields is idle: the launches that prepare the next step wait for no part of this one."""
    rig.region.set_yield("critical", 100_000)
    for length in (1_500, 10):
        tenants["batch"].do(f"launch 2 {length}")
        tenants["batch"].do("sync")  # lengths are known from here on
    deadline = time.monotonic() + 60
    while True:
        tenants["batch"].do("launch 1 1500")
        tenants["batch"].do("launch 12 10")
        tenants["batch"].do("sync")
        step, *others = launches(rig, tenants["batch"])[-13:]
        if all(entry.at < step.ends for entry in others):
            break
        assert time.monotonic() < deadline, "they wait for it"
