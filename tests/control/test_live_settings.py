"""What can change while a model runs: its promises, how it shares its GPU, its priority and how long it stays."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.side_threads import BOUND_SECONDS, SLOW, in_thread, wait_for
from tests.control.world import Machine, boot, deployment

from aimgpu.control.waiting import find_diverged
from aimgpu.domain import Deployment, InstanceState, Priority, ServiceObjective, Sharing
from aimgpu.errors import Conflict, UnknownDeployment


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


def test_names_change_without_a_restart_and_belong_to_one_model(tmp_path: Path) -> None:
    controller = boot(Machine(root=tmp_path, gpus=1))
    chat, batch = deployment("chat"), deployment("batch")
    (before,) = controller.apply([chat]).instances
    named = replace(chat, aliases=("gpt-4o-mini",), default=True)
    (after,) = controller.apply([named]).instances
    assert (after.id, after.process) == (before.id, before.process)
    assert controller.deployments() == (named,)
    for clashing in (replace(batch, aliases=("gpt-4o-mini",)), replace(batch, default=True), replace(batch, aliases=("chat",))):
        with pytest.raises(Conflict, match="'chat' and 'batch'"):
            controller.apply([clashing], dry_run=True)
        with pytest.raises(Conflict, match="'chat' and 'batch'"):
            controller.apply([clashing])
    assert controller.deployments() == (named,)
    controller.apply([replace(batch, aliases=("gpt-4o-mini",))], prune=True)
    assert [one.name for one in controller.deployments()] == ["batch"]


def pinned(item: Deployment) -> Deployment:
    return replace(item, keep_seconds=None)


def urgent(item: Deployment) -> Deployment:
    return replace(item, ask=replace(item.ask, priority=Priority.HIGH))


def test_another_priority_is_that_of_the_grants_too(tmp_path: Path) -> None:
    controller = boot(Machine(root=tmp_path))
    (before,) = controller.apply([deployment("chat")]).instances
    controller.amend("chat", urgent)
    (after,) = controller.instances()
    assert [grant.priority for grant in after.grants] == [Priority.HIGH]
    assert after.process == before.process
    assert not find_diverged(controller.deployments(), controller.instances())


def test_a_model_whose_settings_change_while_it_loads_is_not_started_again(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, behaviours={"chat": "never"})
    controller = boot(machine, timing=SLOW)
    applying = in_thread(lambda: controller.apply([deployment("chat", keep_seconds=60)]))
    wait_for(lambda: bool(machine.live()))
    controller.amend("chat", pinned)
    for process in machine.processes:
        process.behaviour = "ready"
    applying.join(BOUND_SECONDS)
    (instance,) = controller.instances()
    assert instance.state is InstanceState.READY
    assert not find_diverged(controller.deployments(), controller.instances())


def test_settings_that_change_while_room_is_made_reach_the_instance_that_follows(tmp_path: Path) -> None:
    busy = threading.Event()
    busy.set()
    controller = boot(Machine(root=tmp_path, gpus=1), timing=SLOW, in_flight=lambda _: int(busy.is_set()))
    controller.apply([deployment("chat", 100)])
    applying = in_thread(lambda: controller.apply([deployment("chat", 110)]))  # not beside its old copy
    wait_for(lambda: [one.state for one in controller.instances()] == [InstanceState.DRAINING])
    controller.amend("chat", urgent)
    busy.clear()
    applying.join(BOUND_SECONDS)
    (instance,) = controller.instances()
    assert (instance.model, instance.state) == ("110gib", InstanceState.READY)
    assert [grant.priority for grant in instance.grants] == [Priority.HIGH]
    assert not find_diverged(controller.deployments(), controller.instances())


def test_a_copy_of_an_earlier_revision_stays_one_when_settings_change(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine, timing=SLOW)
    (old,) = controller.apply([deployment("chat", 10)]).instances
    machine.behaviours["chat"] = "never"
    applying = in_thread(lambda: controller.apply([deployment("chat", 20)]))
    wait_for(lambda: len(machine.live()) == 2)
    controller.amend("chat", urgent)
    revisions = {one.model: one.revision for one in controller.instances()}
    assert revisions["10gib"] == old.revision
    assert revisions["20gib"] != old.revision
    controller.release(final=True)
    applying.join(BOUND_SECONDS)


def test_a_change_of_a_model_that_was_released_meanwhile_does_not_bring_it_back(tmp_path: Path) -> None:
    controller = boot(Machine(root=tmp_path))
    controller.apply([deployment("chat")])

    def release_first(item: Deployment) -> Deployment:
        controller._dependencies.ledger.unwant("chat")
        return urgent(item)

    with pytest.raises(Conflict, match="released meanwhile"):
        controller.amend("chat", release_first)
    assert controller.deployments() == ()
    with pytest.raises(UnknownDeployment):
        controller.amend("chat", urgent)
