import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import FAST, Machine, boot, check_ledger, deployment, memory

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Timing
from aimgpu.control.events import Event, EventKind
from aimgpu.control.plan.steps import StepKind
from aimgpu.domain import InstanceState, IsolationRequirement, Level, PartitionKind, ServiceObjective, Whole
from aimgpu.errors import Conflict, EngineUnavailable, InvalidInput, LedgerFull, UnknownDeployment
from aimgpu.units import GIB, MIB


def test_a_stack_is_deployed_ready_and_charged(machine: Machine, controller: Controller) -> None:
    outcome = controller.apply([deployment("chat", 10), deployment("code", 20)])
    assert [instance.state for instance in outcome.instances] == [InstanceState.READY] * 2
    assert sum(grant.memory_bytes for grant in controller._dependencies.ledger.grants()) == 30 * GIB
    assert {grant.level for grant in controller._dependencies.ledger.grants()} == {Level.NONE}
    check_ledger(machine, controller, names=["chat", "code"])


def test_applying_twice_changes_nothing(machine: Machine, controller: Controller) -> None:
    stack = [deployment("chat"), deployment("code")]
    first = controller.apply(stack)
    second = controller.apply(stack)
    assert second.plan.steps == ()
    assert second.plan.unchanged == ("chat", "code")
    assert second.instances == first.instances
    assert len(machine.processes) == 2


def test_a_dry_run_shows_the_plan_and_does_nothing(machine: Machine, controller: Controller) -> None:
    outcome = controller.apply([deployment("chat")], dry_run=True)
    assert [step.deployment for step in outcome.plan.steps] == ["chat"]
    assert machine.processes == []
    assert controller.deployments() == ()
    assert controller._dependencies.ledger.grants() == ()


def test_what_does_not_fit_is_refused_with_a_reason_for_every_device_and_nothing_starts(
    machine: Machine, controller: Controller
) -> None:
    outcome = controller.apply([deployment("small", 1), deployment("huge", 500)])
    (refusal,) = outcome.plan.refusals
    assert {reason.device_id for reason in refusal.reasons} == {device.id for device in controller.devices()}
    assert all(reason.text for reason in refusal.reasons)
    assert refusal.would_fit
    assert machine.processes == []
    assert controller.deployments() == ()
    check_ledger(machine, controller, names=[])


def test_another_promise_stops_nothing(controller: Controller) -> None:
    before = controller.apply([deployment("chat", 10)])
    promised = replace(deployment("chat", 10), objective=ServiceObjective(ttft_p99_ms=500))
    after = controller.apply([promised])
    assert after.plan.steps == ()
    assert [one.id for one in after.instances] == [one.id for one in before.instances]
    assert controller.deployments() == (promised,)


def test_a_changed_deployment_is_replaced_and_the_old_charge_is_given_back(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    controller.apply([deployment("chat", 150)])
    (grant,) = controller._dependencies.ledger.grants()
    assert grant.memory_bytes == 150 * GIB
    assert len(machine.live()) == 1
    check_ledger(machine, controller, names=["chat"])


def test_a_change_that_does_not_fit_leaves_the_old_one_running(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    before = controller.instances()
    assert controller.apply([deployment("chat", 500)]).plan.refusals
    assert controller.instances() == before
    assert controller.deployments() == (deployment("chat", 10),)


def test_more_replicas_leave_the_running_ones_alone(machine: Machine, controller: Controller) -> None:
    (first,) = controller.apply([deployment("chat", 10)]).instances
    both = controller.apply([deployment("chat", 10, replicas=2)]).instances
    assert first in both
    assert {instance.replica for instance in both} == {0, 1}
    controller.apply([deployment("chat", 10)])
    assert controller.instances() == (first,)


def test_release_stops_frees_and_forgets(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat"), deployment("code")])
    controller.release(["chat"])
    assert [instance.deployment for instance in controller.instances()] == ["code"]
    check_ledger(machine, controller, names=["code"])
    assert not list((machine.root / "runs").glob("chat*"))


def test_releasing_what_is_not_there_names_what_is(controller: Controller) -> None:
    controller.apply([deployment("chat")])
    with pytest.raises(UnknownDeployment) as caught:
        controller.release(["chet"])
    assert "chat" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("never", "not ready after"),
        ("dies", "ended before it was ready"),
        ("broken", "out of memory"),
        ("no-space", "No space left"),
    ],
)
def test_an_engine_that_does_not_come_up_fails_clearly_and_frees_its_grant(
    machine: Machine, controller: Controller, behaviour: str, expected: str
) -> None:
    machine.behaviours["chat"] = behaviour
    outcome = controller.apply([deployment("chat"), deployment("code")])
    (failed,) = outcome.failed
    assert failed.deployment == "chat"
    assert expected in (failed.reason or "")
    assert failed.last_lines == ("the last line",)
    check_ledger(machine, controller)


def test_the_time_that_a_mute_engine_takes_to_be_asked_counts(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, behaviours={"chat": "mute"})
    controller = boot(machine, timing=replace(FAST, load_timeout_seconds=1.0, poll_seconds=0.001))
    (failed,) = controller.apply([deployment("chat")]).failed
    assert "not ready after" in (failed.reason or "")
    assert machine.questions <= 20
    controller.close()


def test_a_failed_deployment_is_tried_again_when_applied_again(machine: Machine, controller: Controller) -> None:
    machine.behaviours["chat"] = "dies"
    controller.apply([deployment("chat")])
    machine.behaviours["chat"] = "ready"
    outcome = controller.apply([deployment("chat")])
    assert [instance.state for instance in outcome.instances] == [InstanceState.READY]


def test_release_while_loading_gives_up_the_start(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, behaviours={"chat": "never"})
    controller = boot(machine, timing=replace(FAST, load_timeout_seconds=1e9))
    loading = threading.Event()

    def watch(event: Event) -> None:
        if event.data.get("percent"):
            loading.set()

    applying = threading.Thread(target=controller.apply, args=([deployment("chat")],), kwargs={"emit": watch})
    applying.start()
    assert loading.wait(300)
    controller.release(["chat"])
    applying.join(300)
    assert not applying.is_alive()
    check_ledger(machine, controller, names=[])
    controller.close()


def test_draining_waits_for_requests_and_then_a_bound(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    asked = []

    def in_flight(instance_id: str) -> int:
        asked.append(instance_id)
        return 1 if len(asked) < 4 else 0

    controller = boot(machine, timing=Timing(poll_seconds=0.001, drain_seconds=60), in_flight=in_flight)
    controller.apply([deployment("chat")])
    controller.release(["chat"])
    assert len(asked) == 4
    controller.close()


def test_an_engine_that_dies_in_use_is_noticed_and_frees_its_grant(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat"), deployment("code")])
    assert controller.supervise() == ()
    (name,) = [name for name in machine.live() if name.startswith("chat")]
    machine.live()[name].alive = False
    assert controller.supervise() == ("chat",)
    (failed,) = [instance for instance in controller.instances() if instance.deployment == "chat"]
    assert failed.state is InstanceState.FAILED
    assert "in use" in (failed.reason or "")
    check_ledger(machine, controller)
    controller.supervise(wait=True)
    check_ledger(machine, controller, names=["chat", "code"])
    assert len(machine.live()) == 2


def test_two_deployments_of_one_name_are_refused(controller: Controller) -> None:
    with pytest.raises(Conflict):
        controller.apply([deployment("chat"), deployment("chat")])


def test_a_demanded_level_that_cannot_be_had_is_a_refusal(controller: Controller) -> None:
    item = deployment("chat")
    outcome = controller.apply([replace(item, ask=replace(item.ask, isolation=IsolationRequirement.ENFORCED))])
    (refusal,) = outcome.plan.refusals
    assert {reason.code for reason in refusal.reasons} == {"isolation"}


def test_an_unknown_engine_or_launcher_is_refused_with_the_known_ones(controller: Controller) -> None:
    with pytest.raises(InvalidInput, match="unknown engine"):
        controller.apply([replace(deployment("chat"), engine="vlm")])
    with pytest.raises(InvalidInput, match="no launcher"):
        controller.apply([replace(deployment("chat"), launcher="podman")])


def test_no_engine_that_can_run_is_an_error_that_says_why(machine: Machine) -> None:
    controller = boot(machine)
    engine: Any = controller._dependencies.engines["llamacpp"]
    engine.runs_without_gpu = False
    with pytest.raises(EngineUnavailable) as caught:
        controller.apply([deployment("chat")])
    assert "simulated" in (caught.value.hint or "")
    controller.close()


def test_memory_asked_for_is_what_is_charged(controller: Controller) -> None:
    controller.apply([deployment("chat", 10, want=memory(24))])
    assert [grant.memory_bytes for grant in controller._dependencies.ledger.grants()] == [24 * GIB]


def test_eight_threads_applying_the_same_stack_charge_it_once(machine: Machine, controller: Controller) -> None:
    stack = [deployment("chat", 10), deployment("code", 20)]
    threads = [threading.Thread(target=controller.apply, args=(stack,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(grant.memory_bytes for grant in controller._dependencies.ledger.grants()) == 30 * GIB
    check_ledger(machine, controller, names=["chat", "code"])


def test_the_plan_and_every_state_are_told(controller: Controller) -> None:
    events: list[Event] = []
    controller.apply([deployment("chat")], emit=events.append)
    kinds = [event.kind for event in events]
    assert kinds[:2] == [EventKind.PROGRESS, EventKind.PLAN]
    assert [event.data["state"] for event in events if event.kind is EventKind.STATE][-1] == "ready"
    assert all(event.to_json()["event"] == event.kind.value for event in events)


def test_a_whole_device_and_a_partition_kind_can_be_asked_for(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("whole", 10, want=Whole()), deployment("spx", 10, want=PartitionKind(kind="spx"))])
    assert {grant.device_id for grant in controller._dependencies.ledger.grants()} == {
        device.id for device in controller.devices()
    }
    assert all(grant.exclusive for grant in controller._dependencies.ledger.grants())
    assert controller.apply([deployment("more", 1)]).plan.refusals


def test_ending_refuses_what_is_being_fetched_meanwhile(machine: Machine, controller: Controller) -> None:
    """The end comes between two pieces of a download: the next piece breaks it off, and nothing is charged."""
    controller.apply([deployment("chat")])

    def end_at_progress(event: Event) -> None:
        if event.kind is EventKind.PROGRESS:
            controller.release(final=True)

    with pytest.raises(Conflict, match="stopping"):
        controller.apply([deployment("code"), deployment("small")], emit=end_at_progress)
    assert machine.live() == {}
    assert controller.deployments() == ()
    assert controller._dependencies.ledger.grants() == ()


def test_nothing_is_started_after_the_end(machine: Machine, controller: Controller) -> None:
    controller.release(final=True)
    with pytest.raises(Conflict, match="stopping"):
        controller.apply([deployment("chat")])
    assert controller.deployments() == ()
    assert machine.processes == []


def test_what_is_released_while_a_stack_with_it_is_prepared_is_started_anew(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat")])
    released = threading.Event()

    def release_chat(event: Event) -> None:
        if event.kind is EventKind.PROGRESS and not released.is_set():  # `code` is being fetched, `chat` was found to run
            released.set()
            controller.release(["chat"])

    controller.apply([deployment("chat"), deployment("code")], emit=release_chat)
    assert released.is_set()
    assert {i.deployment: i.state for i in controller.instances()} == dict.fromkeys(["chat", "code"], InstanceState.READY)
    check_ledger(machine, controller, names=["chat", "code"])


def test_a_restart_does_not_bring_back_what_is_released_meanwhile(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat")])
    machine.processes[0].alive = False
    assert controller.supervise() == ("chat",)
    told: list[Event] = []

    def release_chat(event: Event) -> None:
        told.append(event)
        if event.kind is EventKind.PROGRESS:
            controller.release(["chat"])

    controller.supervise(emit=release_chat, wait=True)
    assert told[-1].kind is EventKind.ERROR
    check_ledger(machine, controller, names=[])


def test_many_that_hang_while_loading_are_released_at_once(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, behaviours={"chat": "never"})
    controller = boot(machine, timing=replace(FAST, load_timeout_seconds=1e9))
    loading = threading.Semaphore(0)

    def watch(event: Event) -> None:
        if event.data.get("percent"):
            loading.release()

    applying = threading.Thread(target=controller.apply, args=([deployment("chat", 1, replicas=40)],), kwargs={"emit": watch})
    applying.start()
    for _ in range(32):  # as many as start side by side
        assert loading.acquire(timeout=300)
    controller.release(["chat"])
    applying.join(300)
    assert not applying.is_alive()
    check_ledger(machine, controller, names=[])
    controller.close()


def test_applying_what_somebody_else_is_loading_waits_until_it_is_ready(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path, behaviours={"chat": "never"})
    controller = boot(machine, timing=replace(FAST, load_timeout_seconds=60))
    loading = threading.Event()

    def watch(event: Event) -> None:
        if event.data.get("percent"):
            loading.set()

    first = threading.Thread(target=controller.apply, args=([deployment("chat")],), kwargs={"emit": watch})
    first.start()
    assert loading.wait(300)
    told: list[str] = []

    def finish_loading(event: Event) -> None:
        told.append(event.data.get("state", event.kind))
        if event.data.get("state") == "loading":
            machine.processes[0].behaviour = "ready"

    outcome = controller.apply([deployment("chat")], emit=finish_loading)
    first.join(300)
    assert [instance.state for instance in outcome.instances] == [InstanceState.READY]
    assert told[-1] == "ready"
    assert len(machine.processes) == 1
    controller.close()


def test_what_cannot_be_charged_is_not_wanted_either(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("chat")])
    machine.disk_is_full = True
    with pytest.raises(LedgerFull):
        controller.apply([deployment("chat"), deployment("code")])
    assert [item.name for item in controller.deployments()] == ["chat"]
    check_ledger(machine, controller, names=["chat"])


def test_a_log_that_grew_too_long_is_cut_by_the_next_look(machine: Machine) -> None:
    controller = boot(machine)
    controller.apply([deployment("chat")])
    log = machine.root / "runs" / controller.instances()[0].id / "engine.log"
    log.write_bytes(b"x" * (20 * MIB))
    controller.supervise()
    assert log.stat().st_size < 9 * MIB
    controller.close()


def test_what_is_no_longer_in_the_stack_is_told_and_removed_when_asked(machine: Machine) -> None:
    controller = boot(machine)
    controller.apply([deployment("a"), deployment("b"), deployment("c", 150)])
    told = controller.apply([deployment("a")])
    assert (told.plan.beside, told.plan.steps) == (("b", "c"), ())
    shown = controller.apply([deployment("a")], prune=True, dry_run=True).plan
    assert [(step.kind, step.deployment) for step in shown.steps] == [(StepKind.RELEASE, "b"), (StepKind.RELEASE, "c")]
    check_ledger(machine, controller, names=["a", "b", "c"])
    controller.apply([deployment("a"), deployment("x", 180), deployment("y", 180)], prune=True)
    assert {i.deployment: i.state.value for i in controller.instances()} == {"a": "ready", "x": "ready", "y": "ready"}
    check_ledger(machine, controller, names=["a", "x", "y"])
    refused = controller.apply([deployment("z", 300)], prune=True)
    assert refused.plan.refusals
    check_ledger(machine, controller, names=["a", "x", "y"])
    assert controller.apply([deployment("x", 180), deployment("w", 180)], prune=True, make_room=True).plan.beside == ()
    check_ledger(machine, controller, names=["w", "x"])
    controller.close()
