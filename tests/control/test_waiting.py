"""Every wanted replica is ready, asleep, starting, ending, or waits for something that is named."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.side_threads import BOUND_SECONDS, SLOW, in_thread, wait_for
from tests.control.world import FAST, Machine, boot, deployment, status_sources

from aimgpu.control.controller import Controller
from aimgpu.control.waiting import Ends, find_waiting
from aimgpu.daemon.status import Addresses, describe_status
from aimgpu.domain import Instance, InstanceState
from aimgpu.ledger import Retry

HERE = Addresses(version="1", pid=1, url="http://127.0.0.1:1")
CHAT = deployment("chat", replicas=2)
FAILED = Retry(deployment="chat", reason="it died", failures=1, retry_at_ms=1)
NO_ROOM = Retry(deployment="chat", reason="no room", retry_at_ms=1)
GAVE_UP = Retry(deployment="chat", reason="it died", failures=8, exhausted=True)


def copy(replica: int, state: InstanceState) -> Instance:
    return Instance(
        id=f"chat-{replica}",
        deployment="chat",
        replica=replica,
        model="m",
        engine="llamacpp",
        launcher="process",
        state=state,
    )


@pytest.mark.parametrize("state", sorted(set(InstanceState) - {InstanceState.FAILED, InstanceState.ABSENT}))
def test_what_serves_sleeps_starts_or_ends_waits_for_nothing(state: InstanceState) -> None:
    assert find_waiting([CHAT], [copy(0, state), copy(1, state)], {"chat": FAILED}, ()) == ()


@pytest.mark.parametrize(
    ("retry", "under_way", "ends_on"),
    [
        (None, (), Ends.LOOK),
        (FAILED, (), Ends.TIME),
        (NO_ROOM, (), Ends.ROOM),
        (GAVE_UP, (), Ends.UP),
        (None, ("chat",), Ends.OPERATION),
        (FAILED, ("chat",), Ends.OPERATION),
    ],
)
def test_what_is_missing_or_failed_waits_for_something(retry: Retry | None, under_way: tuple[str, ...], ends_on: Ends) -> None:
    retries = {} if retry is None else {"chat": retry}
    (wait,) = find_waiting([CHAT], [copy(0, InstanceState.FAILED)], retries, under_way)
    assert (wait.replicas, wait.ends_on, wait.retry) == ((0, 1), ends_on, retry)
    assert wait.reason


def shown(controller: Controller) -> dict[str, str]:
    return {entry["name"]: entry["ends_on"] for entry in describe_status(status_sources(controller), HERE)["waiting"]}


def test_ps_shows_what_ends_each_wait(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine, timing=replace(FAST, restart_delay_seconds=1e6))
    controller.apply([deployment("chat", 150), deployment("other", 10)])
    controller._dependencies.ledger.want(deployment("large", 150))
    assert shown(controller) == {"large": "look"}
    controller.reconcile()
    assert shown(controller) == {"large": "room"}
    next(one for one in machine.processes if one.instance_id.startswith("other-")).alive = False
    controller.supervise()
    instances = describe_status(status_sources(controller), HERE)["instances"]
    assert {one["name"]: one["retry"]["ends_on"] for one in instances if one["retry"]} == {"other": "time"}
    controller.close()


def test_ps_shows_what_an_operation_will_start_once_others_have_ended(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    busy = [True]
    controller = boot(machine, timing=SLOW, in_flight=lambda _: int(busy[0]))
    controller.apply([deployment("chat", 150)])
    changing = in_thread(lambda: controller.apply([deployment("chat", 100), deployment("late", 60)]))
    wait_for(lambda: [one.state for one in controller.instances()] == [InstanceState.DRAINING])
    assert shown(controller) == {"late": "operation"}, "its room is still held"
    busy.clear()
    busy.append(False)
    changing.join(BOUND_SECONDS)
    assert shown(controller) == {}
    controller.close()
