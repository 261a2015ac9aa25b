"""Nothing is locked while an engine loads or drains: other models, `ps` and `down` go on; replicas are replaced one by one."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.side_threads import BOUND_SECONDS, SLOW, in_thread, wait_for
from tests.control.world import Machine, boot, check_ledger, deployment, resident, status_sources

from aimgpu.control.controller import Controller
from aimgpu.control.events import Event, EventKind
from aimgpu.control.plan.steps import StepKind
from aimgpu.daemon.status import Addresses, describe_status
from aimgpu.domain import Deployment, Device, InstanceState, Priority
from aimgpu.errors import AimGpuError, EngineFailed

HERE = Addresses(version="1", pid=1, url="http://127.0.0.1:1")


def states(controller: Controller) -> dict[str, str]:
    return {instance.deployment: instance.state.value for instance in controller.instances()}


def low(item: Deployment) -> Deployment:
    return replace(item, ask=replace(item.ask, priority=Priority.LOW))


def test_fifty_models_that_hang_while_loading_hold_nothing_up(tmp_path: Path) -> None:
    names = [f"hangs{number}" for number in range(50)]
    machine = Machine(root=tmp_path, behaviours=dict.fromkeys(names, "never"))
    controller = boot(machine, timing=SLOW)
    hanging = in_thread(lambda: controller.apply([deployment(name, 1) for name in names]))
    wait_for(lambda: list(states(controller).values()).count("loading") == 50)
    controller.apply([deployment("chat", 1, keep_seconds=60)])
    assert controller.sleep("chat")
    assert not controller.wake("chat").plan.refusals
    assert len(describe_status(status_sources(controller), HERE)["instances"]) == 51
    for process in machine.live().values():
        if process.instance_id.startswith("chat"):
            process.alive = False
    assert controller.supervise() == ("chat",)
    controller.supervise(wait=True)
    assert states(controller)["chat"] == "ready"
    controller.release(["hangs7"])
    assert "hangs7" not in states(controller)
    controller.release(final=True)
    hanging.join(300)
    assert not hanging.is_alive()
    check_ledger(machine, controller, names=[])
    controller.close()


def test_everything_is_released_while_a_driver_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"hangs{number}" for number in range(50)]
    machine = Machine(root=tmp_path, behaviours=dict.fromkeys(names, "never"))
    controller = boot(machine, timing=SLOW)
    controller.apply([deployment("chat", 1)])
    loading = in_thread(lambda: controller.apply([deployment(name, 1) for name in names]))
    wait_for(lambda: list(states(controller).values()).count("loading") == 50)
    answer, asked = threading.Event(), threading.Semaphore(0)
    read = machine.hardware.read_devices

    def hang() -> tuple[Device, ...]:
        asked.release()
        answer.wait(BOUND_SECONDS)
        return read()

    monkeypatch.setattr(machine.hardware, "read_devices", hang)
    ended: list[str] = []
    others = [
        in_thread(lambda: refusal_of(lambda: controller.wake("chat"))),
        in_thread(lambda: ended.append(refusal_of(lambda: controller.apply([deployment("late", 1)])))),
    ]
    for _ in range(2):
        assert asked.acquire(timeout=BOUND_SECONDS)
    controller.release(final=True)
    assert not machine.live()
    assert controller.instances() == ()
    assert ended == [], "the driver has not answered yet"
    answer.set()
    for thread in [loading, *others]:
        thread.join(BOUND_SECONDS)
        assert not thread.is_alive()
    assert len(ended) == 1
    assert "stopping" in ended[0]
    check_ledger(machine, controller, names=[])
    controller.close()


def test_one_that_needs_what_a_smaller_copy_of_another_gives_back_waits_for_it(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    controller.apply([deployment("chat", 150)])
    result = controller.apply([deployment("chat", 100), deployment("late", 60)])
    assert {one.deployment: one.state.value for one in result.instances} == {"chat": "ready", "late": "ready"}
    check_ledger(machine, controller, names=["chat", "late"])
    controller.close()


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(AimGpuError) as caught:
        call()
    return caught.value.message


def test_a_deployment_in_two_chains_is_in_the_hands_of_its_operation_until_both_are_charged(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    busy = threading.Event()
    busy.set()
    controller = boot(machine, timing=SLOW, in_flight=lambda _: int(busy.is_set()))
    controller.apply([deployment("chat", 100)])
    changed = deployment("chat", 110, replicas=2)
    first = in_thread(lambda: controller.apply([changed]))  # one replica is new, the other waits for requests of the old one
    wait_for(lambda: sorted(one.state.value for one in controller.instances()) == ["draining", "ready"])
    again = in_thread(lambda: controller.apply([changed]))
    again.join(0.2)
    busy.clear()
    for thread in (first, again):
        thread.join(BOUND_SECONDS)
        assert not thread.is_alive()
    assert sorted((one.replica, one.state.value) for one in controller.instances()) == [(0, "ready"), (1, "ready")]
    assert len(machine.processes) == 3
    check_ledger(machine, controller, names=["chat"])
    controller.close()


def test_room_of_a_later_replacement_stays_reserved_while_an_earlier_one_is_charged(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    busy = threading.Event()
    busy.set()
    in_flight = lambda instance_id: int(busy.is_set() and instance_id.startswith("chat-2-"))  # noqa: E731
    controller = boot(machine, timing=SLOW, in_flight=in_flight)
    controller.apply([deployment("chat", 40, replicas=3)])
    changed = deployment("chat", 48, replicas=3)
    first = in_thread(lambda: controller.apply([changed]))
    wait_for(lambda: {one.replica for one in controller.instances() if one.model == "48gib"} == {0, 1})
    wait_for(lambda: [one.replica for one in controller.instances() if one.state is InstanceState.DRAINING] == [2])
    assert controller.apply([deployment("other", 52)]).plan.refusals
    busy.clear()
    first.join(BOUND_SECONDS)
    assert not first.is_alive()
    assert sorted((one.replica, one.state.value, one.model) for one in controller.instances()) == [
        (replica, "ready", "48gib") for replica in range(3)
    ]
    check_ledger(machine, controller, names=["chat"])
    controller.close()


def test_new_replicas_wait_for_the_old_one_where_they_need_its_room(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    busy = threading.Event()
    busy.set()
    controller = boot(machine, timing=SLOW, in_flight=lambda one: int(busy.is_set() and one.startswith("chat")))
    controller.apply([deployment("chat", 100), deployment("other", 20)])
    stopping = in_thread(lambda: controller.stop_instance(controller.instances()[0].id, restart=False))
    wait_for(lambda: states(controller)["chat"] == "draining")
    changing = in_thread(lambda: controller.apply([deployment("chat", 50, replicas=3)]))
    wait_for(lambda: sum(one.model == "50gib" for one in controller.instances()) == 1)  # for which there is room at once
    busy.clear()
    for thread in (stopping, changing):
        thread.join(BOUND_SECONDS)
        assert not thread.is_alive()
    assert [one.model for one in controller.instances() if one.state is InstanceState.READY] == [
        "50gib",
        "50gib",
        "50gib",
        "20gib",
    ]
    check_ledger(machine, controller, names=["chat", "other"])
    controller.close()


def test_a_drain_that_takes_long_holds_up_neither_others_nor_an_idle_model_of_the_same_change(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    busy = threading.Event()
    busy.set()
    controller = boot(machine, timing=SLOW, in_flight=lambda one: int(busy.is_set() and one.startswith("busy")))
    controller.apply([deployment("busy", 100), deployment("idle", 60)])
    # Neither fits beside its old copy, so both must end before they start again.
    changing = in_thread(lambda: controller.apply([deployment("busy", 110), deployment("idle", 70)]))
    wait_for(lambda: any(one.model == "70gib" and one.state is InstanceState.READY for one in controller.instances()))
    wait_for(lambda: [one.state.value for one in controller.instances() if one.deployment == "busy"] == ["draining"])
    controller.apply([deployment("other", 5)])
    assert states(controller)["other"] == "ready"
    assert describe_status(status_sources(controller), HERE)["instances"]
    busy.clear()
    changing.join(300)
    assert states(controller) == {"busy": "ready", "idle": "ready", "other": "ready"}
    check_ledger(machine, controller, names=["busy", "idle", "other"])
    controller.close()


def test_room_that_a_change_waits_for_is_not_given_to_others(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    busy = threading.Event()
    busy.set()
    controller = boot(machine, timing=SLOW, in_flight=lambda one: int(busy.is_set() and one.startswith("chat")))
    controller.apply([deployment("chat", 100)])
    changing = in_thread(lambda: controller.apply([deployment("chat", 170)]))
    wait_for(lambda: states(controller) == {"chat": "draining"})
    assert controller.apply([deployment("greedy", 60)]).plan.refusals, "free now, and needed in a moment"
    busy.clear()
    changing.join(300)
    assert states(controller) == {"chat": "ready"}
    check_ledger(machine, controller, names=["chat"])
    controller.close()


def test_a_changed_model_is_ready_before_the_old_one_ends_where_there_is_room(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    controller.apply([deployment("chat", 10, replicas=2)])
    ready: list[int] = []

    def watch(_event: Event) -> None:
        ready.append(sum(one.state is InstanceState.READY for one in controller.instances()))

    outcome = controller.apply([deployment("chat", 20, replicas=2)], emit=watch)
    kinds = [step.kind for step in outcome.plan.steps]
    assert kinds == [StepKind.DEPLOY, StepKind.RELEASE, StepKind.DEPLOY, StepKind.RELEASE]
    assert min(ready) >= 2, "two replicas serve at every moment"
    assert {one.model for one in controller.instances()} == {"20gib"}
    check_ledger(machine, controller, names=["chat"])
    controller.close()


def test_a_change_that_does_not_start_leaves_the_old_replicas_serving(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    before = controller.apply([deployment("chat", 10, replicas=2)]).instances
    machine.behaviours["chat"] = "dies"
    outcome = controller.apply([deployment("chat", 20, replicas=2)])
    assert len(outcome.failed) == 1
    assert set(before) <= set(controller.instances())
    machine.behaviours["chat"] = "ready"
    controller.apply([deployment("chat", 20, replicas=2)])
    assert {(one.model, one.state) for one in controller.instances()} == {("20gib", InstanceState.READY)}
    check_ledger(machine, controller, names=["chat"])
    controller.close()


def test_a_release_ends_a_change_that_is_under_way(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine, timing=SLOW)
    controller.apply([deployment("chat", 10)])
    machine.behaviours["chat"] = "never"
    changing = in_thread(lambda: controller.apply([deployment("chat", 20)]))
    wait_for(lambda: len(controller.instances()) == 2)
    controller.release(["chat"])
    changing.join(300)
    assert not changing.is_alive()
    check_ledger(machine, controller, names=[])
    controller.close()


def test_a_later_change_takes_the_place_of_one_that_hangs(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine, timing=SLOW)
    controller.apply([deployment("chat", 10)])
    machine.behaviours["chat"] = "never"
    changing = in_thread(lambda: controller.apply([deployment("chat", 20)]))
    wait_for(lambda: any(one.model == "20gib" and one.process for one in controller.instances()))
    machine.behaviours["chat"] = "ready"
    controller.apply([deployment("chat", 30)])
    changing.join(300)
    assert [(one.model, one.state) for one in controller.instances()] == [("30gib", InstanceState.READY)]
    check_ledger(machine, controller, names=["chat"])
    controller.close()


def test_a_down_that_fails_leaves_a_daemon_that_can_be_used(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    controller.apply([deployment("chat", 10)])
    launcher = controller._dependencies.launchers["process"]
    stop = launcher.stop

    def refuse(*_: object, **__: object) -> None:
        raise EngineFailed("it hangs in the kernel")

    launcher.stop = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineFailed):
        controller.release(final=True)
    launcher.stop = stop  # type: ignore[method-assign]
    controller.apply([deployment("code", 10)])
    assert states(controller)["code"] == "ready"
    controller.supervise()
    check_ledger(machine, controller, names=["code"])
    controller.close()


def prioritised(item: Deployment, priority: Priority) -> Deployment:
    return replace(item, ask=replace(item.ask, priority=priority))


def test_a_busy_model_of_low_priority_makes_way_for_a_high_one_and_never_for_an_equal_one(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine, in_flight=lambda one: int(one.startswith("low")))
    controller.apply([prioritised(deployment("low", 150, keep_seconds=60), Priority.LOW)])
    controller.apply([prioritised(deployment("equal", 150, keep_seconds=60), Priority.LOW)])
    controller.apply([prioritised(deployment("high", 150, keep_seconds=60), Priority.HIGH)])
    busy = [resident("low", priority=Priority.LOW, in_flight=1)]
    assert controller.wake("equal", busy).plan.refusals
    assert not controller.wake("high", busy).plan.refusals
    assert states(controller) == {"low": "sleeping", "equal": "sleeping", "high": "ready"}
    check_ledger(machine, controller)
    controller.close()


@pytest.mark.parametrize("engine", [None, "sleeper"])
def test_room_that_fits_an_earlier_wake_is_left_to_it(tmp_path: Path, engine: str | None) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    models = [deployment(name, 40, keep_seconds=60, engine=engine) for name in ("first", "second")]
    controller.apply([deployment("fixed", 151), *models])
    controller.sleep("first")
    controller.apply([deployment("filler", 35)])
    for name in ("first", "second"):
        controller.sleep(name)
    assert controller.wake("first").plan.refusals
    controller.release(["filler"])
    assert controller.wake("second").plan.refusals, "it asked later"
    assert not controller.wake("first").plan.refusals
    assert states(controller)["first"] == "ready"
    controller.close()


def test_as_many_replicas_wake_as_fit_and_the_rest_when_there_is_room(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine)
    controller.apply([deployment("pair", 80, replicas=2, keep_seconds=60)])
    controller.sleep("pair")
    controller.apply([deployment("other", 80)])
    controller.wake("pair")
    assert sorted(one.state.value for one in controller.instances() if one.deployment == "pair") == ["ready", "sleeping"]
    controller.release(["other"])
    controller.supervise(wait=True)
    assert [one.state.value for one in controller.instances()] == ["ready", "ready"]
    check_ledger(machine, controller, names=["pair"])
    controller.close()


def test_a_layout_is_not_changed_for_one_while_another_waits_for_room_on_it(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    busy = threading.Event()
    timing = replace(SLOW, least_residency_seconds=0.0)
    controller = boot(machine, timing=timing, in_flight=lambda one: int(busy.is_set() and one.startswith("chat")))
    controller.change_layout("0", "CPX/NPS1")
    names = [f"m{number}" for number in range(7)]
    controller.apply([low(deployment(name, 20, keep_seconds=60)) for name in ("sleepy", *names)])
    assert controller.sleep("sleepy")
    controller.apply([low(deployment("chat", 20, keep_seconds=60))])
    busy.set()
    # It takes the partition of the other, which has requests in flight and still holds all of it.
    waking = in_thread(lambda: controller.wake("sleepy", [resident("chat", priority=Priority.LOW)]))
    wait_for(lambda: states(controller)["chat"] == "draining")
    planned = threading.Event()

    def follow(event: Event) -> None:
        if event.kind is EventKind.PLAN:
            planned.set()

    urgent = replace(deployment("urgent", 150), ask=replace(deployment("urgent").ask, priority=Priority.HIGH))
    making_room = in_thread(lambda: controller.apply([urgent], make_room=True, emit=follow))
    assert not planned.wait(1.0)
    assert {states(controller)[name] for name in names} == {"ready"}
    busy.clear()
    waking.join(300)
    making_room.join(300)
    assert planned.is_set()
    assert states(controller)["urgent"] == "ready"
    check_ledger(machine, controller)
    controller.close()


def test_a_replica_that_slept_for_want_of_room_wakes_also_while_something_else_loads(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    controller = boot(machine, timing=SLOW)
    controller.apply([deployment("pair", 80, replicas=2, keep_seconds=60)])
    controller.sleep("pair")
    controller.apply([deployment("other", 80)])
    controller.wake("pair")
    assert sorted(one.state.value for one in controller.instances()) == ["ready", "ready", "sleeping"]
    controller.release(["other"])
    machine.behaviours["hangs"] = "never"
    loading = in_thread(lambda: controller.apply([deployment("hangs", 1)]))
    wait_for(lambda: states(controller).get("hangs") == "loading")
    controller.supervise(wait=True)
    assert [one.state.value for one in controller.instances() if one.deployment == "pair"] == ["ready", "ready"]
    controller.release(["hangs"])
    loading.join(BOUND_SECONDS)
    check_ledger(machine, controller, names=["pair"])
    controller.close()
