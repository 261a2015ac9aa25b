"""A start that failed is repeated in another way, where its launcher has one, before it counts as a failure."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import FakeLauncher, Machine, boot, check_ledger, deployment

from aimgpu.control.controller import Controller
from aimgpu.domain import InstanceState, ProcessIdentity


class TwoWays(FakeLauncher):
    """Its first way gives an engine that does not get ready; `helps`: the second does."""

    def __init__(self, machine: Machine, *, helps: bool) -> None:
        super().__init__(machine)
        self.machine, self.helps = machine, helps
        self.asked: list[ProcessIdentity] = []

    def start_otherwise(self, process: ProcessIdentity) -> bool:
        self.asked.append(process)
        if self.helps:
            self.machine.behaviours["chat"] = "ready"
        return len(self.asked) == 1


@pytest.mark.parametrize("helps", [True, False])
def test_a_start_that_fails_is_tried_in_another_way_once(tmp_path: Path, *, helps: bool) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    machine.behaviours["chat"] = "dies"
    booted: Any = boot(machine)
    launcher = TwoWays(machine, helps=helps)
    controller = Controller(replace(booted._dependencies, launchers={"process": launcher}))
    (chat,) = controller.apply([deployment("chat")]).instances
    assert chat.state is (InstanceState.READY if helps else InstanceState.FAILED)
    assert len(launcher.asked) == (1 if helps else 2)
    assert len(machine.processes) == 2
    check_ledger(machine, controller)
