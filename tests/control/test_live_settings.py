"""What can change while a model runs: its promises and how it shares its GPU."""

from dataclasses import replace
from pathlib import Path

from tests.control.world import Machine, boot, deployment

from aimgpu.domain import ServiceObjective, Sharing


def test_sharing_and_promises_change_without_a_restart(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    chat = deployment("chat")
    (before,) = controller.apply([chat]).instances
    changed = replace(chat, sharing=Sharing.PROMISE, objective=ServiceObjective(tpot_p95_ms=2.75))
    (after,) = controller.apply([changed]).instances
    assert (after.id, after.process) == (before.id, before.process)
    (wanted,) = controller.deployments()
    assert wanted == changed
