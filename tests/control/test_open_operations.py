"""However an operation ends, the ledger has its end; until then the controller counts as busy."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.control.faults import Faults, boot_failing
from tests.control.side_threads import in_thread, wait_for
from tests.control.test_resizing import boot_held
from tests.control.world import Machine, boot, check_ledger, deployment, memory

from aimgpu.control import apply as applier
from aimgpu.control import controller as control
from aimgpu.control.controller import Controller
from aimgpu.errors import LedgerFailed
from aimgpu.units import GIB


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_DIVERGED_SECONDS", 0.0)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


@pytest.fixture
def controller(machine: Machine) -> Iterator[Controller]:
    controller = boot(machine)
    yield controller
    controller.close()


def open_operations(controller: Controller) -> int:
    return len(controller._dependencies.ledger.operations())


def test_between_its_commit_and_its_first_step_a_restart_counts_as_under_way(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.apply([deployment("chat", 10)])
    for process in machine.processes:
        process.alive = False
    controller.supervise(wait=True)
    committed, go_on = threading.Event(), threading.Event()
    run = controller._run

    def wait_first(operation: object, emit: object) -> object:
        committed.set()
        go_on.wait(300)
        return run(operation, emit)  # type: ignore[arg-type]

    monkeypatch.setattr(controller, "_run", wait_first)
    controller.supervise()
    assert committed.wait(300)
    assert open_operations(controller) == 1
    assert controller.is_busy
    go_on.set()
    wait_for(lambda: not controller.is_busy)
    assert open_operations(controller) == 0
    check_ledger(machine, controller, names=["chat"])


def test_an_operation_whose_caller_fails_before_its_first_step_holds_up_nothing(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise LedgerFailed("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(controller._restarts, "forget", fail)
        with pytest.raises(LedgerFailed):
            controller.apply([deployment("chat", 10)])
    assert not controller.is_busy
    assert open_operations(controller) == 0
    again = in_thread(lambda: controller.apply([deployment("chat", 20)]))
    again.join(300)
    assert not again.is_alive(), "it waits for an operation that nothing carries out"
    for _ in range(3):
        controller.supervise(wait=True)
    check_ledger(machine, controller, names=["chat"])


def test_a_chain_that_ends_with_an_error_of_ours_is_closed_too(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(applier.Applier, "start", fail)
        patch.setattr(applier.Applier, "forget_preempted", fail)  # a part of undoing it
        with pytest.raises(RuntimeError):
            controller.apply([deployment("chat", 10)])
    assert not controller.is_busy
    assert open_operations(controller) == 0


def test_an_end_that_could_not_be_written_is_written_at_the_next_look(machine: Machine) -> None:
    counted = Faults()
    before = boot_failing(machine, counted)
    counted.armed = True
    before.apply([deployment("chat", 10)])
    before.release()
    before.close()
    faults = Faults(fails_at=counted.sites.index("ledger.finish"))
    controller = boot_failing(machine, faults)
    faults.armed = True
    with contextlib.suppress(LedgerFailed):
        controller.apply([deployment("chat", 10)])
    assert faults.struck
    assert open_operations(controller) == 1
    controller.supervise(wait=True)
    assert open_operations(controller) == 0
    controller.close()


def test_what_is_released_while_it_is_resized_stays_released(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, _ = boot_held(machine)
    controller.apply([deployment("chat", want=memory(10))])
    resize = applier.Applier.resize

    def release_first(*given: object) -> None:
        resize(*given)  # type: ignore[arg-type]
        releasing = in_thread(lambda: controller.release(["chat"]))
        wait_for(lambda: controller.deployments() == ())
        threads.append(releasing)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(applier.Applier, "resize", release_first)
    controller.resize("chat", 20 * GIB)
    for thread in threads:
        thread.join(300)
    assert controller.deployments() == ()
    assert controller.instances() == ()
    controller.close()
