"""Restarts and wakes that fail are tried again with growing pauses, over restarts of the daemon too, up to a bound."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.world import FAST, Machine, boot, check_ledger, deployment, status_sources

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Timing, read_timing
from aimgpu.control.effects import REAL
from aimgpu.control.events import Event, EventKind
from aimgpu.control.waiting import after_failure, after_refusal, describe_retry, is_due, is_stale
from aimgpu.daemon.status import Addresses, describe_status
from aimgpu.domain import InstanceState
from aimgpu.errors import InvalidInput
from aimgpu.ledger import Retry

LATER = replace(FAST, restart_delay_seconds=1000.0)
HERE = Addresses(version="1", pid=1, url="http://127.0.0.1:1")


@given(st.floats(0, 1), st.integers(1, 7))
def test_pauses_double_and_stay_within_the_jitter(jitter: float, failures: int) -> None:
    timing = Timing(restart_delay_seconds=2.0, restart_jitter=0.2, restart_limit=8)
    known = Retry(deployment="chat", reason="x", failures=failures - 1, last_failure_ms=0) if failures > 1 else None
    retry = after_failure(known, Retry(deployment="chat", reason="y", last_failure_ms=10), timing, jitter)
    assert retry.failures == failures
    assert retry.retry_at_ms is not None
    pause = (retry.retry_at_ms - 10) / 1000
    assert 0.8 * 2**failures - 0.01 <= pause <= 1.2 * 2**failures + 0.01


def test_beyond_the_bound_nothing_is_tried_and_long_after_a_failure_counting_starts_again() -> None:
    timing = Timing(restart_limit=2)
    last = Retry(deployment="chat", reason="x", failures=2, last_failure_ms=1000)
    given_up = after_failure(last, Retry(deployment="chat", reason="y", last_failure_ms=2000), timing, 0.5)
    assert (given_up.exhausted, given_up.retry_at_ms, given_up.failures) == (True, None, 3)
    later = after_failure(last, Retry(deployment="chat", reason="y", last_failure_ms=10_000_000), timing, 0.5)
    assert (later.exhausted, later.failures) == (False, 1)
    assert is_stale(replace(last, last_failure_ms=0), 10_000_000)
    assert not is_stale(given_up, 10_000_000)


def test_no_room_is_no_failure_and_a_clock_that_was_set_back_delays_nothing_for_long() -> None:
    timing = Timing()
    refused = after_refusal(None, Retry(deployment="chat", reason="full", last_failure_ms=1000), 5.0)
    assert (refused.failures, refused.retry_at_ms) == (0, 6000)
    assert not is_due(refused, 5999, timing)
    assert is_due(refused, 6000, timing)
    assert is_due(replace(refused, retry_at_ms=10**12), 0, timing)


def test_people_read_how_often_it_failed_and_when_it_is_tried_next() -> None:
    retry = Retry(deployment="chat", reason="out of memory", failures=3, last_failure_ms=0, retry_at_ms=40_000)
    assert describe_retry(retry, 0) == "failed 3 times, next try in 40 s: out of memory"
    gone = describe_retry(replace(retry, retry_at_ms=None, exhausted=True), 0)
    assert gone == "failed 3 times and is not tried again until it is applied again: out of memory"


def test_the_bound_is_a_setting() -> None:
    assert read_timing({}).restart_limit == Timing().restart_limit
    assert read_timing({"AIMGPU_RESTART_LIMIT": " 0 "}).restart_limit == 0
    assert read_timing({"AIMGPU_RESTART_LIMIT": "20"}).restart_limit == 20
    for text in ("-1", "many", "1001", "1.5", "²"):
        with pytest.raises(InvalidInput, match="AIMGPU_RESTART_LIMIT"):
            read_timing({"AIMGPU_RESTART_LIMIT": text})


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


def fail(machine: Machine, controller: Controller) -> None:
    """What runs dies, and dies again whenever it is started."""
    machine.behaviours["chat"] = "dies"
    for process in machine.processes:
        process.alive = False
    assert controller.supervise() == ("chat",)


def test_a_restart_that_fails_is_counted_and_tried_again_until_it_works(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat")])
    fail(machine, controller)
    for failures in (2, 3):
        controller.supervise(wait=True)
        (retry,) = controller.waiting()
        assert retry.failures == failures
    machine.behaviours["chat"] = "ready"
    controller.supervise(wait=True)
    assert controller.waiting() == ()
    assert [one.state for one in controller.instances()] == [InstanceState.READY]
    check_ledger(machine, controller, names=["chat"])


def test_one_that_waits_for_a_try_is_tried_again_after_a_request_for_it_failed(
    machine: Machine, controller: Controller
) -> None:
    controller.apply([deployment("chat")])
    fail(machine, controller)
    assert controller.apply([deployment("chat")]).failed
    (retry,) = controller.waiting()
    assert retry.failures == 1  # counted from the request on
    machine.behaviours["chat"] = "ready"
    controller.supervise(wait=True)
    assert [one.state for one in controller.instances()] == [InstanceState.READY]
    check_ledger(machine, controller, names=["chat"])


def test_one_that_failed_at_the_first_request_waits_for_another(machine: Machine, controller: Controller) -> None:
    machine.behaviours["chat"] = "dies"
    assert controller.apply([deployment("chat")]).failed
    controller.supervise(wait=True)
    (gave_up,) = controller.waiting()
    assert (gave_up.exhausted, describe_retry(gave_up, 0)) == (True, f"gave up: {gave_up.reason}")
    assert len(machine.processes) == 1


def test_after_the_bound_it_stays_failed_until_it_is_applied_again(machine: Machine) -> None:
    controller = boot(machine, timing=replace(FAST, restart_limit=2))
    controller.apply([deployment("chat")])
    fail(machine, controller)
    for _ in range(4):
        controller.supervise(wait=True)
    (retry,) = controller.waiting()
    assert (retry.exhausted, retry.failures) == (True, 3)
    started = len(machine.processes)
    controller.supervise(wait=True)
    assert len(machine.processes) == started
    (shown,) = describe_status(status_sources(controller), HERE)["instances"]
    assert shown["reason"].startswith("failed 3 times and is not tried again")
    assert shown["retry"]["gave_up"]
    machine.behaviours["chat"] = "ready"
    controller.apply([deployment("chat")])
    assert controller.waiting() == ()
    assert controller._dependencies.ledger.retries() == ()
    controller.close()


def test_the_count_and_the_pause_outlive_the_daemon(machine: Machine) -> None:
    first = boot(machine, timing=LATER)
    first.apply([deployment("chat")])
    fail(machine, first)
    before = first.waiting()
    first.close()
    machine.behaviours["chat"] = "ready"
    second = boot(machine, timing=LATER)
    second.reconcile()
    second.supervise(wait=True)
    assert second.waiting() == before
    assert [one.state for one in second.instances()] == [InstanceState.FAILED]
    second.close()
    third = boot(machine)  # whose pauses are over
    third._dependencies.ledger.keep_retry(replace(before[0], retry_at_ms=0))
    third.supervise(wait=True)
    assert [one.state for one in third.instances()] == [InstanceState.READY]
    third.close()


def test_a_wake_that_fails_is_tried_again_too(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat", keep_seconds=60)])
    controller.sleep("chat")
    machine.behaviours["chat"] = "dies"
    assert controller.wake("chat").failed
    (retry,) = controller.waiting()
    assert retry.failures == 1
    machine.behaviours["chat"] = "ready"
    controller.supervise(wait=True)
    assert [one.state for one in controller.instances()] == [InstanceState.READY]
    check_ledger(machine, controller, names=["chat"])


def test_a_death_while_another_apply_is_carried_out_is_not_forgotten(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat")])
    machine.behaviours["code"] = "never"  # its start keeps the apply of both going

    def kill(event: Event) -> None:
        if event.kind is EventKind.PLAN:
            for process in machine.processes:
                process.alive = False
            assert controller.supervise() == ("chat",)

    controller.apply([deployment("chat"), deployment("code")], emit=kill)
    assert "chat" in {retry.deployment for retry in controller.waiting()}
    controller.supervise(wait=True)
    assert "chat" in {one.deployment for one in controller.instances() if one.state is InstanceState.READY}


def test_a_death_right_after_a_restart_is_not_forgotten(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat")])
    machine.processes[0].alive = False
    controller.supervise()

    def kill(event: Event) -> None:
        if event.kind is EventKind.STATE and event.data["state"] == "ready":
            again = Retry(deployment="chat", reason="died again", failures=2, last_failure_ms=REAL.wall_ms(), retry_at_ms=0)
            controller._dependencies.ledger.keep_retry(again)

    controller.supervise(emit=kill, wait=True)
    assert [retry.reason for retry in controller.waiting()] == ["died again"]
    controller.supervise(wait=True)
    assert controller.waiting() == ()
