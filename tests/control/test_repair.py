import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FAST, Machine, boot, check_ledger, deployment

from aimgpu.control.controller import Controller
from aimgpu.control.planning.layout_plan import find_layout_change
from aimgpu.control.reconcile import RepairKind
from aimgpu.control.restarts import Restarts
from aimgpu.domain import Grant, InstanceState
from aimgpu.errors import PartitionBusy, UnknownDevice, UnknownLayout
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
    def die(*_: object) -> None:
        raise KilledError

    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([deployment("chat")])
    machine.processes[0].alive = False
    with monkeypatch.context() as patch:
        patch.setattr(Restarts, "note_failure", die)
        with pytest.raises(KilledError):
            first.supervise()
    assert [instance.state for instance in first.instances()] == [InstanceState.FAILED]
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
    with pytest.raises(UnknownDevice, match="no device 'gpu7'") as device_error:
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
