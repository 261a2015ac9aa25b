"""An engine that cannot be stopped, as when Docker does not answer: reported at every look, ended when it can be."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.control.faults import Faults, boot_failing
from tests.control.world import Machine, check_ledger, deployment

from aimgpu.control import controller as control
from aimgpu.control.controller import Controller
from aimgpu.domain import ProcessIdentity
from aimgpu.engines.protocols import Launcher
from aimgpu.errors import EngineFailed


class Stubborn:
    """A launcher whose stops fail until it is told otherwise."""

    def __init__(self, launcher: Launcher) -> None:
        self._stop = launcher.stop
        self.refuses = True

    def stop(self, process: ProcessIdentity, *, grace_seconds: float) -> None:
        if self.refuses:
            raise EngineFailed("Docker does not answer")
        self._stop(process, grace_seconds=grace_seconds)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


@pytest.fixture
def controller(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(control, "_DIVERGED_SECONDS", 0.0)
    controller = boot_failing(machine, Faults())
    yield controller
    controller.close()


def states(controller: Controller) -> dict[str, str]:
    return {one.deployment: one.state.value for one in controller.instances()}


def test_what_cannot_be_stopped_stays_charged_is_reported_and_ends_when_it_can(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.apply([deployment("chat", 10), deployment("code", 20)])
    launcher = controller._dependencies.launchers["process"]
    stubborn = Stubborn(launcher)
    monkeypatch.setattr(launcher, "stop", stubborn.stop)
    (chat,) = [one for one in controller.instances() if one.deployment == "chat"]
    with pytest.raises(EngineFailed, match="Docker does not answer"):
        controller.stop_instance(chat.id, restart=True)
    said: list[str] = []
    for _ in range(3):
        controller.supervise(emit=lambda event: said.append(event.text), wait=True)
    assert states(controller) == {"chat": "draining", "code": "ready"}
    assert f"{chat.id} could not be stopped: Docker does not answer" in said
    check_ledger(machine, controller)  # it runs, so it is charged
    assert controller.apply([deployment("late", 5)]).instances, "others are served meanwhile"
    stubborn.refuses = False
    for _ in range(4):
        controller.supervise(wait=True)
    assert states(controller) == {"chat": "ready", "code": "ready", "late": "ready"}
    assert chat.id not in {one.id for one in controller.instances()}
    check_ledger(machine, controller, names=["chat", "code", "late"])
