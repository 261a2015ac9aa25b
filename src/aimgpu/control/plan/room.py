"""Room for what does not fit as things are: move others, change layouts, stop lower priority. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from aimgpu.control.plan.prepared import Prepared, ask_for, revision_of
from aimgpu.control.plan.stack import find_changes
from aimgpu.control.plan.steps import (
    GONE,
    ChangeLayout,
    ControlState,
    Plan,
    Preempt,
    Release,
    Start,
    Step,
    Unload,
    without_instances,
)
from aimgpu.domain import Ask, Deployment, Grant, Instance, InstanceState, Placement, Refusal, Slot
from aimgpu.placement import MovePlan, Snapshot
from aimgpu.placement.preemption.eviction_sets import Limits, victim_of
from aimgpu.placement.preemption.move_plan import MoveKind, MoveStep
from aimgpu.placement.preemption.planner import plan_all

Prepare = Callable[[Sequence[Deployment]], Mapping[str, Prepared]]

_MOST_NAMES = 5
_UNLOADED = GONE | {InstanceState.SLEEPING}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRequest:
    """What is to be given room, and how far that may go."""

    prepared: Sequence[Prepared]
    deployments: Sequence[Deployment]
    pruned: Sequence[str] = ()
    limits: Limits | None = None


def plan_room(request: RoomRequest, state: ControlState, prepare: Prepare) -> Plan:
    """`prepare` is called for deployments that move, all at once.

    A preempted instance is not forgotten: it stays registered with the reason, and a request wakes it when it fits again.
    """
    changes = find_changes(request.prepared, state, _UNLOADED)
    fresh = [(each.item, replica) for each in changes for replica in each.missing]
    ending = [old for each in changes for olds in each.olds.values() for old in olds]
    ending += [one for one in state.running if one.deployment in request.pruned]
    snapshot = without_instances(_without_stale(state), [one.id for one in ending])
    asks = [ask_for(item, replica) for item, replica in fresh]
    unloads: list[Instance] = []
    batch = plan_all(snapshot, asks, request.limits or Limits())
    if batch.refusals:
        unloads = [one for one in state.running if one.sleeps_in_place and one.grants and one not in ending]
        batch = plan_all(without_instances(snapshot, [one.id for one in unloads]), asks, request.limits or Limits())
    if batch.refusals:
        return Plan(refusals=tuple(_with_what_stays(one, asks, snapshot) for one in batch.refusals))
    first: list[Step] = [*(Release.of(one) for one in ending), *(Unload.of(one) for one in unloads)]
    moving = _moving_steps(batch.plan, fresh, state, prepare)
    names = {item.name for item in request.deployments}
    return Plan(
        chains=((*first, *moving),),
        beside=() if request.pruned else tuple(name for name in state.wanted if name not in names),
        wants=tuple(request.deployments),
        unwants=tuple(request.pruned),
        details={"because": batch.plan.because},
    )


def _without_stale(state: ControlState) -> Snapshot:
    """Copies of an earlier revision stay where they are: what would start in their place is of another size."""
    wanted = {name: revision_of(deployment) for name, deployment in state.wanted.items()}
    stale = {one.id for one in state.running if one.revision not in (None, wanted.get(one.deployment))}
    running = {name: ask for name, ask in state.snapshot.running.items() if name not in stale}
    return replace(state.snapshot, running=running)


def _with_what_stays(refusal: Refusal, asks: Sequence[Ask], snapshot: Snapshot) -> Refusal:
    """Why others were not stopped for it."""
    ask = next(each for each in asks if each.name == refusal.ask)
    kept = {
        (running.deployment or running.name, "pinned" if running.pinned else running.priority.value)
        for name, running in snapshot.running.items()
        if not victim_of(ask, snapshot, name)
    }
    if not kept:
        return refusal
    named = ", ".join(f"{name} ({why})" for name, why in sorted(kept)[:_MOST_NAMES])
    more = ", ..." if len(kept) > _MOST_NAMES else ""
    why = f"only models of lower priority than {ask.priority.value} are stopped for it, and these are not: {named}{more}"
    return Refusal(ask=refusal.ask, summary=f"{refusal.summary}; {why}", reasons=refusal.reasons, would_fit=refusal.would_fit)


def _moving_steps(moves: MovePlan, fresh: Sequence[tuple[Prepared, int]], state: ControlState, prepare: Prepare) -> list[Step]:
    """In order: what ends, the layouts, what starts. Matched by kind and instance id."""
    running = {instance.id: instance for instance in state.running}
    victims = [running[name] for name in moves.stopped]
    moved = [running[name] for name in moves.moved]
    names = tuple(dict.fromkeys(item.name for item, _ in fresh))
    steps: list[Step] = [
        Preempt(deployment=one.deployment, replica=one.replica, instance_id=one.id, beneficiaries=names) for one in victims
    ]
    steps += [Release.of(one) for one in moved]
    steps += [_layout_step(step, state.snapshot) for step in moves.steps if step.kind is MoveKind.LAYOUT]
    added = _added(moves)
    ready = prepare([state.wanted[name] for name in dict.fromkeys(one.deployment for one in moved)])
    steps += [_start(ready[one.deployment], one.replica, added[one.id], "moved to make room") for one in moved]
    steps += [_start(item, replica, added[f"{item.name}-{replica}"], "room was made for it") for item, replica in fresh]
    return steps


def _added(moves: MovePlan) -> dict[str, tuple[Grant, ...]]:
    """Where each instance ends up: the last step that adds it."""
    found: dict[str, tuple[Grant, ...]] = {}
    for step in moves.steps:
        for name in dict.fromkeys(grant.instance_id for grant in step.added):
            found[name] = tuple(grant for grant in step.added if grant.instance_id == name)
    return found


def _layout_step(step: MoveStep, snapshot: Snapshot) -> ChangeLayout:
    if step.after is None or step.device_id is None:
        raise ValueError(step)
    before = next(state.device for _, state in snapshot.devices() if state.device.id == step.device_id)
    return ChangeLayout(
        device_id=step.device_id,
        after=step.after.device.layout.name,
        before=((before.id, before.layout.name),),
        idle=tuple(partition.id for partition in before.layout.partitions),
        halted=(before.id,),
        reload_driver=step.reload_driver,
    )


def _start(item: Prepared, replica: int, grants: Sequence[Grant], because: str) -> Start:
    slots = tuple(Slot.of(grant) for grant in grants)
    return Start(
        prepared=item, replica=replica, placement=Placement(ask=f"{item.name}-{replica}", slots=slots, because=because)
    )
