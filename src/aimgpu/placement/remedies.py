"""The smallest changes that would turn a Refusal into a Placement, one sentence each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from aimgpu.domain import Auto, Grant, Layout, Memory, OfKind, Whole
from aimgpu.placement.layouts import laid_out, relayout_of
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.offers import Offer, Shortfall, free_bytes, offer_of, stale_grants
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot
from aimgpu.placement.wishes import weaker_wishes
from aimgpu.units import format_bytes

_MOST_TRIED = 128
_Change = tuple[int, tuple[int, ...], str]  # kind of change, cost, sentence


def would_fit(
    snapshot: Snapshot, need: Need, answers: Sequence[Offer | Shortfall], reserved: Mapping[str, int]
) -> tuple[str, ...]:
    """Only changes that were tried on the Snapshot and do make it fit; the least disturbing first.

    `answers` are those of its Devices, in their order. In a large fleet only the Devices that came nearest are tried. Nobody is
    told to stop the deployment that asks.
    """
    codes = {answer.code for answer in answers if isinstance(answer, Shortfall)}
    wishes = weaker_wishes(snapshot, need, reserved, codes)
    found = tuple(_several(snapshot, need, reserved)) if need.count > 1 else _of_one(snapshot, need, answers, reserved)
    return (*found, *wishes) or tuple(_additions(snapshot, need))


def _of_one(
    snapshot: Snapshot, need: Need, answers: Sequence[Offer | Shortfall], reserved: Mapping[str, int]
) -> tuple[str, ...]:
    """The best change of each kind, over all Devices."""
    best: dict[int, tuple[tuple[int, ...], str]] = {}
    pinned = frozenset(name for name, ask in snapshot.running.items() if ask.pinned)
    for node, state in _nearest(snapshot, answers):
        if reserved.get(node.name, 0) > need.count:
            continue
        for order, cost, text in _changes(need, node, state, pinned):
            if order not in best or (cost, text) < best[order]:
                best[order] = (cost, text)
    return tuple(text for _, (_, text) in sorted(best.items()))


def _additions(snapshot: Snapshot, need: Need) -> Iterator[str]:
    """Where nothing that is here can be made to do: what would have to be added."""
    for part, node, state in sorted(_parts(snapshot), key=lambda found: found[0]):
        for layout in state.device.layouts:
            if isinstance(offer_of(need, node, laid_out(state, layout)), Offer):
                what = f"a {part}" if need.count == 1 else f"a node with {need.count} x {part}"
                yield f"Add {what}: empty, laid out as {layout.name}, it would do."
                return
    wanted = max(need.ask.footprint_bytes or 0, need.memory_bytes or 0)
    layouts = [layout for _, state in snapshot.devices() for layout in state.device.layouts]
    if wanted > max((part.memory_bytes for layout in layouts for part in layout.partitions), default=0):
        yield f"Add a GPU with {format_bytes(wanted)} in one Partition: none here has that, even when it is empty."


def _parts(snapshot: Snapshot) -> Iterator[tuple[str, NodeState, DeviceState]]:
    """One empty Device of every part that is here, on a node that lacks nothing."""
    seen = set()
    for _, state in snapshot.devices():
        if state.device.part not in seen:
            seen.add(state.device.part)
            empty = replace(state, grants=(), foreign_bytes={})
            yield state.device.part, NodeState(name="", devices=(empty,)), empty


def _nearest(snapshot: Snapshot, answers: Sequence[Offer | Shortfall]) -> list[tuple[NodeState, DeviceState]]:
    found = list(snapshot.devices())
    if len(found) <= _MOST_TRIED:
        return found
    ranked = sorted(
        (-miss.stage, miss.short_bytes or 0, len(state.grants), number)
        for number, (miss, (_, state)) in enumerate(zip(answers, found, strict=True))
        if isinstance(miss, Shortfall)
    )
    return [found[number] for _, _, _, number in ranked[:_MOST_TRIED]]


def _several(snapshot: Snapshot, need: Need, reserved: Mapping[str, int]) -> Iterator[str]:
    """Fewer Devices, or the node where the fewest deployments would have to stop."""
    stops: list[tuple[int, str, list[str]]] = []
    for node in _open_nodes(snapshot, need.count, reserved):
        each = sorted(_to_stop(need, node), key=lambda found: (len(found), found))
        if len(each) >= need.count:
            names = sorted({name for found in each[: need.count] for name in found})
            stops.append((len(names), node.name, names))
    yield from _fewer(snapshot, need, reserved)
    if stops:
        _, name, names = min(stops)
        yield f"Stop {', '.join(names)}: then {name} has {need.count} Devices that would do."


def _fewer(snapshot: Snapshot, need: Need, reserved: Mapping[str, int]) -> Iterator[str]:
    """The most Devices that one node has; what the model needs is then shared by fewer, and all else stays as it was asked."""
    ask, needs = need.ask, need.ask.footprint_bytes
    for count in range(need.count - 1, 0, -1):
        each = None if needs is None else -(-needs * need.count // count)
        want, devices = (Whole(count=count), 1) if isinstance(ask.want, Whole) else (ask.want, count)
        tried = resolve_need(replace(ask, want=want, devices=devices, footprint_bytes=each))
        for node in _open_nodes(snapshot, count, reserved):
            if sum(isinstance(offer_of(tried, node, state), Offer) for state in node.devices) >= count:
                fewer = "1 Device" if count == 1 else f"{count} Devices"
                yield f"Ask for {fewer} instead of {need.count}: {node.name} has so many that would do."
                return


def _open_nodes(snapshot: Snapshot, count: int, reserved: Mapping[str, int]) -> list[NodeState]:
    """Nodes that are not held for Asks of more Devices."""
    return sorted((node for node in snapshot.nodes if reserved.get(node.name, 0) <= count), key=lambda node: node.name)


def _to_stop(need: Need, node: NodeState) -> Iterator[list[str]]:
    """For each Device of the node that could do, the deployments that would have to stop; none where it does as it is."""
    for state in node.devices:
        names = {grant.deployment for grant in state.grants}
        if isinstance(offer_of(need, node, state), Offer):
            yield []
        elif names and _own(need) not in names and isinstance(offer_of(need, node, replace(state, grants=())), Offer):
            yield sorted(names)


def _changes(need: Need, node: NodeState, state: DeviceState, pinned: frozenset[str]) -> Iterator[_Change]:
    """Everything that alone would make this Device do."""
    yield from _less_memory(need, node, state)
    for layout in state.device.layouts:
        if layout.name != state.device.layout.name:
            yield from _other_layout(need, node, state, layout, pinned)
    yield from _stops(need, node, state, pinned)
    if state.foreign_bytes and isinstance(offer_of(need, node, replace(state, foreign_bytes={})), Offer):
        held = sum(state.foreign_bytes.values())
        yield 3, (held,), f"End the processes that are not ours on {state.device.id}: they hold {format_bytes(held)}."


def _less_memory(need: Need, node: NodeState, state: DeviceState) -> Iterator[_Change]:
    """The greatest free Partition, where that much would do: never less than the model can run in."""
    if need.exclusive or isinstance(need.ask.want, OfKind):
        return
    most = max((free_bytes(state, partition) for partition in state.device.layout.partitions), default=0)
    if most <= 0:
        return
    tried = replace(need, ask=replace(need.ask, want=Memory(memory_bytes=most), footprint_bytes=None), memory_bytes=most)
    if not isinstance(offer_of(tried, node, state), Offer):
        return
    size = f"{most}B ({format_bytes(most)})"
    if most >= (need.ask.footprint_bytes or 0) and not isinstance(need.ask.want, Auto):
        yield 0, (-most,), f"Ask for at most {size}: {state.device.id} has that much free."
    elif need.ask.least_bytes is not None and most >= need.ask.least_bytes:
        how = "a shorter context or fewer requests at once"
        yield 0, (-most,), f"Let it need at most {size}, by {how}: {state.device.id} has that much free."


def _other_layout(need: Need, node: NodeState, state: DeviceState, layout: Layout, pinned: frozenset[str]) -> Iterator[_Change]:
    relayout = relayout_of(node, state.device, layout)
    if relayout is None:
        return
    leaving = relayout.touched(node.devices)
    grants = [grant for each in node.devices for grant in each.grants if grant.instance_id in leaving]
    stop = sorted({grant.deployment for grant in grants})
    rest = tuple(grant for grant in state.grants if grant.instance_id not in leaving)
    after = laid_out(replace(state, grants=rest), layout)
    if _own(need) in stop or stale_grants(after) or not isinstance(offer_of(need, node, after), Offer):
        return
    first = f" after stopping {', '.join(stop)}" if stop else ""
    reload = " (the driver is reloaded)" if relayout.reload_driver else ""
    cost = (int(relayout.reload_driver), _dear(need, grants, pinned), len(stop))
    yield 1, cost, f"Lay {state.device.id} out as {layout.name}{first}{reload}."


def _stops(need: Need, node: NodeState, state: DeviceState, pinned: frozenset[str]) -> Iterator[_Change]:
    """One deployment whose leaving is enough; where none is, the largest until it is."""
    held: dict[str, list[Grant]] = {}
    for grant in state.grants:
        if grant.deployment != _own(need):
            held.setdefault(grant.deployment, []).append(grant)
    found = [{name} for name in sorted(held) if _enough(need, node, state, {name})]
    if not found:
        several = set[str]()
        for name in sorted(held, key=lambda name: (-_bytes(held[name]), name)):
            several.add(name)
            if _enough(need, node, state, several):
                found.append(several)
                break
    for names in found:
        grants = [grant for name in names for grant in held[name]]
        freed = _bytes(grants)
        text = f"Stop {', '.join(sorted(names))} on {state.device.id}: that frees {format_bytes(freed)}."
        yield 2, (_dear(need, grants, pinned), len(names), freed), text


def _enough(need: Need, node: NodeState, state: DeviceState, names: set[str]) -> bool:
    rest = tuple(grant for grant in state.grants if grant.deployment not in names)
    return isinstance(offer_of(need, node, replace(state, grants=rest)), Offer)


def _bytes(grants: list[Grant]) -> int:
    return sum(grant.memory_bytes for grant in grants)


def _dear(need: Need, grants: list[Grant], pinned: frozenset[str]) -> int:
    """How many of these are pinned or matter more than who asks; advice to stop them comes last."""
    return sum(grant.priority.rank > need.ask.priority.rank or grant.instance_id in pinned for grant in grants)


def _own(need: Need) -> str:
    return need.ask.deployment or need.ask.name
