"""The steps between two snapshots, in an order in which every one of them has room."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from aimgpu.domain import Ask, Grant, Placement
from aimgpu.placement.fit import free_bytes, free_compute_ppm
from aimgpu.placement.layouts import kept_partitions
from aimgpu.placement.preemption.move_plan import Cost, MoveKind, MovePlan, MoveStep, apply_plan
from aimgpu.placement.snapshot import NodeState, Snapshot
from aimgpu.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTarget:
    """Where a plan should lead: `after` is the world then, `stopped` and `placed` what goes and what is new."""

    after: Snapshot
    stopped: frozenset[str]
    placed: tuple[Placement, ...]
    because: str


def plan_between(before: Snapshot, target: MoveTarget) -> MovePlan:
    """Stops first, then moves that have room, then what must wait for the new layouts, then the asks."""
    old, new = _grants_of(before), _grants_of(target.after)
    fresh = {placement.ask for placement in target.placed}
    stops = [_stop(before, instance_id, old[instance_id]) for instance_id in sorted(target.stopped)]
    lost = _lost_partitions(before, target.after)
    moving = [name for name in sorted(old) if name in new and name not in fresh and not _stays(old[name], new[name], lost)]
    moves = {name: _move(before, old[name], new[name]) for name in moving}
    layouts = _layout_steps(before, target.after)
    early, late = _split(_after(before, stops), moves, {(step.node, step.device_id) for step in layouts})
    places = [_place(target.after, name, new[name]) for name in (placement.ask for placement in target.placed)]
    releases, starts = [_release(step) for step in late], [_start(step) for step in late]
    steps = (*stops, *early, *releases, *layouts, *starts, *places)
    return MovePlan(
        asks=tuple(placement.ask for placement in target.placed),
        placements=target.placed,
        steps=steps,
        cost=_cost(stops, [*early, *late], layouts),
        because=target.because,
    )


def _grants_of(snapshot: Snapshot) -> dict[str, tuple[Grant, ...]]:
    found: dict[str, list[Grant]] = {}
    for _, state in snapshot.devices():
        for grant in state.grants:
            found.setdefault(grant.instance_id, []).append(grant)
    return {name: tuple(sorted(grants, key=lambda grant: grant.id)) for name, grants in found.items()}


def _stays(old: Iterable[Grant], new: Iterable[Grant], lost: frozenset[tuple[str, str]]) -> bool:
    """Whether an instance keeps the very places it had; a partition that is made again is another place."""
    return not any((grant.node, grant.partition_id) in lost for grant in old) and _shape(old) == _shape(new)


def _shape(grants: Iterable[Grant]) -> list[tuple[str, str, int, bool, int | None]]:
    return sorted((grant.node, grant.partition_id, grant.memory_bytes, grant.exclusive, grant.compute_ppm) for grant in grants)


def _lost_partitions(before: Snapshot, after: Snapshot) -> frozenset[tuple[str, str]]:
    """Nodes and partitions of `before` that the change of layouts takes away."""
    now = {(node.name, state.device.id): state.device.layout for node, state in after.devices()}
    return frozenset(
        (node.name, partition.id)
        for node, state in before.devices()
        for partition in state.device.layout.partitions
        if partition.id not in kept_partitions(state.device, now[node.name, state.device.id])
    )


def _stop(before: Snapshot, instance_id: str, grants: tuple[Grant, ...]) -> MoveStep:
    held = format_bytes(sum(grant.memory_bytes for grant in grants))
    text = f"stop {instance_id} ({grants[0].priority.value}), which holds {held} of {_places(grants)}"
    return MoveStep(kind=MoveKind.STOP, text=text, node=grants[0].node, ask=before.running.get(instance_id), removed=grants)


def _move(before: Snapshot, old: tuple[Grant, ...], new: tuple[Grant, ...]) -> MoveStep:
    name = old[0].instance_id
    return MoveStep(
        kind=MoveKind.MOVE,
        text=f"move {name} from {_places(old)} to {_places(new)}",
        node=new[0].node,
        from_node=old[0].node,
        ask=before.running.get(name),
        removed=old,
        added=new,
    )


def _release(move: MoveStep) -> MoveStep:
    """The first half of a move that has to wait for what comes between."""
    text = f"stop {move.removed[0].instance_id} on {_places(move.removed)}, to start it again on {_places(move.added)}"
    return replace(move, kind=MoveKind.RELEASE, text=text, added=(), node=move.from_node or move.node)


def _start(move: MoveStep) -> MoveStep:
    text = f"start {move.removed[0].instance_id} again on {_places(move.added)}"
    return replace(move, kind=MoveKind.START, text=text, removed=(), from_node=None)


def _place(after: Snapshot, name: str, grants: tuple[Grant, ...]) -> MoveStep:
    held = format_bytes(sum(grant.memory_bytes for grant in grants))
    text = f"place {name} on {_places(grants)} ({held})"
    return MoveStep(kind=MoveKind.PLACE, text=text, node=grants[0].node, ask=after.running.get(name), added=grants)


def _places(grants: Iterable[Grant]) -> str:
    return ", ".join(sorted(grant.partition_id for grant in grants))


def _layout_steps(before: Snapshot, after: Snapshot) -> list[MoveStep]:
    old = {(node.name, state.device.id): state for node, state in before.devices()}
    steps = []
    for node, state in after.devices():
        was = old[node.name, state.device.id]
        if was.device.layout == state.device.layout:
            continue
        reload_driver = was.device.layout.memory_mode != state.device.layout.memory_mode
        how = ", which needs a driver reload" if reload_driver else ""
        steps.append(
            MoveStep(
                kind=MoveKind.LAYOUT,
                text=f"repartition {state.device.id} as {state.device.layout.name} instead of {was.device.layout.name}{how}",
                node=node.name,
                device_id=state.device.id,
                before=was,
                after=state,
                reload_driver=reload_driver,
            )
        )
    return steps


def _after(snapshot: Snapshot, steps: Iterable[MoveStep]) -> Snapshot:
    plan = MovePlan(asks=(), placements=(), steps=tuple(steps), cost=Cost(), because="")
    return apply_plan(snapshot, plan)


def _split(
    now: Snapshot, moves: dict[str, MoveStep], changing: set[tuple[str, str | None]]
) -> tuple[list[MoveStep], list[MoveStep]]:
    """Moves that have room before anything else changes, in an order that works, and those that must wait."""
    early: list[MoveStep] = []
    waiting = dict(moves)
    progress = True
    while progress:
        progress = False
        for name, step in sorted(waiting.items()):
            if not any((grant.node, grant.device_id) in changing for grant in step.added) and _has_room(now, step):
                now = _after(now, [step])
                early.append(waiting.pop(name))
                progress = True
    return early, list(waiting.values())


def _has_room(now: Snapshot, step: MoveStep) -> bool:
    """Whether the instance can start at its new place while it still runs at the old one."""
    states = {(node.name, state.device.id): (node, state) for node, state in now.devices()}
    for grant in step.added:
        node, state = states[grant.node, grant.device_id]
        partition = state.device.partition(grant.partition_id)
        if partition is None or grant.memory_bytes > free_bytes(state, partition):
            return False
        if (grant.compute_ppm or 0) > free_compute_ppm(state, partition):
            return False
        if grant.exclusive and any(other.partition_id == partition.id for other in state.grants):
            return False
        if step.ask is not None and not _host_room(node, step.ask):
            return False
    return True


def _host_room(node: NodeState, ask: Ask) -> bool:
    cpu = node.cpu_millis is None or node.cpu_millis - node.used_cpu_millis >= ask.cpu_millis
    host = node.host_memory_bytes is None or node.host_memory_bytes - node.used_host_memory_bytes >= ask.host_memory_bytes
    return cpu and host


def _cost(stops: list[MoveStep], moves: list[MoveStep], layouts: list[MoveStep]) -> Cost:
    return Cost(
        stopped=len(stops),
        stopped_bytes=sum(grant.memory_bytes for step in stops for grant in step.removed),
        reloads=int(any(step.reload_driver for step in layouts)),
        moved=len(moves),
        layouts=len(layouts),
        moved_bytes=sum(grant.memory_bytes for step in moves for grant in step.removed),
    )
