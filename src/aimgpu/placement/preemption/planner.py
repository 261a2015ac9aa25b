"""Making room: what to move, stop or lay out differently so that asks fit, as a plan that is shown before it is done."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from aimgpu.domain import Ask, Auto, Placement, Priority, Refusal, Slot, Whole
from aimgpu.errors import InvalidInput
from aimgpu.placement.advice.refusal import LateRefusal
from aimgpu.placement.affinity import affinity_first, anti_affinity, by_name
from aimgpu.placement.fit import free_bytes
from aimgpu.placement.layouts import with_relayout
from aimgpu.placement.need import resolve_need
from aimgpu.placement.preemption.eviction_sets import EvictionSet, Limits, eviction_sets, victim_of
from aimgpu.placement.preemption.move_plan import MovePlan
from aimgpu.placement.preemption.relayout import FITTED, fit_idle
from aimgpu.placement.preemption.steps import MoveTarget, plan_between
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.session import PlacementSession, placement_reason
from aimgpu.placement.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One plan for all asks that fit together, and a refusal for each that does not."""

    plan: MovePlan
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """A world in which the ask has its place."""

    after: Snapshot
    because: str
    stopped: frozenset[str]
    moved: frozenset[str]
    weight: tuple[int, ...]


def plan_for(snapshot: Snapshot, ask: Ask, limits: Limits | None = None) -> MovePlan | Refusal:
    """The least disturbing way to place the ask: as things are, else by layouts, moves, and stopping lower priority."""
    batch = plan_all(snapshot, [ask], limits)
    return batch.refusals[0] if batch.refusals else batch.plan


def plan_all(snapshot: Snapshot, asks: Sequence[Ask], limits: Limits | None = None) -> BatchPlan:
    """One plan for a set of asks, the most important and largest decided first. New ones may change place freely.

    First as things are; then with the layouts of idle devices chosen for the whole set; then by making room one by one.
    """
    _check_names(snapshot, asks)
    limits = limits or Limits()
    draft = _as_things_are(snapshot, asks)
    if draft.refusals and len(asks) > 1:
        draft = _together(snapshot, asks, limits)
    if draft.refusals:
        in_turn = _in_turn(_Draft(world=snapshot), asks, limits)
        draft = min((in_turn, draft), key=lambda each: _refused_by_rank(each, asks))
        draft = _asked_again(draft, [ask for ask in asks if ask.name in draft.refusals])
    placed = tuple(_placement_in(draft.world, ask, draft.fresh[ask.name]) for ask in asks if ask.name in draft.fresh)
    because = _because(len(placed), len(draft.stopped))
    plan = plan_between(snapshot, MoveTarget(after=draft.world, stopped=draft.stopped, placed=placed, because=because))
    return BatchPlan(plan=plan, refusals=tuple(draft.refusals[ask.name] for ask in asks if ask.name in draft.refusals))


def plan_consolidation(snapshot: Snapshot, devices: int, limits: Limits | None = None) -> MovePlan | Refusal:
    """Moves that free this number of whole devices of one node; nothing is stopped and nothing placed."""
    limits = replace(limits or Limits(), may_stop=False)
    probe = Ask(name="free-devices", want=Whole(count=devices))
    found = plan_for(snapshot, probe, limits)
    if isinstance(found, Refusal):
        return found
    steps = tuple(step for step in found.steps if not any(grant.instance_id == probe.name for grant in step.added))
    where = ", ".join(slot.device_id for slot in found.placements[0].slots)
    return replace(found, asks=(), placements=(), steps=steps, because=f"frees {where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    world: Snapshot
    ask: Ask
    limits: Limits
    fresh: frozenset[str]  # placed by this very plan: moving them costs nothing, stopping them is out of the question
    stopped: frozenset[str]
    mix: Mix


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """How far a plan has come: why each new ask is where it is, whom it stopped, whom it refused."""

    world: Snapshot
    fresh: Mapping[str, str] = field(default_factory=dict)
    stopped: frozenset[str] = frozenset()
    refusals: Mapping[str, Refusal] = field(default_factory=dict)


def _as_things_are(snapshot: Snapshot, asks: Sequence[Ask]) -> _Draft:
    session = PlacementSession(snapshot, mix=Mix.given(snapshot).with_asks(asks), planned=())
    decisions = {ask.name: session.place(ask) for ask in _in_order(asks)}
    return _Draft(
        world=session.snapshot,
        fresh={ask.name: session.how(ask) for ask in asks if isinstance(decisions[ask.name], Placement)},
        refusals={name: each for name, each in decisions.items() if isinstance(each, Refusal)},
    )


def _together(snapshot: Snapshot, asks: Sequence[Ask], limits: Limits) -> _Draft:
    """Onto idle devices as a set, once those who name a partition have it; who is left over in turn."""
    draft = _in_turn(_Draft(world=snapshot), [ask for ask in asks if ask.partition_id is not None], limits)
    rest = [ask for ask in asks if ask.partition_id is None]
    fitted = fit_idle(draft.world, rest, limits)
    fresh = {**draft.fresh, **{ask.name: FITTED for ask in rest if ask.name in fitted.placed}}
    return _in_turn(replace(draft, world=fitted.after, fresh=fresh), [ask for ask in rest if ask.name not in fresh], limits)


def _asked_again(draft: _Draft, refused: Sequence[Ask]) -> _Draft:
    """What was changed for later asks may do for earlier ones too; the refusals of the others describe the world at the end."""
    session = PlacementSession(draft.world, mix=Mix.given(draft.world).with_asks(refused), planned=draft.fresh)
    fresh = dict(draft.fresh)
    for ask in _in_order(refused):
        decision = _place(session, ask)
        if decision is not None:
            fresh[ask.name] = session.how(ask)
    left = [ask for ask in refused if ask.name not in fresh]
    return replace(draft, world=session.snapshot, fresh=fresh, refusals=_refusals_in(session, left, draft.refusals))


def _refusals_in(session: PlacementSession, asks: Sequence[Ask], before: Mapping[str, Refusal]) -> dict[str, Refusal]:
    """In this world; those from before where its layouts have no such partition any more. Equal asks share their reasons."""
    found: dict[str, Refusal] = {}
    cases: dict[Ask, Refusal] = {}
    for ask in asks:
        known = cases.get(_nameless(ask))
        if isinstance(known, LateRefusal):
            found[ask.name] = known.for_another(ask.name)
            continue
        decision = session.decide(ask) if ask.partition_id is None or ask.partition_id in session.fleet.cells else None
        refusal = decision if isinstance(decision, Refusal) else before[ask.name]
        found[ask.name] = cases[_nameless(ask)] = refusal
    return found


def _nameless(ask: Ask) -> Ask:
    return replace(ask, name="")


def _refused_by_rank(draft: _Draft, asks: Sequence[Ask]) -> tuple[int, ...]:
    """How many of each priority go without, the most important first."""
    refused = Counter(ask.priority for ask in asks if ask.name in draft.refusals)
    return tuple(refused[priority] for priority in sorted(Priority, key=lambda each: -each.rank))


def _check_names(snapshot: Snapshot, asks: Sequence[Ask]) -> None:
    twice = sorted(name for name, count in Counter(ask.name for ask in asks).items() if count > 1 or name in snapshot.running)
    if twice:
        raise InvalidInput(f"requested more than once: {', '.join(twice)}", hint="Give every instance a name of its own.")


def _in_turn(draft: _Draft, asks: Sequence[Ask], limits: Limits) -> _Draft:
    """Place each ask in turn, making room where needed; after each change a new session begins."""
    mix = Mix.given(draft.world).with_asks(asks)
    session = PlacementSession(draft.world, mix=mix, planned=draft.fresh)
    hopeless = set[Ask]()  # since room was last made: what is placed leaves less of it
    for ask in _in_order(asks):
        decision = session.place(ask)
        if isinstance(decision, Placement):
            draft = replace(draft, fresh={**draft.fresh, ask.name: session.how(ask)})
            continue
        if _nameless(ask) in hopeless:
            draft = replace(draft, refusals={**draft.refusals, ask.name: decision})
            continue
        search = _Search(
            world=session.snapshot, ask=ask, limits=limits, fresh=frozenset(draft.fresh), stopped=draft.stopped, mix=mix
        )
        room = _make_room(search)
        if room is None:
            hopeless.add(_nameless(ask))
            draft = replace(draft, refusals={**draft.refusals, ask.name: decision})
        else:
            hopeless.clear()
            because = {**draft.fresh, ask.name: room.because}
            draft = replace(draft, fresh=because, stopped=draft.stopped | room.stopped)
            session = PlacementSession(room.after, mix=mix, planned=because)
    return replace(draft, world=session.snapshot)


def _make_room(search: _Search) -> _Room | None:
    best: _Room | None = None
    tried = search.limits.most_tried
    avoiders = anti_affinity(search.world.running.values()).get(search.ask.deployment or search.ask.name, frozenset())
    evictions = eviction_sets(search.world, resolve_need(search.ask, avoiders), search.limits) if tried else []
    for eviction in evictions[:tried]:
        room = _realise(search, eviction)
        if room is not None and (best is None or room.weight < best.weight):
            best = room
        if best is not None and not best.stopped and not best.moved:
            break
    return best


def _realise(search: _Search, eviction: EvictionSet) -> _Room | None:
    """The world after this clearing, if everyone who leaves finds a place or may be stopped."""
    world = search.world
    for instance_id in sorted(eviction.leaving):
        world = world.without_instance(instance_id)
    if eviction.relayout is not None:
        world = with_relayout(world, eviction.node, eviction.relayout)
    session = PlacementSession(world, mix=search.mix)
    placement = _place(session, search.ask)
    if placement is None:
        return None
    stopped = set()
    for instance_id in _largest_first(search.world, eviction.leaving):
        again = ask_again(search.world, instance_id)
        if (search.limits.may_move or instance_id in search.fresh) and _place(session, again):
            continue
        if not _may_stop(search, instance_id):
            return None
        stopped.add(instance_id)
    room = _Room(
        after=session.snapshot, because=session.how(search.ask), stopped=frozenset(stopped), moved=eviction.leaving, weight=()
    )
    return _checked(search, eviction, room)


def _place(session: PlacementSession, ask: Ask) -> Placement | None:
    """Where it goes in a changed world; who named a partition that the new layout takes away goes nowhere."""
    if ask.partition_id is not None and ask.partition_id not in session.fleet.cells:
        return None
    decision = session.place(ask)
    return decision if isinstance(decision, Placement) else None


def _checked(search: _Search, eviction: EvictionSet, room: _Room) -> _Room | None:
    """The room with its weight, if it stays within the limits."""
    limits = search.limits
    moved = room.moved - room.stopped - search.fresh
    stops = len(room.stopped) + len(search.stopped)
    if len(moved) > limits.most_moves or stops > limits.most_stops:
        return None
    if room.stopped and search.world.recent_preemptions + stops > limits.stops_an_hour:
        return None
    held = _held(search.world)
    weight = (
        len(room.stopped),
        sum(held[instance_id] for instance_id in room.stopped),
        eviction.weight[0],
        len(moved),
        eviction.weight[2],
        sum(held[instance_id] for instance_id in moved),
    )
    return replace(room, moved=moved, weight=weight)


def _may_stop(search: _Search, instance_id: str) -> bool:
    allowed = search.limits.may_stop and instance_id not in search.fresh
    return allowed and victim_of(search.ask, search.world, instance_id)


def ask_again(snapshot: Snapshot, instance_id: str) -> Ask:
    """The ask of a running instance, made so that it can be placed again with what it holds."""
    ask = snapshot.running[instance_id]
    grants = [grant for _, state in snapshot.devices() for grant in state.grants if grant.instance_id == instance_id]
    footprint = ask.footprint_bytes
    if isinstance(ask.want, Auto) and footprint is None:
        footprint = max((grant.memory_bytes for grant in grants), default=0)
    deployment = ask.deployment or (grants[0].deployment if grants else None)
    return replace(ask, name=instance_id, footprint_bytes=footprint, deployment=deployment)


def _placement_in(world: Snapshot, ask: Ask, how: str) -> Placement:
    """Where a new ask ended up, with what is left there in the end: it may have moved since it was first placed."""
    slots, left = list[Slot](), list[int]()
    for _, state in world.devices():
        for grant in state.grants:
            partition = state.device.partition(grant.partition_id) if grant.instance_id == ask.name else None
            if partition is not None:
                slots.append(Slot.of(grant))
                left.append(free_bytes(state, partition))
    return Placement(ask=ask.name, slots=tuple(slots), because=placement_reason(how, slots, left))


def _held(snapshot: Snapshot) -> dict[str, int]:
    held: dict[str, int] = {}
    for _, state in snapshot.devices():
        for grant in state.grants:
            held[grant.instance_id] = held.get(grant.instance_id, 0) + grant.memory_bytes
    return held


def _largest_first(snapshot: Snapshot, names: frozenset[str]) -> list[str]:
    held = _held(snapshot)
    return sorted(names, key=lambda name: (-snapshot.running[name].priority.rank, -held.get(name, 0), name))


def _in_order(asks: Sequence[Ask]) -> list[Ask]:
    """Asks that name a partition first, then the most important and largest; after those that they must run with."""
    return affinity_first(sorted(asks, key=_importance))


def _importance(ask: Ask) -> tuple[object, ...]:
    need = resolve_need(ask)
    return (
        ask.partition_id is None,
        -ask.priority.rank,
        -need.count,
        not need.exclusive,
        -(need.memory_bytes or 0),
        by_name(ask),
    )


def _because(placed: int, stopped: int) -> str:
    what = f"{placed} instances placed" if placed != 1 else "1 instance placed"
    return f"{what}, {stopped} lower-priority instances stopped" if stopped else f"{what}, nothing stopped"
