"""Deploy what does not fit as things are: move others, change Layouts, stop lower priority, as the placement room plans it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aimgpu.control.controller import ApplyResult, Controller
from aimgpu.control.events import Emit, Event, EventKind, ignore
from aimgpu.control.planning.plan import (
    GONE,
    Plan,
    Prepared,
    Step,
    StepKind,
    ask_for,
    find_changes,
    release_step,
    unload_step,
    without_instances,
)
from aimgpu.control.planning.preparation import prepare
from aimgpu.control.planning.resize_carryover import carry_over
from aimgpu.domain import Deployment, Grant, Instance, InstanceState, Placement, Slot
from aimgpu.placement import MovePlan
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.move_plan import MoveKind
from aimgpu.placement.preemption.planner import plan_all


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """A plan of the placement room, and what of ours it is about."""

    moves: MovePlan
    releases: tuple[Step, ...]  # of what changed and is replaced
    fresh: tuple[tuple[Prepared, int], ...]
    moved: tuple[tuple[Prepared, Instance], ...]
    victims: tuple[Instance, ...]


def apply_with_room(  # noqa: PLR0913 - what `up` can be told
    controller: Controller,
    deployments: Sequence[Deployment],
    *,
    emit: Emit = ignore,
    dry_run: bool = False,
    prune: bool = False,
    limits: Limits | None = None,
) -> ApplyResult:
    """As `Controller.apply`; what would be refused is given room, where the rules of preemption and moving allow it.

    A victim is not forgotten: it sleeps, with the reason, and a request may wake it when there is room again.
    """
    deployments = carry_over(deployments, controller.deployments(), controller.instances())
    outcome = controller.apply(deployments, dry_run=True, prune=prune)
    if not outcome.plan.refusals:
        return controller.apply(deployments, emit=emit, dry_run=dry_run, prune=prune)
    ready = [prepare(controller.parts, item, emit, may_fetch=not dry_run) for item in controller.changed_of(deployments)]
    with controller.mutation:
        controller.check_open()
        pruned = controller.beside(deployments) if prune else ()
        found = _find_room(controller, ready, pruned, limits or Limits())
        if isinstance(found, Plan):
            emit(Event(kind=EventKind.PLAN, text="no room can be made", data=found.to_json()))
            controller.count("apply", found, ())
            return ApplyResult(plan=found, instances=outcome.instances)
        plan = Plan(steps=_steps(found), beside=() if prune else controller.beside(deployments))
        emit(Event(kind=EventKind.PLAN, text=f"{len(plan.steps)} steps: {found.moves.because}", data=plan.to_json()))
        if dry_run:
            return ApplyResult(plan=plan, instances=outcome.instances)
        controller.parts.ledger.unwant(*pruned)
        controller.parts.ledger.want(*deployments)
        charged = _carry_out(controller, found, plan, emit)
    controller.count("apply", plan, controller.start(charged, emit))
    names = {item.name for item in deployments}
    return ApplyResult(plan=plan, instances=tuple(i for i in controller.instances() if i.deployment in names))


def _find_room(controller: Controller, ready: Sequence[Prepared], pruned: Sequence[str], limits: Limits) -> _Room | Plan:
    running = {instance.id: instance for instance in controller.instances()}
    wanted = {deployment.name: deployment for deployment in controller.deployments()}
    asleep = GONE | {InstanceState.SLEEPING}
    releases, fresh = find_changes(ready, wanted, running.values(), asleep)
    releases += [release_step(one) for one in running.values() if one.deployment in pruned]
    snapshot = without_instances(controller.snapshot(), [step.instance_id for step in releases])
    asks = [ask_for(item, number) for item, number in fresh]
    batch, unloads = plan_all(snapshot, asks, limits), list[Instance]()
    if batch.refusals:
        unloads = [one for one in running.values() if one.sleeps_in_place and one.grants]
        batch = plan_all(without_instances(snapshot, [one.id for one in unloads]), asks, limits)
    if batch.refusals:
        return Plan(refusals=batch.refusals)
    moved = tuple(
        (prepare(controller.parts, wanted[running[name].deployment], ignore, may_fetch=False), running[name])
        for name in batch.plan.moved
    )
    victims = tuple(running[name] for name in batch.plan.stopped)
    releases += [unload_step(one) for one in unloads if one.deployment not in {step.deployment for step in releases}]
    return _Room(moves=batch.plan, releases=tuple(releases), fresh=tuple(fresh), moved=moved, victims=victims)


def _steps(room: _Room) -> tuple[Step, ...]:
    """The plan in the controller's own steps, in order: what ends, the Layouts, what starts."""
    texts = {step.text: step for step in room.moves.steps}
    ends = [
        Step(kind=StepKind.RELEASE, deployment=victim.deployment, replica=victim.replica, instance_id=victim.id, text=text)
        for victim in (*room.victims, *(instance for _, instance in room.moved))
        for text, step in texts.items()
        if any(grant.instance_id == victim.id for grant in step.removed)
    ]
    layouts = [
        Step(kind=StepKind.LAYOUT, deployment="", text=step.text) for step in room.moves.steps if step.kind is MoveKind.LAYOUT
    ]
    added = _added(room.moves)
    starts = [_start_step(item, instance.replica, added[instance.id], "moved") for item, instance in room.moved]
    starts += [_start_step(item, number, added[f"{item.deployment.name}-{number}"], "new") for item, number in room.fresh]
    return (*room.releases, *ends, *layouts, *starts)


def _added(moves: MovePlan) -> dict[str, list[Grant]]:
    """Where each instance ends up: the last step that adds it says."""
    found: dict[str, list[Grant]] = {}
    for step in moves.steps:
        for name in dict.fromkeys(grant.instance_id for grant in step.added):
            found[name] = [grant for grant in step.added if grant.instance_id == name]
    return found


def _start_step(item: Prepared, replica: int, grants: Sequence[Grant], because: str) -> Step:
    slots = tuple(Slot.of(grant) for grant in grants)
    name = item.deployment.name
    placement = Placement(ask=f"{name}-{replica}", slots=slots, because=because)
    where = ", ".join(slot.partition_id for slot in slots)
    text = f"start {name} on {where} ({because})"
    return Step(kind=StepKind.DEPLOY, deployment=name, replica=replica, text=text, placement=placement, prepared=item)


def _carry_out(controller: Controller, room: _Room, plan: Plan, emit: Emit) -> list[tuple[Instance, Prepared]]:
    ledger = controller.parts.ledger
    layouts = [step for step in room.moves.steps if step.kind is MoveKind.LAYOUT and step.after is not None]
    operation = ledger.begin("make_room", {"devices": [step.device_id for step in layouts]})
    controller.suspend([step.instance_id for step in plan.steps if step.instance_id], emit=emit)
    for victim in room.victims:
        why = f"stopped to make room for {', '.join(dict.fromkeys(item.deployment.name for item, _ in room.fresh))}"
        asleep = replace(victim, state=InstanceState.SLEEPING, reason=why, process=None, endpoint=None, grants=())
        ledger.charge(asleep, capacity={})
        controller.note_preemption(time.monotonic())
    for step in layouts:
        if step.after is not None and step.device_id is not None:
            name = step.after.device.layout.name
            controller.parts.hardware.apply_layout(step.device_id, name, reload_driver=step.reload_driver)
    starts = Plan(steps=tuple(step for step in plan.steps if step.kind is StepKind.DEPLOY))
    charged = controller.begin(starts, emit)
    ledger.finish(operation)
    return charged
