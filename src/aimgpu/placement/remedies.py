"""The smallest changes that would turn a Refusal into a Placement, one sentence each."""

from collections.abc import Iterator
from dataclasses import replace

from aimgpu.domain import Fraction, Layout, Memory, OfKind
from aimgpu.placement.need import Need
from aimgpu.placement.offers import Offer, Shortfall, free_bytes, offer_of, stale_grants
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot
from aimgpu.units import format_bytes

_MOST_TRIED = 128


def would_fit(snapshot: Snapshot, need: Need) -> tuple[str, ...]:
    """Only changes that were tried on the Snapshot and do make it fit; the least disturbing first.

    In a large fleet only the Devices that came nearest are tried.
    """
    if need.count > 1:
        return tuple(_several(snapshot, need))
    best: dict[int, tuple[int, str]] = {}
    for node, state in _nearest(snapshot, need):
        for order, cost, text in _changes(need, node, state):
            if order not in best or (cost, text) < best[order]:
                best[order] = (cost, text)
    return tuple(text for _, (_, text) in sorted(best.items()))


def _nearest(snapshot: Snapshot, need: Need) -> list[tuple[NodeState, DeviceState]]:
    found = list(snapshot.devices())
    if len(found) <= _MOST_TRIED:
        return found
    misses = [(offer_of(need, node, state), node, state) for node, state in found]
    ranked = sorted(
        ((-miss.stage, miss.short_bytes or 0, len(state.grants), number), node, state)
        for number, (miss, node, state) in enumerate(misses)
        if isinstance(miss, Shortfall)
    )
    return [(node, state) for _, node, state in ranked[:_MOST_TRIED]]


def _several(snapshot: Snapshot, need: Need) -> Iterator[str]:
    """Fewer Devices, or the node where the fewest deployments would have to stop."""
    counts: dict[str, int] = {}
    stops: list[tuple[int, str, list[str]]] = []
    for node in sorted(snapshot.nodes, key=lambda node: node.name):
        each = sorted(_to_stop(need, node), key=lambda found: (len(found), found))
        counts[node.name] = sum(not found for found in each)
        if len(each) >= need.count:
            names = sorted({name for found in each[: need.count] for name in found})
            stops.append((len(names), node.name, names))
    most, name = max(((count, name) for name, count in counts.items()), default=(0, ""))
    if most:
        yield f"Ask for {most} Devices instead of {need.count}: {name} has so many that would do."
    if stops:
        _, name, names = min(stops)
        yield f"Stop {', '.join(names)}: then {name} has {need.count} Devices that would do."


def _to_stop(need: Need, node: NodeState) -> Iterator[list[str]]:
    """For each Device of the node that could do, the deployments that would have to stop; none where it does as it is."""
    for state in node.devices:
        if isinstance(offer_of(need, node, state), Offer):
            yield []
        elif state.grants and isinstance(offer_of(need, node, replace(state, grants=())), Offer):
            yield sorted({grant.deployment for grant in state.grants})


def _changes(need: Need, node: NodeState, state: DeviceState) -> Iterator[tuple[int, int, str]]:
    """(kind of change, cost, sentence) for everything that alone would make this Device do."""
    smaller = _smaller(need, node, state)
    if smaller is not None:
        yield 0, -smaller, f"Ask for at most {smaller}B ({format_bytes(smaller)}): {state.device.id} has that much free."
    for layout in state.device.layouts:
        if layout.name != state.device.layout.name and _fits_under(need, node, state, layout):
            stop = sorted({grant.deployment for grant in state.grants})
            first = f" after stopping {', '.join(stop)}" if stop else ""
            yield 1, len(stop), f"Lay {state.device.id} out as {layout.name}{first}."
    for deployment in sorted({grant.deployment for grant in state.grants} - {need.ask.deployment}):
        rest = tuple(grant for grant in state.grants if grant.deployment != deployment)
        freed = sum(grant.memory_bytes for grant in state.grants) - sum(grant.memory_bytes for grant in rest)
        if isinstance(offer_of(need, node, replace(state, grants=rest)), Offer):
            yield 2, freed, f"Stop {deployment} on {state.device.id}: that frees {format_bytes(freed)}."
    if state.foreign_bytes and isinstance(offer_of(need, node, replace(state, foreign_bytes={})), Offer):
        held = sum(state.foreign_bytes.values())
        yield 3, held, f"End the processes that are not ours on {state.device.id}: they hold {format_bytes(held)}."


def _smaller(need: Need, node: NodeState, state: DeviceState) -> int | None:
    """The greatest free Partition, where asking for that much would do."""
    if need.exclusive or isinstance(need.ask.want, OfKind):
        return None
    most = max((free_bytes(state, partition) for partition in state.device.layout.partitions), default=0)
    least = need.ask.footprint_bytes or 0
    if most <= 0 or (isinstance(need.ask.want, Fraction) and most < least):
        return None
    tried = replace(need, ask=replace(need.ask, want=Memory(memory_bytes=most), footprint_bytes=None), memory_bytes=most)
    return most if isinstance(offer_of(tried, node, state), Offer) else None


def _fits_under(need: Need, node: NodeState, state: DeviceState, layout: Layout) -> bool:
    """Whether the Device, emptied and laid out so, would do."""
    device = replace(state.device, layout=layout)
    emptied = replace(state, device=device, grants=(), foreign_bytes={})
    return not stale_grants(emptied) and isinstance(offer_of(need, node, emptied), Offer)
