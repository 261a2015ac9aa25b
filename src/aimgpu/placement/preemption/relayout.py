"""A set of asks onto idle devices: their layouts are free to choose, so they are chosen together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aimgpu.domain import Ask, Placement, Slot
from aimgpu.placement.affinity import by_name
from aimgpu.placement.layouts import Relayout, with_relayout
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.scoring.lp import Array
from aimgpu.placement.scoring.mix import shape_of
from aimgpu.placement.scoring.packing import Fill, Filled
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot

FITTED = "the models of this batch were packed together onto idle GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    after: Snapshot
    placed: frozenset[str]


def fit_idle(snapshot: Snapshot, asks: Sequence[Ask], limits: Limits) -> Fitted:
    """As many of the asks as go onto idle devices under the best layouts; the others are left for the engine."""
    waiting: dict[Ask, list[Ask]] = {}
    for ask in sorted(asks, key=lambda ask: (-ask.priority.rank, by_name(ask))):
        if _plain(ask):
            waiting.setdefault(shape_of(ask), []).append(ask)
    world, placed = snapshot, set[str]()
    for node in sorted(snapshot.nodes, key=lambda node: node.name):
        for group in _alike(node, limits):
            fill = Fill(group[0], [resolve_need(shape) for shape in waiting])
            for filled in _best_sequence(fill, group, [len(found) for found in waiting.values()]):
                world, names = _carry_out(world, node.name, filled, waiting)
                placed |= names
    return Fitted(after=world, placed=frozenset(placed))


def _plain(ask: Ask) -> bool:
    """Asks for memory of one device alone; affinity, CPU and compute are decided by a session."""
    special = ask.with_deployments or ask.not_with_deployments or ask.partition_id or ask.compute_ppm
    return not special and resolve_need(ask).count == 1 and not ask.cpu_millis and not ask.host_memory_bytes


def _alike(node: NodeState, limits: Limits) -> list[list[DeviceState]]:
    """Idle devices of this node, those of one product together. One in a hive keeps its memory mode."""
    groups: dict[tuple[object, ...], list[DeviceState]] = {}
    for state in sorted(node.devices, key=lambda state: state.device.id):
        if state.grants or any(state.foreign_bytes.values()):
            continue
        device = state.device
        free = limits.may_reload_driver and device.hive is None
        mode = device.layout.memory_mode
        layouts = (
            tuple(each for each in device.layouts if free or each.memory_mode == mode) if limits.may_change_layouts else ()
        )
        usable = replace(state, device=replace(device, layouts=layouts or (device.layout,)))
        names = tuple(layout.name for layout in usable.device.layouts)
        groups.setdefault((device.product, device.memory_bytes, names, device.layout.name), []).append(usable)
    return list(groups.values())


def _best_sequence(fill: Fill, states: Sequence[DeviceState], demand: Sequence[int]) -> list[Filled]:
    """Device after device, by two sets of prices; the one that places more bytes counts."""
    sizes = [_size(need) for need in fill.needs]
    largest = max(sizes, default=1)
    _, prices = fill.bound(demand)
    plain = prices * 0 + [size / largest for size in sizes]
    runs = [_sequence(fill, states, demand, each) for each in (prices + plain * 1e-3, plain)]
    return max(runs, key=lambda run: (_placed(run), -len(run)))


def _sequence(fill: Fill, states: Sequence[DeviceState], demand: Sequence[int], prices: Array) -> list[Filled]:
    left, found = list(demand), list[Filled]()
    for state in states:
        filled = fill.best_device(state, prices, left)
        if filled is None:
            break
        for _, taken in filled.rooms:
            for number, count in taken.items():
                left[number] -= count
        found.append(filled)
    return found


def _placed(run: Sequence[Filled]) -> int:
    return sum(sum(taken.values()) for filled in run for _, taken in filled.rooms)


def _size(need: Need) -> int:
    return need.bytes_on(1 << 40)


def _carry_out(world: Snapshot, node: str, filled: Filled, waiting: dict[Ask, list[Ask]]) -> tuple[Snapshot, frozenset[str]]:
    shapes, names = list(waiting), set[str]()
    relayout = Relayout(layouts={filled.device_id: filled.layout}, reload_driver=False)
    world = with_relayout(world, node, relayout)
    for room, taken in filled.rooms:
        for number, count in sorted(Counter(taken).items()):
            terms = room.terms[number]
            for _ in range(count if terms is not None else 0):
                ask = waiting[shapes[number]].pop(0)
                slot = Slot(
                    node=node,
                    device_id=filled.device_id,
                    partition_id=room.partition.id,
                    memory_bytes=terms.memory_bytes if terms else 0,
                    compute_ppm=terms.compute_ppm if terms else None,
                    exclusive=terms.exclusive if terms else False,
                )
                world = world.with_placement(ask, Placement(ask=ask.name, slots=(slot,), because=FITTED))
                names.add(ask.name)
    return world, frozenset(names)
