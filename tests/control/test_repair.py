import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FAST, Machine, boot, check_ledger, deployment

from aimgpu.control.controller import Controller
from aimgpu.control.events import ignore
from aimgpu.control.instance import recorder
from aimgpu.control.plan.layout import find_layout_change
from aimgpu.control.plan.prepared import revision_of
from aimgpu.control.repairs import RepairKind, decide_repairs
from aimgpu.domain import Grant, Instance, InstanceState, Level, Priority, ProcessIdentity
from aimgpu.errors import EngineFailed, HardwareFailed, PartitionBusy, UnknownDevice, UnknownLayout
from aimgpu.units import GIB


def test_what_still_runs_is_adopted_after_a_restart(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    before = first.apply([deployment("chat"), deployment("code")]).instances
    first.close()
    second = boot(machine)
    repairs = second.reconcile()
    assert {repair.kind for repair in repairs} == {RepairKind.ADOPT}
    assert second.instances() == before
    assert len(machine.processes) == 2
    second.close()


def test_what_died_meanwhile_is_started_again(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([deployment("chat")])
    first.close()
    for process in machine.processes:
        process.alive = False
    second = boot(machine)
    second.reconcile()
    assert [instance.state for instance in second.instances()] == [InstanceState.READY]
    check_ledger(machine, second, names=["chat"])
    second.close()


class KilledError(BaseException):
    pass


def test_one_that_was_found_dead_in_the_moment_the_daemon_died_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KilledError

    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([deployment("chat")])
    machine.processes[0].alive = False
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "note_failed", die)
        with pytest.raises(KilledError):
            first.supervise()
    assert [instance.state for instance in first.instances()] == [InstanceState.READY], "both are written, or neither"
    first.close()
    second = boot(machine)
    second.reconcile()
    assert [instance.state for instance in second.instances()] == [InstanceState.READY]
    check_ledger(machine, second, names=["chat"])
    second.close()


def test_one_that_did_not_start_is_tried_by_a_new_daemon_and_one_that_failed_too_often_is_not(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, behaviours={"new": "dies"})
    timing = replace(FAST, restart_limit=0)
    first = boot(machine, timing=timing)
    first.apply([deployment("new"), deployment("often")])
    next(process for process in machine.processes if process.alive).alive = False
    first.supervise(wait=True)
    assert {instance.state for instance in first.instances()} == {InstanceState.FAILED}
    first.close()
    machine.behaviours.clear()
    second = boot(machine, timing=timing)
    second.reconcile()
    states = {instance.deployment: instance.state for instance in second.instances()}
    assert states == {"new": InstanceState.READY, "often": InstanceState.FAILED}
    second.close()


def test_a_process_that_the_books_do_not_know_is_stopped(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([deployment("chat")])
    first._dependencies.ledger.unwant("chat")
    (instance,) = first.instances()
    first._dependencies.ledger.release(instance.id)
    first.close()
    second = boot(machine)
    (repair,) = second.reconcile()
    assert repair.kind is RepairKind.STOP
    check_ledger(machine, second, names=[])
    second.close()


def test_a_corrupt_ledger_is_rebuilt_from_what_runs(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    before = first.apply([deployment("chat", 10), deployment("code", 20)])
    first.close()
    (tmp_path / "ledger.sqlite3").write_bytes(b"\0" * 100_000)
    second = boot(machine)
    second.reconcile()
    assert second._dependencies.ledger.set_aside is not None
    assert second.instances() == tuple(replace(instance, load_ms=None) for instance in before.instances)
    assert set(second.deployments()) == {deployment("chat", 10), deployment("code", 20)}
    assert len(machine.processes) == 2
    check_ledger(machine, second)
    second.close()


def test_a_layout_change_stops_what_is_there_and_brings_back_what_fits(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine)
    controller.apply([deployment("big", 150), deployment("huge", 150), deployment("small", 10)])
    device = next(d for d in controller.devices() if any(g.device_id == d.id for g in _grants_of(controller, "small")))
    change = find_layout_change(controller.snapshot(), device.id, "CPX/NPS1")
    assert len(change.stops) == 2
    assert [name.split("-")[0] for name in change.returns] == ["small"]
    assert json.dumps(change.to_json())
    controller.change_layout(device.id, "CPX")
    assert {one.id: one.layout.name for one in controller.devices()}[device.id] == "CPX/NPS1"
    states = {instance.deployment: instance.state for instance in controller.instances()}
    assert states["small"] is InstanceState.READY
    check_ledger(machine, controller)
    assert len(controller.deployments()) == 3
    controller.close()


def test_a_refused_layout_change_brings_everything_back(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine)
    controller.apply([deployment("chat", 10)])
    device = controller.devices()[0]
    held = {"devices": {}, "foreign": [{"device": device.id, "pid": 4242, "name": "stranger", "memory_bytes": 1}]}
    (tmp_path / "simulated.json").write_text(json.dumps(held))
    with pytest.raises(PartitionBusy):
        controller.change_layout(device.id, "CPX/NPS1")
    assert controller.devices()[0].layout.name == "SPX/NPS1"
    assert [instance.state for instance in controller.instances()] == [InstanceState.READY]
    assert controller._dependencies.ledger.operations() == ()
    check_ledger(machine, controller)
    controller.close()


def test_unknown_devices_and_layouts_are_named_with_the_known_ones(tmp_path: Path) -> None:
    controller = boot(Machine(root=tmp_path))
    with pytest.raises(UnknownDevice, match="there is no GPU 'gpu7'") as device_error:
        controller.change_layout("gpu7", "CPX/NPS1")
    assert "sim-mi300x-0" in (device_error.value.hint or "")
    with pytest.raises(UnknownLayout) as layout_error:
        controller.change_layout("0", "XPX")
    assert "CPX/NPS4" in (layout_error.value.hint or "")
    controller.close()


def test_memory_of_foreign_processes_is_never_given_away(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine)
    total = controller.devices()[0].memory_bytes
    strangers = [
        {"device": device.id, "pid": 4242, "name": "stranger", "memory_bytes": total - 20 * GIB, "partition": None}
        for device in controller.devices()
    ]
    (tmp_path / "simulated.json").write_text(json.dumps({"devices": {}, "foreign": strangers}))
    assert controller.apply([deployment("chat", 30)]).plan.refusals
    assert not controller.apply([deployment("chat", 10), deployment("code", 20)]).plan.refusals
    check_ledger(machine, controller, names=["chat", "code"])
    controller.close()


def _grants_of(controller: Controller, name: str) -> list[Grant]:
    return [grant for grant in controller._dependencies.ledger.grants() if grant.deployment == name]


def test_one_that_dies_while_it_is_taken_over_is_started_again(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([deployment("chat")])
    first.close()
    (process,) = machine.live().values()
    process.behaviour = "dies-when-asked"
    second = boot(machine)
    second.reconcile()
    assert [instance.state.value for instance in second.instances()] == ["ready"]
    check_ledger(machine, second, names=["chat"])
    second.close()


def folders(machine: Machine) -> set[str]:
    return {folder.name for folder in (machine.root / "runs").iterdir()}


def test_no_run_folder_outlives_its_instance_at_a_release_or_a_start(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([deployment("chat"), deployment("code")])
    left = tmp_path / "runs" / "gone-0-abc"  # by a daemon that was killed between two steps of a release
    foreign = tmp_path / "runs" / "notes"
    for folder, name in ((left, "api-key"), (foreign, "mine.txt")):
        folder.mkdir()
        (folder / name).write_text("secret")
    first.release(["code"])
    (chat,) = first.instances()
    assert folders(machine) == {chat.id, "notes"}
    first.close()
    left.mkdir()
    (left / "instance.json").write_text("{}")
    second = boot(machine)
    second.reconcile()
    assert folders(machine) == {chat.id, "notes"}
    second.release(final=True)
    assert folders(machine) == {"notes"}
    second.close()


def test_the_process_of_a_killed_daemon_has_its_owner_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([deployment("chat")])
    (chat,) = first.instances()
    first._dependencies.ledger.update(replace(chat, process=None, state=InstanceState.LOADING))  # killed before it was noted
    first.close()
    second = boot(machine)
    monkeypatch.setattr(second._lifecycle, "adopt", lambda instance, *_: instance)  # which takes as long as the model loads
    second.reconcile(wait=False)
    assert [one.process for one in second.instances()] == [machine.processes[0].identity]
    second.close()


def test_of_two_revisions_that_run_after_a_crash_the_earlier_one_is_released() -> None:
    wanted = deployment("chat")
    before, after = (
        Instance(
            id=name,
            deployment="chat",
            replica=0,
            model="10gib",
            engine="llamacpp",
            launcher="process",
            state=InstanceState.READY,
            revision=revision,
            process=ProcessIdentity(pid=pid, start_ticks=pid, boot_id="boot"),
            grants=(slot_grant(name),),
        )
        for pid, (name, revision) in enumerate([("old", "earlier"), ("new", revision_of(wanted))], 1)
    )
    alive = {one.id: one.process for one in (before, after) if one.process is not None}
    found = decide_repairs([before, after], {"chat": wanted}, alive, {"gpu/spx-0"})
    assert {repair.instance_id: repair.kind for repair in found} == {"old": RepairKind.RELEASE, "new": RepairKind.ADOPT}


def slot_grant(owner: str) -> Grant:
    return Grant(
        id=f"{owner}/0",
        instance_id=owner,
        deployment="chat",
        node="here",
        device_id="gpu",
        partition_id="gpu/spx-0",
        memory_bytes=GIB,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.NONE,
    )


def test_an_engine_that_did_not_wake_is_ended_before_its_successor_starts(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine)
    controller.apply([deployment("chat", keep_seconds=60, engine="sleeper")])
    assert controller.sleep("chat")
    machine.processes[0].behaviour = "cannot-wake"
    assert not controller.wake("chat").failed
    assert [process.alive for process in machine.processes] == [False, True]
    check_ledger(machine, controller, names=["chat"])
    controller.close()


def fail(*_: object, **__: object) -> None:
    raise HardwareFailed("the driver does not answer")


def test_what_runs_is_taken_over_and_what_was_open_is_closed_though_no_gpu_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    before = first.apply([deployment("chat"), deployment("code")]).instances
    first._dependencies.ledger.begin("apply", {})
    first.close()
    second = boot(machine)
    with monkeypatch.context() as patch:
        patch.setattr(machine.hardware, "read_devices", fail)
        repairs = second.reconcile()
    assert {repair.kind for repair in repairs} == {RepairKind.ADOPT}
    assert second.instances() == before
    assert second._dependencies.ledger.operations() == ()
    second.close()


def test_a_process_that_does_not_end_holds_up_no_other_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([deployment("chat"), deployment("code"), deployment("left")])
    first._dependencies.ledger.unwant("left")
    first.close()
    next(one for one in machine.processes if one.instance_id.startswith("chat-")).alive = False
    second = boot(machine)
    launcher = second._dependencies.launchers["process"]
    stop = launcher.stop

    def stop_others(process: ProcessIdentity, *, grace_seconds: float) -> None:
        if any(one.identity == process and one.instance_id.startswith("left-") for one in machine.processes):
            raise EngineFailed("it could not be stopped")
        stop(process, grace_seconds=grace_seconds)

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "stop", stop_others)
        second.reconcile()
    assert {one.deployment: one.state.value for one in second.instances()} == {
        "chat": "ready",
        "code": "ready",
        "left": "draining",
    }
    second.supervise(wait=True)
    assert {one.deployment for one in second.instances()} == {"chat", "code"}
    check_ledger(machine, second, names=["chat", "code"])
    second.close()


def test_one_that_was_released_while_it_was_to_be_taken_over_stays_gone(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine)
    (instance,) = controller.apply([deployment("chat")]).instances
    process = instance.process
    assert process is not None
    controller.release(["chat"])
    assert controller._lifecycle.adopt(instance, process, ignore).state is InstanceState.ABSENT
    assert controller.instances() == ()
    controller.close()


def test_a_copy_that_failed_beside_the_one_that_replaced_it_is_removed(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine)
    (ready,) = controller.apply([deployment("chat")]).instances
    stale = replace(ready, id="chat-0-stale", state=InstanceState.QUEUED, process=None, grants=())
    ledger = controller._dependencies.ledger
    ledger.charge(stale, capacity={})
    ledger.update(replace(stale, state=InstanceState.FAILED))
    controller.apply([deployment("chat")])
    assert controller.instances() == (ready,)
    controller.close()
