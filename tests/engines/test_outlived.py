"""An engine that died while no daemon looked, and whose children did not."""

import json
import os
import signal
from pathlib import Path

from tests.control.world import FakeStore, deployment, size_by_name
from tests.programs.engine import ScriptedEngine

from aimgpu import procfs
from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.domain import InstanceState
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger


def boot(home: Path) -> Controller:
    home.mkdir(exist_ok=True)
    return Controller(
        Dependencies(
            hardware=SimulatedHardware([("MI300X", 1)], home / "gpus.json"),
            ledger=Ledger.open(home / "ledger.sqlite3"),
            isolator=MechanismChooser(),
            engines={"scripted": ScriptedEngine(flags=("--children", "1"))},
            launchers={"process": ProcessLauncher(home)},
            models=FakeStore(),
            size=size_by_name,
            runs=home / "runs",
            node="here",
            timing=Timing(load_timeout_seconds=60, poll_seconds=0.02, drain_seconds=1, grace_seconds=5),
        )
    )


def test_its_children_are_stopped_and_it_is_started_again(tmp_path: Path) -> None:
    first = boot(tmp_path / "home")
    (before,) = first.apply([deployment("chat")]).instances
    (child,) = json.loads((tmp_path / "home/runs" / before.id / "children.json").read_text())
    first.close()
    assert before.process is not None
    os.kill(before.process.pid, signal.SIGKILL)  # it may be seen alive once more: then it dies while it is taken over

    second = boot(tmp_path / "home")
    second.reconcile()
    (after,) = second.instances()
    assert after.state is InstanceState.READY
    assert after.process != before.process
    left = procfs.read_process(child)
    assert left is None or left.ended
    second.release()
    assert second._dependencies.launchers["process"].find_started() == {}
    second.close()
