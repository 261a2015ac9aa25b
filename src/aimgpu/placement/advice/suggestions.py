"""The smallest changes that would turn a refusal into a placement, one sentence each."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from aimgpu.domain import Ask, Auto, Grant, Layout, Memory, PartitionKind, Whole
from aimgpu.placement.advice.relaxations import divided, weaker_wishes
from aimgpu.placement.fit import Fit, Misfit, fit_of, free_bytes, stale_grants
from aimgpu.placement.layouts import laid_out, relayout_of
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot
from aimgpu.units import format_bytes, parse_bytes

_MOST_TRIED = 128
_Change = tuple[int, tuple[int, ...], str]  # kind of change, cost, sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Others:
    """Who holds what is wanted: not to be stopped lightly, or not even running yet."""

    pinned: frozenset[str]  # instances
    planned: frozenset[str]  # deployments that were given a place for the same batch of asks

    @classmethod
    def of(cls, snapshot: Snapshot, planned: Collection[str]) -> "_Others":
        held = [grant for _, state in snapshot.devices() for grant in state.grants] if planned else []
        running = {grant.deployment for grant in held if grant.instance_id not in planned}
        return cls(
            pinned=frozenset(name for name, ask in snapshot.running.items() if ask.pinned),
            planned=frozenset(grant.deployment for grant in held) - running,
        )

    def leave(self, names: Iterable[str]) -> str:
        """What has to be done so that these deployments are not there."""
        stop, out = self._split(names)
        return " and ".join((*(f"stop {each}" for each in stop), *(f"leave {each} out" for each in out)))

    def leaving(self, names: Iterable[str]) -> str:
        stop, out = self._split(names)
        return " and ".join((*(f"stopping {each}" for each in stop), *(f"leaving out {each}" for each in out)))

    def _split(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        groups = (sorted(set(names) - self.planned), sorted(set(names) & self.planned))
        stop, out = ([", ".join(group)] if group else [] for group in groups)
        return stop, out


def would_fit(
    snapshot: Snapshot,
    need: Need,
    answers: Sequence[Fit | Misfit],
    reserved: Mapping[str, int],
    planned: Collection[str] = frozenset(),
) -> tuple[str, ...]:
    """Only changes that were tried on the snapshot and do make it fit; the least disturbing first.

    `answers` are those of its devices, in their order. In a large fleet only the devices that came nearest are tried. No
    suggestion stops the deployment that asks, nor one that was only `planned` (by instance): that can be left out.
    """
    codes = {answer.code for answer in answers if isinstance(answer, Misfit)}
    others = _Others.of(snapshot, planned)
    more, wishes = weaker_wishes(snapshot, need, reserved, codes)
    if need.count > 1:
        found = tuple(_several(snapshot, need, reserved, others))
    else:
        found = _of_one(snapshot, need, answers, reserved, others)
    advice = (*more, *found, *wishes)
    return (*advice, *_additions(snapshot, need, bare=not advice)) if others.planned or not advice else advice


def _of_one(
    snapshot: Snapshot, need: Need, answers: Sequence[Fit | Misfit], reserved: Mapping[str, int], others: _Others
) -> tuple[str, ...]:
    """The best change of each kind, over all devices."""
    best: dict[int, tuple[tuple[int, ...], str]] = {}
    for node, state in _nearest(snapshot, answers):
        if reserved.get(node.name, 0) > need.whole_devices:
            continue
        for order, cost, text in _changes(need, node, state, others):
            if order not in best or (cost, text) < best[order]:
                best[order] = (cost, text)
    return tuple(text for _, (_, text) in sorted(best.items()))


def _additions(snapshot: Snapshot, need: Need, *, bare: bool) -> Iterator[str]:
    """What would have to be added; `bare`, where nothing else helps, also for the ask without its affinity."""
    for ask, first, how in _as_asked_or_nearly(need.ask, bare=bare):
        tried = resolve_need(ask)
        for product, node, state in sorted(_products(snapshot), key=lambda found: found[0]):
            for layout in state.device.layouts:
                if isinstance(fit_of(tried, node, laid_out(state, layout)), Fit):
                    what = f"a {product}" if tried.count == 1 else f"a node with {tried.count} x {product}"
                    yield f"{_sentence(f'{first}add {what}')}: {how} and laid out as {layout.name}, it fits."
                    return
    wanted = max(need.ask.footprint_bytes or 0, need.memory_bytes or 0)
    layouts = [layout for _, state in snapshot.devices() for layout in state.device.layouts]
    if wanted > max((partition.memory_bytes for layout in layouts for partition in layout.partitions), default=0):
        yield f"Add a GPU with {format_bytes(wanted, up=True)} in one partition: none here has that, even when empty."
    elif need.products and not any(state.device.product.casefold() in need.products for _, state in snapshot.devices()):
        yield f"Add a {' or a '.join(sorted(need.ask.products))}: there is none, and the request accepts no other."


def _as_asked_or_nearly(ask: Ask, *, bare: bool) -> Iterator[tuple[Ask, str, str]]:
    """The ask, with what else is to be done for it, and how it would then stand."""
    yield ask, "", "empty"
    for over, how in divided(ask):
        yield over, "", f"empty, the model split over them ({how})"
    if bare and ask.with_deployments:
        names = ", ".join(sorted(ask.with_deployments))
        yield replace(ask, with_deployments=frozenset()), f"let it run without {names} and ", "empty"


def _products(snapshot: Snapshot) -> Iterator[tuple[str, NodeState, DeviceState]]:
    """One empty device of every product that is here, on a node that lacks nothing."""
    seen = set()
    for _, state in snapshot.devices():
        if state.device.product not in seen:
            seen.add(state.device.product)
            empty = replace(state, grants=(), foreign_bytes={})
            yield state.device.product, NodeState(name="", devices=(empty,)), empty


def _nearest(snapshot: Snapshot, answers: Sequence[Fit | Misfit]) -> list[tuple[NodeState, DeviceState]]:
    found = list(snapshot.devices())
    if len(found) <= _MOST_TRIED:
        return found
    ranked = sorted(
        (-miss.stage, miss.short_bytes or 0, len(state.grants), number)
        for number, (miss, (_, state)) in enumerate(zip(answers, found, strict=True))
        if isinstance(miss, Misfit)
    )
    return [found[number] for _, _, _, number in ranked[:_MOST_TRIED]]


def _several(snapshot: Snapshot, need: Need, reserved: Mapping[str, int], others: _Others) -> Iterator[str]:
    """Fewer devices, or the node where the fewest deployments would have to stop."""
    stops: list[tuple[int, str, list[str]]] = []
    for node in _open_nodes(snapshot, need, reserved):
        each = sorted(_to_stop(need, node), key=lambda found: (len(found), found))
        if len(each) >= need.count:
            names = sorted({name for found in each[: need.count] for name in found})
            stops.append((len(names), node.name, names))
    yield from _fewer(snapshot, need, reserved)
    if stops:
        _, name, names = min(stops)
        yield f"{_sentence(others.leave(names))}: then {need.count} GPUs of {name} fit."


def _fewer(snapshot: Snapshot, need: Need, reserved: Mapping[str, int]) -> Iterator[str]:
    """The most devices that one node has; what the model needs is then shared by fewer, and all else stays as it was asked."""
    ask, needs = need.ask, need.ask.footprint_bytes
    most = {node.name: need.count for node in snapshot.nodes}  # devices of a node that could do
    for count in range(need.count - 1, 0, -1):
        each = None if needs is None else -(-needs * need.count // count)
        want, devices = (Whole(count=count), 1) if isinstance(ask.want, Whole) else (ask.want, count)
        tried = resolve_need(replace(ask, want=want, devices=devices, footprint_bytes=each), need.avoided)
        for node in _open_nodes(snapshot, tried, reserved):
            if most[node.name] < count:
                continue  # each would have to hold more than in the case that did not fit
            most[node.name] = sum(isinstance(fit_of(tried, node, state), Fit) for state in node.devices)
            if most[node.name] >= count:
                fewer = "1 GPU" if count == 1 else f"{count} GPUs"
                yield f"Request {fewer} instead of {need.count}: {node.name} has that many."
                return


def _open_nodes(snapshot: Snapshot, need: Need, reserved: Mapping[str, int]) -> list[NodeState]:
    """Nodes that are not held for asks of more devices."""
    found = (node for node in snapshot.nodes if reserved.get(node.name, 0) <= need.whole_devices)
    return sorted(found, key=lambda node: node.name)


def _to_stop(need: Need, node: NodeState) -> Iterator[list[str]]:
    """For each device of the node that could do, the deployments that would have to stop; none where it does as it is."""
    for state in node.devices:
        names = {grant.deployment for grant in state.grants}
        if isinstance(fit_of(need, node, state), Fit):
            yield []
        elif names and _own(need) not in names and isinstance(fit_of(need, node, replace(state, grants=())), Fit):
            yield sorted(names)


def _changes(need: Need, node: NodeState, state: DeviceState, others: _Others) -> Iterator[_Change]:
    """Every single change that would make the ask fit on this device."""
    yield from _less_memory(need, node, state)
    for layout in state.device.layouts:
        if layout.name != state.device.layout.name:
            yield from _other_layout(need, node, state, layout, others)
    yield from _stops(need, node, state, others)
    if state.foreign_bytes and isinstance(fit_of(need, node, replace(state, foreign_bytes={})), Fit):
        held = sum(state.foreign_bytes.values())
        yield 4, (held,), f"End the other {state.foreign_kind} on {state.device.id}: they use {format_bytes(held)}."


def _less_memory(need: Need, node: NodeState, state: DeviceState) -> Iterator[_Change]:
    """The greatest free partition, where that much would do: never less than the model can run in."""
    if need.exclusive or isinstance(need.ask.want, PartitionKind):
        return
    asked, needs = need.bytes_on(state.device.memory_bytes), need.ask.footprint_bytes or 0
    free = max((free_bytes(state, partition) for partition in state.device.layout.partitions), default=0)
    most = min(free, asked)
    if most <= 0:
        return
    tried = replace(need, ask=replace(need.ask, want=Memory(memory_bytes=most), footprint_bytes=None), memory_bytes=most)
    if not isinstance(fit_of(tried, node, state), Fit):
        return
    size = format_bytes(most)
    if parse_bytes(size) < (needs if most >= needs else need.ask.least_bytes or 0):
        size = f"{most}B"  # rounded down it would be too little
    if most >= needs and most < asked and not isinstance(need.ask.want, Auto):
        yield 0, (-most,), f"Request at most {size}: {state.device.id} has that much free."
    elif most < needs and (isinstance(need.ask.want, Auto) or most == asked) and _runs_in(need, most):
        how = "a shorter context or fewer concurrent requests"
        yield 0, (-most,), f"Reduce it to {size} with {how}: {state.device.id} has that much free."


def _runs_in(need: Need, memory_bytes: int) -> bool:
    return need.ask.least_bytes is not None and memory_bytes >= need.ask.least_bytes


def _other_layout(need: Need, node: NodeState, state: DeviceState, layout: Layout, others: _Others) -> Iterator[_Change]:
    relayout = relayout_of(node, state.device, layout)
    if relayout is None:
        return
    leaving = relayout.touched(node.devices)
    grants = [grant for each in node.devices for grant in each.grants if grant.instance_id in leaving]
    stop = sorted({grant.deployment for grant in grants})
    rest = tuple(grant for grant in state.grants if grant.instance_id not in leaving)
    after = laid_out(replace(state, grants=rest), layout)
    if _own(need) in stop or stale_grants(after) or not isinstance(fit_of(need, node, after), Fit):
        return
    if stop and _enough(need, node, state, set(stop)):
        return  # their leaving does without another layout
    first = f" after {others.leaving(stop)}" if stop else ""
    reload = " (reloads the driver)" if relayout.reload_driver else ""
    cost = (int(relayout.reload_driver), _dear(need, grants, others), len(stop))
    order = 3 if stop or relayout.reload_driver else 1
    yield order, cost, f"Repartition {state.device.id} as {layout.name}{first}{reload}."


def _stops(need: Need, node: NodeState, state: DeviceState, others: _Others) -> Iterator[_Change]:
    """One deployment whose leaving is enough; if none is, the largest until it is."""
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
        where = f" on {state.device.id}"
        here, there = ("", where) if names & others.planned else (where, "")
        text = f"{_sentence(others.leave(names))}{here}: that frees {format_bytes(freed)}{there}."
        yield 2, (_dear(need, grants, others), len(names), freed), text


def _enough(need: Need, node: NodeState, state: DeviceState, names: set[str]) -> bool:
    rest = tuple(grant for grant in state.grants if grant.deployment not in names)
    return isinstance(fit_of(need, node, replace(state, grants=rest)), Fit)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _bytes(grants: list[Grant]) -> int:
    return sum(grant.memory_bytes for grant in grants)


def _dear(need: Need, grants: list[Grant], others: _Others) -> int:
    """How many of these are pinned or matter more than who asks; advice to stop them comes last."""
    return sum(grant.priority.rank > need.ask.priority.rank or grant.instance_id in others.pinned for grant in grants)


def _own(need: Need) -> str:
    return need.ask.deployment or need.ask.name
