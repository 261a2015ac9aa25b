"""The state of a model on the page: never older than the moment of asking, and never without a reason while it waits."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import Machine, boot, deployment

from aimgpu.control.controller import Controller
from aimgpu.control.observation import MachineObserver, Observation, ObservedLedger
from aimgpu.daemon.metrics import find_without_room
from aimgpu.domain import Instance, InstanceState
from aimgpu.ledger import Retry
from aimgpu.web.model_rows import ModelRows


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = boot(Machine(root=tmp_path))
    yield controller
    controller.close()


class BusyGpus:
    """Something happens while their use is read."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.meanwhile: Callable[[], object] = lambda: None

    def read_devices(self) -> Any:
        return self._inner.read_devices()

    def read_usage(self) -> Any:
        found = self._inner.read_usage()
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return found


def states(seen: Observation, waiting: Mapping[str, str]) -> dict[str, tuple[str, str | None]]:
    rows = ModelRows(seen, scores={}, residents=(), waiting=waiting, footprints={}).describe()
    return {row["name"]: (row["state"], row["reason"]) for row in rows}


def ledger_of(controller: Controller) -> ObservedLedger:
    return ObservedLedger(instances=controller.instances, deployments=controller.deployments)


def test_a_model_that_became_ready_while_gpus_were_read_is_ready(controller: Controller) -> None:
    gpus = BusyGpus(controller._dependencies.hardware)
    observer = MachineObserver(gpus, ledger_of(controller), patience_seconds=60.0)  # type: ignore[arg-type]
    gpus.meanwhile = lambda: controller.apply([deployment("chat", 10)])
    assert states(observer.look(), {}) == {"chat": ("ready", None)}


def test_what_was_seen_a_moment_ago_does_not_hide_what_the_ledger_holds_now(controller: Controller) -> None:
    observer = MachineObserver(controller._dependencies.hardware, ledger_of(controller), patience_seconds=60.0)
    observer.look()
    controller.apply([deployment("chat", 10)])
    assert states(observer.look(max_age_seconds=3600.0), {}) == {"chat": ("ready", None)}
    controller.release(["chat"])
    assert states(observer.look(max_age_seconds=3600.0), {}) == {}


def test_instances_and_deployments_are_of_one_moment(controller: Controller) -> None:
    def start_first() -> tuple[Any, ...]:
        if not controller.deployments():
            controller.apply([deployment("chat", 10)])
        return controller.deployments()

    instances, deployments = ObservedLedger(instances=controller.instances, deployments=start_first).read()
    assert [one.deployment for one in instances] == [one.name for one in deployments] == ["chat"]


def test_a_model_that_waits_has_a_reason() -> None:
    wanted = deployment("chat", 10)
    seen = Observation(deployments=(wanted,))
    assert states(seen, {"chat": "GPU 0 has 1GiB free"}) == {"chat": ("refused", "GPU 0 has 1GiB free")}
    state, reason = states(seen, {})["chat"]
    assert state == "queued"
    assert reason is not None


def test_a_model_that_is_ready_is_not_said_to_wait(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    seen = MachineObserver(controller._dependencies.hardware, ledger_of(controller), patience_seconds=60.0).look()
    assert states(seen, {"chat": "an earlier try"})["chat"][0] == "ready"


class WaitingController:
    """Two models wait: the engine of one failed, the other has no room."""

    def __init__(self, failed: Instance) -> None:
        self._failed = failed

    def instances(self) -> tuple[Instance, ...]:
        return (self._failed,)

    def waiting(self) -> tuple[Retry, ...]:
        return (Retry(deployment="chat", reason="out of memory", failures=1), Retry(deployment="large", reason="no room"))


def test_an_engine_that_fails_waits_for_another_try_and_not_for_room(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    (instance,) = controller.instances()
    failed = replace(instance, state=InstanceState.FAILED, reason="out of memory")
    assert find_without_room(WaitingController(failed)) == ["large"]  # type: ignore[arg-type]
    seen = Observation(deployments=controller.deployments(), instances=(failed,))
    assert states(seen, {"chat": "out of memory"})["chat"] == ("failed", "out of memory")
