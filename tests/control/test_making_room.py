from dataclasses import replace

import pytest
from tests.control.world import Machine, check_ledger, deployment

from aimgpu.control.controller import Controller
from aimgpu.domain import Deployment, InstanceState, PartitionKind, Priority, Whole
from aimgpu.placement.preemption.eviction_sets import Limits


def with_priority(item: Deployment, priority: Priority) -> Deployment:
    return replace(item, ask=replace(item.ask, priority=priority))


def states(controller: Controller) -> dict[str, InstanceState]:
    return {instance.deployment: instance.state for instance in controller.instances()}


def test_lower_priority_gives_way_sleeps_with_the_reason_and_the_preemptor_runs(
    machine: Machine, controller: Controller
) -> None:
    controller.apply([with_priority(deployment(name, 150), Priority.LOW) for name in ("a", "b")])
    outcome = controller.apply([with_priority(deployment("urgent", 150), Priority.HIGH)], make_room=True)
    assert not outcome.plan.refusals
    found = states(controller)
    assert found.pop("urgent") is InstanceState.READY
    assert sorted(found.values()) == [InstanceState.READY, InstanceState.SLEEPING]
    (victim,) = [i for i in controller.instances() if i.state is InstanceState.SLEEPING]
    assert "urgent" in (victim.reason or "")
    check_ledger(machine, controller, names=["a", "b", "urgent"])
    assert controller.statistics.operations()["preempt", "ok"] == 1


def test_equal_priority_never_gives_way(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("a", 150), deployment("b", 150)])
    before = controller.instances()
    outcome = controller.apply([deployment("c", 150)], make_room=True)
    [refusal] = outcome.plan.refusals
    assert (
        "only models of lower priority than medium are stopped for it, and these are not: a (medium), b (medium)"
        in refusal.summary
    )
    assert controller.instances() == before
    check_ledger(machine, controller, names=["a", "b"])


def test_moving_frees_a_whole_device(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("a", 100), deployment("b", 100)])
    if len({grant.device_id for grant in controller._dependencies.ledger.grants()}) == 1:
        pytest.fail("two of 100 GiB cannot share one Device")
    controller.apply([deployment("small", 20)])
    controller.release(["a"])
    controller.apply([deployment("c", 20)])
    outcome = controller.apply([deployment("whole", 150, want=Whole())], make_room=True)
    assert not outcome.plan.refusals
    assert set(states(controller).values()) == {InstanceState.READY}
    check_ledger(machine, controller)


def test_a_copy_of_an_earlier_revision_is_not_moved(machine: Machine, controller: Controller) -> None:
    """What would start in its place is of another size than the room that it has."""
    controller.apply([deployment("a", 100), deployment("b", 100)])
    controller.apply([deployment("small", 20)])
    (stale,) = (one for one in controller.instances() if one.deployment == "small")
    controller.release(["a"])
    controller.apply([deployment("c", 20)])
    ledger = controller._dependencies.ledger
    ledger.want(deployment("small", 30))  # as while it is being replaced
    plan = controller.apply([deployment("whole", 150, want=Whole())], make_room=True, dry_run=True).plan
    ended = [getattr(step, "instance_id", None) for step in plan.steps]
    assert stale.id not in ended
    ledger.want(deployment("small", 20))
    plan = controller.apply([deployment("whole", 150, want=Whole())], make_room=True, dry_run=True).plan
    assert len(plan.steps) > 1, "as it is now, others are moved"


def test_a_layout_is_changed_where_that_makes_room(machine: Machine, controller: Controller) -> None:
    controller.apply([deployment("a", 10)])
    outcome = controller.apply([deployment("part", 10, want=PartitionKind(kind="cpx"))], make_room=True)
    assert not outcome.plan.refusals
    assert "CPX/NPS1" in {device.layout.name for device in controller.devices()}
    assert states(controller) == {"a": InstanceState.READY, "part": InstanceState.READY}
    check_ledger(machine, controller, names=["a", "part"])


def test_a_dry_run_tells_every_step_and_does_none(machine: Machine, controller: Controller) -> None:
    controller.apply([with_priority(deployment(name, 150), Priority.LOW) for name in ("a", "b")])
    before = controller.instances()
    outcome = controller.apply([with_priority(deployment("urgent", 150), Priority.HIGH)], dry_run=True, make_room=True)
    assert len(outcome.plan.steps) == 2
    assert all(step.text for step in outcome.plan.steps)
    assert controller.instances() == before
    assert {item.name for item in controller.deployments()} == {"a", "b"}


def test_preemption_is_bounded_per_hour(controller: Controller) -> None:
    controller.apply([with_priority(deployment(name, 150), Priority.LOW) for name in ("a", "b")])
    urgent = with_priority(deployment("urgent", 150), Priority.HIGH)
    assert controller.apply([urgent], limits=Limits(stops_an_hour=0), make_room=True).plan.refusals
    assert not controller.apply([urgent], limits=Limits(stops_an_hour=1), make_room=True).plan.refusals
    more = with_priority(deployment("more", 150), Priority.HIGH)
    assert controller.apply([more], limits=Limits(stops_an_hour=1), make_room=True).plan.refusals


def test_what_fits_as_things_are_is_simply_deployed(machine: Machine, controller: Controller) -> None:
    outcome = controller.apply([deployment("a", 10)], make_room=True)
    assert [instance.state for instance in outcome.instances] == [InstanceState.READY]
