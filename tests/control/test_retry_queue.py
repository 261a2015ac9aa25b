"""Deployments that lost their place stay wanted: shown with the reason, and started again when there is room."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FAST, Machine, boot, check_ledger, deployment, size_by_name, status_sources

from aimgpu.control.controller import Controller
from aimgpu.control.events import Event, EventKind
from aimgpu.daemon.status import Addresses, describe_status
from aimgpu.domain import Deployment, Footprint, InstanceState, Priority
from aimgpu.engines.protocols import LocalModel
from aimgpu.errors import EngineUnavailable

SOON = replace(FAST, room_retry_seconds=0.0, error_retry_seconds=0.0)
HERE = Addresses(version="1", pid=1, url="http://127.0.0.1:1")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


@pytest.fixture
def controller(machine: Machine) -> Iterator[Controller]:
    controller = boot(machine, timing=SOON)
    yield controller
    controller.close()


def names_of(controller: Controller) -> set[str]:
    return {instance.deployment for instance in controller.instances() if instance.state is InstanceState.READY}


def lose_room(controller: Controller, *stack: Deployment) -> str:
    """Partitions of 24 GiB leave no room for what has 48."""
    controller.apply(stack)
    device = controller.devices()[0]
    controller.change_layout(device.id, "CPX/NPS1")
    return device.id


def test_what_has_no_room_after_a_change_of_layout_is_shown_with_the_reason(machine: Machine, controller: Controller) -> None:
    lose_room(controller, deployment("small", 2), deployment("large", 48))
    assert names_of(controller) == {"small"}
    (waiting,) = controller.waiting()
    assert waiting.deployment == "large"
    assert "48" in waiting.reason
    (shown,) = describe_status(status_sources(controller), HERE)["waiting"]
    said = f"waits for room, next try in 0 s: {waiting.reason}"
    assert (shown["name"], shown["replicas"], shown["reason"]) == ("large", 1, said)
    check_ledger(machine, controller, names=["small", "large"])


def test_it_comes_back_when_there_is_room_again(machine: Machine, controller: Controller) -> None:
    device_id = lose_room(controller, deployment("small", 2), deployment("large", 48))
    controller.supervise(wait=True)
    assert names_of(controller) == {"small"}
    controller.change_layout(device_id, "SPX/NPS1")
    controller.supervise(wait=True)
    assert names_of(controller) == {"small", "large"}
    assert controller.waiting() == ()
    check_ledger(machine, controller, names=["small", "large"])


def test_the_same_reason_is_told_once(controller: Controller) -> None:
    lose_room(controller, deployment("large", 48))
    told: list[Event] = []
    for _ in range(3):
        controller.supervise(emit=told.append, wait=True)
    assert told == []
    assert len(controller.waiting()) == 1


def test_the_most_urgent_gets_the_room_first(controller: Controller) -> None:
    asks = [asking(deployment("patient", 90), Priority.LOW), asking(deployment("urgent", 90), Priority.HIGH)]
    device_id = lose_room(controller, *asks)
    assert {item.deployment for item in controller.waiting()} == {"patient", "urgent"}
    controller._dependencies.hardware.apply_layout(device_id, "DPX/NPS1")
    controller.apply([deployment("first", 80)])  # which leaves room for one of them
    controller.supervise(wait=True)
    assert names_of(controller) == {"first", "urgent"}


def test_one_that_is_released_while_it_waits_is_forgotten(machine: Machine, controller: Controller) -> None:
    device_id = lose_room(controller, deployment("large", 48))
    controller.release(["large"])
    assert controller.waiting() == ()
    controller.change_layout(device_id, "SPX/NPS1")
    controller.supervise(wait=True)
    check_ledger(machine, controller, names=[])


def test_one_that_waits_waits_after_a_crash_too(machine: Machine, controller: Controller) -> None:
    device_id = lose_room(controller, deployment("large", 48))
    again = boot(machine, timing=SOON)
    again.reconcile()
    assert [item.deployment for item in again.waiting()] == ["large"]
    again.change_layout(device_id, "SPX/NPS1")
    again.supervise(wait=True)
    assert names_of(again) == {"large"}
    again.close()


def test_one_that_is_being_tried_is_not_tried_twice(controller: Controller) -> None:
    """Preparing may take long: a download, for one."""
    lose_room(controller, deployment("large", 48))
    entered, go_on = threading.Event(), threading.Event()
    tries: list[str] = []

    def size_slowly(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
        tries.append(deployment.name)
        entered.set()
        assert go_on.wait(300)
        return size_by_name(deployment, engine, local, vendor)

    controller._placer._dependencies = replace(controller._dependencies, size=size_slowly)
    controller.supervise()
    assert entered.wait(300)
    controller.supervise(wait=True)
    go_on.set()
    controller.close()
    assert set(tries) == {"large"}
    assert len(tries) == 1


def test_an_error_is_a_reason_to_wait_too(controller: Controller) -> None:
    device_id = lose_room(controller, deployment("large", 48))
    controller._dependencies.hardware.apply_layout(device_id, "SPX/NPS1")
    parts = controller._dependencies

    def refuse(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
        raise EngineUnavailable("the engine was uninstalled", hint="Install it.")

    controller._placer._dependencies = replace(parts, size=refuse)
    told: list[Event] = []
    controller.supervise(emit=told.append, wait=True)
    controller.supervise(emit=told.append, wait=True)
    assert [item.reason for item in controller.waiting()] == ["the engine was uninstalled"]
    assert [event.text for event in told] == ["the engine was uninstalled"]
    controller._placer._dependencies = parts
    controller.supervise(emit=told.append, wait=True)
    assert names_of(controller) == {"large"}
    assert EventKind.STATE in {event.kind for event in told}


def asking(wanted: Deployment, priority: Priority) -> Deployment:
    return replace(wanted, ask=replace(wanted.ask, priority=priority))
