"""A plan: ordered steps from one snapshot to another, to be shown before it is done, and undone exactly."""

from dataclasses import dataclass, replace
from enum import StrEnum

from aimgpu.domain import Ask, Grant, Placement
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot


class MoveKind(StrEnum):
    STOP = "stop"  # a victim, for good
    MOVE = "move"  # starts at its new place before it stops at the old one
    RELEASE = "release"  # stops now, starts again below
    LAYOUT = "layout"
    START = "start"
    PLACE = "place"  # the ask itself


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStep:
    """One change. Applying removes and adds exactly these grants, so that it can be undone."""

    kind: MoveKind
    text: str
    node: str
    ask: Ask | None = None  # of the instance that comes or goes
    removed: tuple[Grant, ...] = ()
    added: tuple[Grant, ...] = ()
    from_node: str | None = None  # of what is removed, if that is another node
    device_id: str | None = None
    before: DeviceState | None = None  # of a device that gets another layout
    after: DeviceState | None = None
    reload_driver: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a plan disturbs, worst first; plans compare by it."""

    stopped: int = 0
    stopped_bytes: int = 0
    reloads: int = 0
    moved: int = 0
    layouts: int = 0
    moved_bytes: int = 0

    def key(self) -> tuple[int, ...]:
        return (self.stopped, self.stopped_bytes, self.reloads, self.moved, self.layouts, self.moved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """How to make room: what stops, moves and changes, and where each ask then goes."""

    asks: tuple[str, ...]
    placements: tuple[Placement, ...]
    steps: tuple[MoveStep, ...]
    cost: Cost
    because: str

    @property
    def stopped(self) -> tuple[str, ...]:
        return tuple(sorted({grant.instance_id for step in self._of(MoveKind.STOP) for grant in step.removed}))

    @property
    def moved(self) -> tuple[str, ...]:
        steps = self._of(MoveKind.MOVE) + self._of(MoveKind.RELEASE)
        return tuple(sorted({grant.instance_id for step in steps for grant in step.removed}))

    def _of(self, kind: MoveKind) -> tuple[MoveStep, ...]:
        return tuple(step for step in self.steps if step.kind is kind)


def apply_plan(snapshot: Snapshot, plan: MovePlan) -> Snapshot:
    """The snapshot after every step."""
    for step in plan.steps:
        snapshot = _step_done(snapshot, step)
    return snapshot


def undo_plan(snapshot: Snapshot, plan: MovePlan) -> Snapshot:
    """The snapshot before the plan, from the one after it."""
    for step in reversed(plan.steps):
        snapshot = _step_done(snapshot, _inverse(step))
    return snapshot


def canonical(snapshot: Snapshot) -> Snapshot:
    """The same world listed in one way, so that two can be compared."""
    nodes = []
    for node in sorted(snapshot.nodes, key=lambda node: node.name):
        states = sorted(node.devices, key=lambda state: state.device.id)
        devices = tuple(replace(state, grants=tuple(sorted(state.grants, key=lambda grant: grant.id))) for state in states)
        nodes.append(replace(node, devices=devices))
    return replace(snapshot, nodes=tuple(nodes), running=dict(sorted(snapshot.running.items())))


def _inverse(step: MoveStep) -> MoveStep:
    back = {MoveKind.STOP: MoveKind.PLACE, MoveKind.PLACE: MoveKind.STOP}
    home = step.from_node or step.node
    return replace(
        step,
        kind=back.get(step.kind, step.kind),
        removed=step.added,
        added=step.removed,
        before=step.after,
        after=step.before,
        node=home,
        from_node=step.node,
    )


def _step_done(snapshot: Snapshot, step: MoveStep) -> Snapshot:
    origin = step.from_node or step.node
    nodes = tuple(_node_done(node, step, origin) for node in snapshot.nodes)
    running = dict(snapshot.running)
    for grant in step.removed:
        running.pop(grant.instance_id, None)
    if step.ask is not None:
        running.update({grant.instance_id: step.ask for grant in step.added})
    return replace(snapshot, nodes=nodes, running=running)


def _node_done(node: NodeState, step: MoveStep, origin: str) -> NodeState:
    if node.name not in (step.node, origin):
        return node
    cpu, host = (step.ask.cpu_millis, step.ask.host_memory_bytes) if step.ask else (0, 0)
    sign = (node.name == step.node and bool(step.added)) - (node.name == origin and bool(step.removed))
    return replace(
        node,
        devices=tuple(_device_done(node.name, state, step, origin) for state in node.devices),
        used_cpu_millis=node.used_cpu_millis + sign * cpu,
        used_host_memory_bytes=node.used_host_memory_bytes + sign * host,
    )


def _device_done(node: str, state: DeviceState, step: MoveStep, origin: str) -> DeviceState:
    """Device ids may repeat on other nodes, so both count."""
    if step.after is not None and node == step.node and state.device.id == step.device_id:
        return replace(step.after, grants=state.grants)
    gone = {grant.id for grant in step.removed} if node == origin else set()
    new = tuple(grant for grant in step.added if grant.device_id == state.device.id) if node == step.node else ()
    return replace(state, grants=tuple(grant for grant in state.grants if grant.id not in gone) + new)
