"""Whatever a replica dies in the middle of, it is started again: that it failed and when it is tried next is one write."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.side_threads import BOUND_SECONDS, in_thread, wait_for
from tests.control.test_resizing import boot_held
from tests.control.world import FAST, FakeProcess, FakeStore, Machine, boot, check_ledger, deployment, memory

from aimgpu.control import apply as applier
from aimgpu.control import controller as control
from aimgpu.control.controller import Controller
from aimgpu.control.events import ignore
from aimgpu.domain import InstanceState, ProcessIdentity, Whole
from aimgpu.engines.protocols import LocalModel, Progress
from aimgpu.errors import AimGpuError, Conflict, EngineFailed, RegionUnusable, UnknownDeployment
from aimgpu.units import GIB

ROUNDS = 8  # of supervision


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_DIVERGED_SECONDS", 0.0)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


@pytest.fixture
def controller(machine: Machine) -> Iterator[Controller]:
    controller = boot(machine, timing=replace(FAST, load_timeout_seconds=BOUND_SECONDS))
    yield controller
    controller.close()


def heal(controller: Controller) -> dict[tuple[str, int], str]:
    """What runs after some rounds of supervision."""
    for _ in range(ROUNDS):
        controller.supervise(wait=True)
    return states(controller)


def states(controller: Controller) -> dict[tuple[str, int], str]:
    return {(one.deployment, one.replica): one.state.value for one in controller.instances()}


def processes_of(machine: Machine, name: str) -> list[FakeProcess]:
    return [process for process in machine.processes if process.instance_id.startswith(f"{name}-") and process.alive]


def test_a_bystander_that_was_moved_for_another_and_did_not_start_again_is_tried_again(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine)
    controller.apply([deployment("a", 100), deployment("b", 100)])
    controller.apply([deployment("small", 20)])
    controller.release(["a"])
    controller.apply([deployment("c", 20)])
    machine.behaviours |= dict.fromkeys(("b", "small", "c"), "dies")
    controller.apply([deployment("whole", 150, want=Whole())], make_room=True)
    assert "failed" in states(controller).values(), "one was moved"
    machine.behaviours.clear()
    assert set(heal(controller).values()) == {"ready"}
    check_ledger(machine, controller)
    controller.close()


def test_a_restart_that_finds_another_operation_starting_it_takes_no_death_away(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.apply([deployment("chat")])
    preparing, go_on = threading.Event(), threading.Event()
    fetch = FakeStore.fetch

    def slow_fetch(self: FakeStore, model: str, progress: Progress) -> LocalModel:
        if model == "20gib":
            preparing.set()
            assert go_on.wait(BOUND_SECONDS)
        return fetch(self, model, progress)

    monkeypatch.setattr(FakeStore, "fetch", slow_fetch)
    machine.behaviours["chat"] = "never"
    applying = in_thread(lambda: controller.apply([deployment("chat"), deployment("code", 20)]))
    assert preparing.wait(BOUND_SECONDS)
    machine.processes[0].alive = False
    assert controller.supervise() == ("chat",)
    go_on.set()
    wait_for(lambda: bool(processes_of(machine, "chat")))
    controller._restarts.retry_due(ignore, wait=True)
    for process in processes_of(machine, "chat"):
        process.alive = False
    applying.join(BOUND_SECONDS)
    machine.behaviours.clear()
    assert heal(controller) == {("chat", 0): "ready", ("code", 0): "ready"}
    check_ledger(machine, controller, names=["chat", "code"])


def test_a_replica_is_tried_again_though_the_operation_that_started_it_failed_elsewhere(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.apply([deployment("chat"), deployment("other", 100)])
    processes_of(machine, "chat")[0].alive = False
    machine.behaviours["chat"] = "dies"
    assert controller.supervise() == ("chat",)
    launcher = controller._dependencies.launchers["process"]

    def hang(process: ProcessIdentity, *, grace_seconds: float) -> None:
        if any(one.identity == process for one in processes_of(machine, "other")):
            raise EngineFailed(f"it runs on after {grace_seconds} s")

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "stop", hang)
        with pytest.raises(EngineFailed):
            controller.apply([deployment("chat"), deployment("other", 120)])
    machine.behaviours.clear()
    assert heal(controller) == {("chat", 0): "ready", ("other", 0): "ready"}


def test_an_adopted_replica_that_dies_while_its_sibling_is_restarted_is_tried_again(machine: Machine) -> None:
    first = boot(machine)
    first.apply([deployment("chat", replicas=2)])
    first.close()
    machine.processes[0].alive = False
    machine.processes[1].behaviour = machine.behaviours["chat"] = "never"
    second = boot(machine, timing=replace(FAST, load_timeout_seconds=BOUND_SECONDS))
    second.reconcile(wait=False)
    wait_for(lambda: len(processes_of(machine, "chat")) == 2)
    machine.processes[1].alive = False
    wait_for(lambda: "failed" in states(second).values())
    machine.behaviours.clear()
    machine.processes[-1].behaviour = "ready"
    wait_for(lambda: "ready" in states(second).values())
    wait_for(lambda: not second._restarts.busy)
    assert heal(second) == {("chat", 0): "ready", ("chat", 1): "ready"}
    check_ledger(machine, second, names=["chat"])
    second.close()


def test_deaths_are_recorded_though_another_check_of_the_round_raises(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.apply([deployment("chat"), deployment("code", 20)])
    for process in machine.processes:
        process.alive = False
    find = controller._lifecycle._find_trouble

    def fail_for_code(instance: object) -> str | None:
        if getattr(instance, "deployment", None) == "code":
            raise RuntimeError("a fault of ours")
        return find(instance)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(controller._lifecycle, "_find_trouble", fail_for_code)
        with pytest.raises(RuntimeError):
            controller.supervise()
    assert heal(controller) == {("chat", 0): "ready", ("code", 0): "ready"}


@pytest.mark.parametrize("wait", [True, False])
def test_a_restart_for_which_no_thread_can_be_started_is_made_later(
    machine: Machine, controller: Controller, monkeypatch: pytest.MonkeyPatch, *, wait: bool
) -> None:
    controller.apply([deployment("chat"), deployment("code", 20)])
    for process in machine.processes:
        process.alive = False
    controller.supervise()

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", NoThread)
        controller.supervise(wait=wait)
    assert heal(controller) == {("chat", 0): "ready", ("code", 0): "ready"}
    check_ledger(machine, controller, names=["chat", "code"])


def test_one_that_failed_without_a_record_of_it_is_placed_again(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat")])
    machine.processes[0].alive = False
    controller.supervise()
    controller._dependencies.ledger.forget_retries("chat")
    assert heal(controller) == {("chat", 0): "ready"}


def test_a_release_that_fails_during_stop_lets_nothing_in(machine: Machine) -> None:
    busy = threading.Event()
    busy.set()
    controller = boot(machine, timing=replace(FAST, drain_seconds=1e9), in_flight=lambda _: int(busy.is_set()))
    controller.apply([deployment("chat")])
    stopping = in_thread(lambda: controller.release(final=True))
    wait_for(lambda: [one.state for one in controller.instances()] == [InstanceState.DRAINING])
    with pytest.raises(UnknownDeployment):
        controller.release(["nobody"])
    with pytest.raises(UnknownDeployment):
        controller.release(["nobody"], final=True)
    with pytest.raises(Conflict, match="stopping"):
        controller.apply([deployment("late")])
    busy.clear()
    stopping.join(BOUND_SECONDS)
    assert controller.instances() == ()
    assert not machine.live()
    controller.close()


def test_a_resize_that_fails_is_undone_also_where_its_chain_runs_in_a_thread(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, interposer = boot_held(machine)
    controller.apply([deployment("chat", want=memory(10))])

    def fail(*_: object) -> None:
        raise RegionUnusable("scribbled on")

    def in_threads(calls: list[Callable[[], object]], *_: object) -> list[object]:
        found: list[object] = [None] * len(calls)

        def run(index: int) -> None:
            found[index] = calls[index]()

        started = [in_thread(lambda index=index: run(index)) for index in range(len(calls))]  # type: ignore[misc]
        for thread in started:
            thread.join()
        return found

    monkeypatch.setattr(interposer, "resize", fail)
    monkeypatch.setattr(applier, "side_by_side", in_threads)
    raised: list[str] = []

    def resize() -> None:
        try:
            controller.resize("chat", 12 * GIB)
        except AimGpuError as error:
            raised.append(type(error).__name__)

    in_thread(resize).join(BOUND_SECONDS)
    assert raised == ["RegionUnusable"]
    assert [grant.memory_bytes for grant in controller._dependencies.ledger.grants()] == [10 * GIB]
    controller.close()
