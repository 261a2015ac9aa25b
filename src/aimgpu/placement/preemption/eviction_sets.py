"""Ways to make room for a need: which instances would have to leave which devices, under which layouts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from aimgpu.domain import Ask, Layout, Partition
from aimgpu.placement.fit import Fit, device_bar, fit_of, free_bytes, stale_grants
from aimgpu.placement.layouts import Relayout, laid_out, relayout_of
from aimgpu.placement.need import Need
from aimgpu.placement.reasons import ReasonCode
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot

_MOST_TOGETHER = 4  # instances searched exactly; beyond, the largest first
_MOST_CANDIDATES = 12
_MOST_DEVICES = 64
_MOST_NODES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan may do. A pinned instance, and one whose ask is not known, is never touched."""

    may_move: bool = True
    may_stop: bool = True  # only lower priority
    may_change_layouts: bool = True
    may_reload_driver: bool = False
    most_moves: int = 16
    most_stops: int = 8
    stops_an_hour: int = 12
    most_tried: int = 24  # ways to make room that are looked into for one ask


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSet:
    """Instances that leave, and layouts that change, so that `devices` of one node would do."""

    node: str
    devices: tuple[str, ...]
    leaving: frozenset[str]
    relayout: Relayout | None
    weight: tuple[int, int, int, int]  # reloads, instances, layouts, bytes: a first guess at the cost


def eviction_sets(snapshot: Snapshot, need: Need, limits: Limits) -> list[EvictionSet]:
    """The ways found, the least disturbing first. In a large fleet only the most promising devices are looked into."""
    found: list[EvictionSet] = []
    for node, states in _promising(snapshot, need, limits):
        each = [sorted(_on_device(snapshot, node, state, need, limits), key=_order) for state in states]
        if need.count == 1:
            found += [eviction for evictions in each for eviction in evictions]
        else:
            found += _together(snapshot, node, each, need.count)
    return sorted(found, key=_order)


def _promising(snapshot: Snapshot, need: Need, limits: Limits) -> list[tuple[NodeState, list[DeviceState]]]:
    """Nodes with the devices worth a closer look: those that the fewest instances would have to leave."""
    rated = [
        (
            node,
            sorted(
                (_least_leaving(state, need, limits), state.device.id, state) for state in node.devices if _may_do(need, state)
            ),
        )
        for node in sorted(snapshot.nodes, key=lambda node: node.name)
    ]
    if need.count > 1:
        enough = [(sum(each[0] for each in states[: need.count]), node.name, node, states) for node, states in rated]
        best = sorted((each for each in enough if len(each[3]) >= need.count), key=lambda each: each[:2])[:_MOST_NODES]
        return [(node, [state for _, _, state in states]) for _, _, node, states in best]
    flat = sorted(
        ((least, node.name, name, node, state) for node, states in rated for least, name, state in states), key=_first_three
    )
    return [(node, [state]) for _, _, _, node, state in flat[:_MOST_DEVICES]]


def _first_three(found: tuple[int, str, str, NodeState, DeviceState]) -> tuple[int, str, str]:
    return found[:3]


def _may_do(need: Need, state: DeviceState) -> bool:
    """Whether the ask would fit on the device if it were empty."""
    barred = device_bar(need, replace(state, grants=()))
    return (barred is None or barred.code is ReasonCode.WITH) and not stale_grants(state)


def _least_leaving(state: DeviceState, need: Need, limits: Limits) -> int:
    """How many instances would have to leave, at the very least."""
    counts = [_least_on(state, need, partition) for partition in state.device.layout.partitions]
    if limits.may_change_layouts and len(state.device.layouts) > 1:
        kept = any(partition.start is not None for partition in state.device.layout.partitions)
        counts.append(0 if kept else len({grant.instance_id for grant in state.grants}))
    return min(counts, default=0)


def _least_on(state: DeviceState, need: Need, partition: Partition) -> int:
    """The same for one partition: all of its instances, or as few of the largest as free enough bytes."""
    mine = sorted((grant.memory_bytes for grant in state.grants if grant.partition_id == partition.id), reverse=True)
    if need.exclusive or any(grant.exclusive for grant in state.grants if grant.partition_id == partition.id):
        return len(mine)
    short = need.bytes_on(state.device.memory_bytes) - free_bytes(state, partition)
    count = 0
    while short > 0 and count < len(mine):
        short -= mine[count]
        count += 1
    return count


def movable(snapshot: Snapshot, instance_id: str) -> bool:
    ask = snapshot.running.get(instance_id)
    return ask is not None and not ask.pinned


def victim_of(ask: Ask, snapshot: Snapshot, instance_id: str) -> bool:
    """Whether this instance may be stopped for the ask: known, not pinned, and of lower priority."""
    running = snapshot.running.get(instance_id)
    return running is not None and not running.pinned and running.priority.rank < ask.priority.rank


def _order(eviction: EvictionSet) -> tuple[object, ...]:
    names = sorted((eviction.relayout.layouts if eviction.relayout else {}).items())
    return (
        *eviction.weight,
        eviction.node,
        eviction.devices,
        sorted(eviction.leaving),
        [(device, layout.name) for device, layout in names],
    )


def _on_device(snapshot: Snapshot, node: NodeState, state: DeviceState, need: Need, limits: Limits) -> Iterator[EvictionSet]:
    for leaving in _leaving_sets(snapshot, node, state, need, limits):
        yield _eviction_set(node, [state], leaving, None)
    if not limits.may_change_layouts:
        return
    for layout in state.device.layouts:
        relayout = relayout_of(node, state.device, layout) if layout.name != state.device.layout.name else None
        if relayout is None or (relayout.reload_driver and not limits.may_reload_driver):
            continue
        yield from _under(snapshot, node, state, need, (relayout, layout))


def _under(
    snapshot: Snapshot, node: NodeState, state: DeviceState, need: Need, change: tuple[Relayout, Layout]
) -> Iterator[EvictionSet]:
    relayout, layout = change
    leaving = relayout.touched(node.devices)
    if not all(movable(snapshot, instance_id) for instance_id in leaving):
        return
    after = laid_out(_without(state, leaving), layout)
    if isinstance(fit_of(need, _lighter(snapshot, node, leaving), after), Fit):
        yield _eviction_set(node, [state], leaving, relayout)


def _leaving_sets(
    snapshot: Snapshot, node: NodeState, state: DeviceState, need: Need, limits: Limits
) -> Iterator[frozenset[str]]:
    """For each partition the smallest sets of instances whose leaving is enough; none of them holds a needless one."""
    unwanted = frozenset(grant.instance_id for grant in state.grants if grant.deployment in need.avoided)

    def may_leave(instance_id: str) -> bool:
        allowed = limits.may_move or victim_of(need.ask, snapshot, instance_id)
        return allowed and movable(snapshot, instance_id)

    def enough(leaving: Iterable[str]) -> bool:
        gone = unwanted | frozenset(leaving)
        return isinstance(fit_of(need, _lighter(snapshot, node, gone), _without(state, gone)), Fit)

    if not all(map(may_leave, unwanted)):
        return
    for partition in state.device.layout.partitions:
        held = {grant.instance_id: grant.memory_bytes for grant in state.grants if grant.partition_id == partition.id}
        usable = sorted(filter(may_leave, held), key=lambda instance_id: (-held[instance_id], instance_id))
        least = _least_on(state, need, partition)
        if len(usable) >= least and enough(usable):
            yield from (unwanted | found for found in _smallest(usable, least, enough))


def _smallest(usable: list[str], least: int, enough: Callable[[Iterable[str]], bool]) -> list[frozenset[str]]:
    """All sets of the least size that is enough; where too many would have to be tried, one that has no needless member."""
    candidates = usable[:_MOST_CANDIDATES]
    for size in range(least, max(min(len(candidates), _MOST_TOGETHER), min(least, len(candidates))) + 1):
        sets = [frozenset(chosen) for chosen in combinations(candidates, size) if enough(chosen)]
        if sets:
            return sets
    return [_trimmed(usable, enough)]


def _trimmed(usable: list[str], enough: Callable[[Iterable[str]], bool]) -> frozenset[str]:
    leaving = list(usable)
    for instance_id in reversed(usable):
        rest = [kept for kept in leaving if kept != instance_id]
        if enough(rest):
            leaving = rest
    return frozenset(leaving)


def _together(snapshot: Snapshot, node: NodeState, each: list[list[EvictionSet]], count: int) -> list[EvictionSet]:
    """The devices of a node that are cheapest to clear at once; an instance on two of them counts once."""
    rest = [evictions[0] for evictions in each if evictions]
    chosen: list[EvictionSet] = []
    leaving: frozenset[str] = frozenset()
    while rest and len(chosen) < count:
        rest.sort(
            key=lambda eviction: (eviction.weight[0], len(eviction.leaving - leaving), eviction.weight[2:], eviction.devices)
        )
        best = rest.pop(0)
        chosen.append(best)
        leaving |= best.leaving
    if len(chosen) < count:
        return []
    states = [state for state in node.devices if state.device.id in {eviction.devices[0] for eviction in chosen}]
    layouts: dict[str, Layout] = {}
    for eviction in chosen:
        layouts.update(eviction.relayout.layouts if eviction.relayout else {})
    reload_driver = any(eviction.relayout.reload_driver for eviction in chosen if eviction.relayout)
    relayout = Relayout(layouts=layouts, reload_driver=reload_driver) if layouts else None
    found = _eviction_set(node, states, leaving, relayout)
    return [found] if all(movable(snapshot, instance_id) for instance_id in leaving) else []


def _eviction_set(
    node: NodeState, states: list[DeviceState], leaving: frozenset[str], relayout: Relayout | None
) -> EvictionSet:
    held = sum(grant.memory_bytes for state in node.devices for grant in state.grants if grant.instance_id in leaving)
    reloads = int(relayout.reload_driver) if relayout else 0
    return EvictionSet(
        node=node.name,
        devices=tuple(sorted(state.device.id for state in states)),
        leaving=leaving,
        relayout=relayout,
        weight=(reloads, len(leaving), len(relayout.layouts) if relayout else 0, held),
    )


def _without(state: DeviceState, leaving: frozenset[str]) -> DeviceState:
    return replace(state, grants=tuple(grant for grant in state.grants if grant.instance_id not in leaving))


def _lighter(snapshot: Snapshot, node: NodeState, leaving: frozenset[str]) -> NodeState:
    """The node with the CPU and host memory of those who leave given back."""
    asks = [snapshot.running[instance_id] for instance_id in leaving if instance_id in snapshot.running]
    return replace(
        node,
        used_cpu_millis=node.used_cpu_millis - sum(ask.cpu_millis for ask in asks),
        used_host_memory_bytes=node.used_host_memory_bytes - sum(ask.host_memory_bytes for ask in asks),
    )
