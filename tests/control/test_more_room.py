"""An engine that dies at its memory limit while it starts is started again with what its log says it missed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import FakeEngine, Machine, boot, check_ledger, deployment, memory

from aimgpu.control.controller import Controller
from aimgpu.control.events import Event, EventKind
from aimgpu.domain import Footprint, Instance, InstanceState
from aimgpu.engines.protocols import Command, LaunchRequest
from aimgpu.home import failed_log
from aimgpu.units import GIB, MIB


class HungryEngine(FakeEngine):
    """Needs more than its Footprint says, and says how much more when it dies."""

    def __init__(self, machine: Machine, needed_bytes: int) -> None:
        super().__init__(machine)
        self.needed_bytes = needed_bytes
        self.granted: list[int] = []

    def command(self, request: LaunchRequest) -> Command:
        (grant,) = request.instance.grants
        self.granted.append(grant.memory_bytes)
        dies = grant.memory_bytes < self.needed_bytes
        self._machine.behaviours[request.instance.deployment] = "dies" if dies else "ready"
        return super().command(request)

    def missing_bytes(self, last_lines: tuple[str, ...]) -> int | None:
        assert last_lines
        return max(self.needed_bytes - self.granted[-1], 1)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


def hungry(machine: Machine, needed_bytes: int) -> tuple[Controller, HungryEngine, list[int]]:
    engine = HungryEngine(machine, needed_bytes)
    noted: list[int] = []
    controller = boot(machine)

    def note(_instance: Instance, _footprint: Footprint, missing_bytes: int) -> None:
        noted.append(missing_bytes)

    parts = replace(controller._dependencies, engines={"llamacpp": engine}, note_shortfall=note)
    controller.close()
    again: Any = boot(machine)
    made = Controller(replace(parts, ledger=again._dependencies.ledger))
    return made, engine, noted


@pytest.fixture
def events() -> list[Event]:
    return []


def test_what_was_sized_by_us_grows_by_what_it_missed(machine: Machine, events: list[Event]) -> None:
    controller, engine, noted = hungry(machine, 10 * GIB + 40 * MIB)
    outcome = controller.apply([deployment("chat", 10)], emit=events.append)
    (chat,) = outcome.instances
    assert chat.state is InstanceState.READY
    assert engine.granted[0] == 10 * GIB
    assert len(engine.granted) == 2
    assert 10 * GIB + 40 * MIB <= chat.grants[0].memory_bytes <= 10 * GIB + 256 * MIB
    assert noted == [40 * MIB]
    assert any("missed 40MiB" in event.text for event in events if event.kind is EventKind.STEP)
    check_ledger(machine, controller)


def test_room_that_another_operation_is_about_to_use_is_not_taken(machine: Machine) -> None:
    controller, engine, _ = hungry(machine, 10 * GIB + 40 * MIB)
    (partition,) = controller.devices()[0].layout.partitions
    command = engine.command

    def reserve_first(request: LaunchRequest) -> Command:
        (grant,) = request.instance.grants
        rest = replace(grant, id="other/0", instance_id="other", memory_bytes=partition.memory_bytes - 10 * GIB)
        controller._loop.decide(lambda: controller._reservations.reserve((99, 0), [rest]))
        return command(request)

    engine.command = reserve_first  # type: ignore[method-assign]
    (chat,) = controller.apply([deployment("chat", 10)]).instances
    assert chat.state is InstanceState.FAILED
    assert "the GPU has no" in str(chat.reason)
    assert set(engine.granted) == {10 * GIB}


def test_a_share_that_the_user_chose_is_not_enlarged(machine: Machine) -> None:
    controller, engine, _ = hungry(machine, 12 * GIB)
    (chat,) = controller.apply([deployment("chat", 10, want=memory(11))]).instances
    assert chat.state is InstanceState.FAILED
    assert set(engine.granted) == {11 * GIB}
    assert "11GiB were asked for" in str(chat.reason)
    check_ledger(machine, controller)


def test_where_the_gpu_has_no_more_it_fails_and_keeps_its_log(machine: Machine) -> None:
    controller, _, _ = hungry(machine, 500 * GIB)
    (chat,) = controller.apply([deployment("chat", 100)]).instances
    assert chat.state is InstanceState.FAILED
    assert "the GPU has no" in str(chat.reason)
    assert failed_log(machine.root, "chat").read_text() == "the last line\n"
    controller.release(["chat"])
    assert failed_log(machine.root, "chat").exists(), "it is there after the model was released"
    check_ledger(machine, controller)
