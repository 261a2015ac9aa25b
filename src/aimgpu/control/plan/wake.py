"""What waking a deployment would do: where it sleeps, elsewhere, or in place of others that may be unloaded. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from aimgpu.control.plan.asleep import as_if_asleep, awake_grants, can_wake_in_place, least_unloading, with_grants
from aimgpu.control.plan.eviction import Resident, choose_evictions
from aimgpu.control.plan.prepared import Prepared, ask_for
from aimgpu.control.plan.stack import find_changes
from aimgpu.control.plan.steps import (
    GONE,
    Chain,
    ControlState,
    Plan,
    PutToSleep,
    Release,
    Start,
    Step,
    Unload,
    Wake,
    without_instances,
)
from aimgpu.domain import Deployment, Instance, InstanceState, Placement, Refusal, Slot
from aimgpu.placement import Snapshot
from aimgpu.placement.affinity import anti_affinity
from aimgpu.placement.decide import decide_all

_UNLOADED = GONE | {InstanceState.SLEEPING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """Who may be unloaded for a wake, and who waits for room too."""

    residents: Sequence[Resident] = ()
    least_residency_seconds: float = 0.0
    waited_seconds: float = 0.0  # by the callers of the one that wakes
    ahead: Sequence[Prepared] = ()  # of higher priority, refused before and still waiting
    only_free: bool = False  # not even what others hold asleep is unloaded for it


def plan_wake(item: Prepared, state: ControlState, rivals: Rivals | None = None) -> Plan:
    """As many replicas as fit; if none does, the cheapest of the residents are unloaded for it.

    Never one of higher priority, and none that is kept loaded. Room that fits a deployment `ahead` is left to it.
    """
    rivals = rivals or Rivals()
    held = _with_ahead(state, rivals.ahead)
    plan = _plan_once(item, held, ()) if rivals.only_free else _plan(item, held)
    if not plan.refusals or rivals.only_free:
        return plan
    names = _evictions(item, held, rivals)
    if not names:
        return replace(plan, room_may_come=_may_room_come(item, held))
    victims = [one for one in state.running if one.deployment in names and one.state is InstanceState.READY]
    left, after = as_if_asleep(held.snapshot, held.running, names)
    plan = _plan(item, replace(held, snapshot=left, running=tuple(after)))
    if plan.refusals:
        return plan
    ends: Chain = tuple(
        PutToSleep(
            deployment=one.deployment,
            replica=one.replica,
            instance_id=one.id,
            beneficiary=item.name,
            forced=any(grant.priority.rank < item.deployment.ask.priority.rank for grant in one.grants),
        )
        for one in victims
    )
    (chain,) = plan.chains
    return replace(plan, chains=((*ends, *chain),))


def _plan(item: Prepared, state: ControlState) -> Plan:
    def attempt(unloaded: Sequence[Instance]) -> Plan:
        left = replace(state, snapshot=without_instances(state.snapshot, [one.id for one in unloaded]))
        return _plan_once(item, left, [Unload.of(one) for one in unloaded])

    def is_enough(unloaded: Sequence[Instance]) -> bool:
        return not attempt(unloaded).refusals

    sleepers = [one for one in state.running if one.sleeps_in_place and one.grants and one.deployment != item.name]
    if not sleepers or is_enough(()):
        return attempt(())
    chosen = least_unloading(sleepers, is_enough)
    return attempt(chosen) if chosen is not None else attempt(())


def _plan_once(item: Prepared, state: ControlState, unloads: Sequence[Unload]) -> Plan:
    wakes, state = _find_wakes(item, state)
    (changes,) = find_changes([item], state, _UNLOADED)
    ends = [old.id for olds in changes.olds.values() for old in olds]
    decisions = decide_all(without_instances(state.snapshot, ends), [ask_for(item, replica) for replica in changes.missing])
    placed = {replica: found for replica, found in zip(changes.missing, decisions, strict=True) if isinstance(found, Placement)}
    refusals = tuple(found for found in decisions if isinstance(found, Refusal))
    serving = any(one.state is InstanceState.READY for one in state.of(item.name))
    if refusals and not (placed or wakes or serving):
        return Plan(operation="wake", refusals=refusals)
    releases = [Release.of(old) for replica in placed for old in changes.olds.get(replica, ())]
    starts = [Start(prepared=item, replica=replica, placement=found) for replica, found in placed.items()]
    chain: tuple[Step, ...] = (*unloads, *releases, *wakes, *starts)
    return Plan(operation="wake", chains=(chain,) if chain else ())


def _find_wakes(item: Prepared, state: ControlState) -> tuple[list[Wake], ControlState]:
    """Its instances that can wake where they sleep, and the state once they have what they need."""
    steps: list[Wake] = []
    after: list[Instance] = []
    snapshot = state.snapshot
    for instance in state.running:
        if instance.deployment == item.name and can_wake_in_place(snapshot, instance, _avoided(snapshot, item.deployment)):
            grants = awake_grants(instance)
            snapshot = with_grants(snapshot, instance.id, grants)
            slots = tuple(Slot.of(grant) for grant in grants)
            steps.append(Wake(prepared=item, replica=instance.replica, instance_id=instance.id, slots=slots))
            after.append(replace(instance, state=InstanceState.LOADING, grants=grants))
        else:
            after.append(instance)
    return steps, replace(state, snapshot=snapshot, running=tuple(after))


def _avoided(snapshot: Snapshot, deployment: Deployment) -> frozenset[str]:
    """Deployments that it does not want beside it, and that do not want it."""
    others = anti_affinity(snapshot.running.values()).get(deployment.name, frozenset())
    return deployment.ask.not_with_deployments | others


def _evictions(item: Prepared, state: ControlState, rivals: Rivals) -> Collection[str]:
    rank = item.deployment.ask.priority.rank
    others = [one for one in rivals.residents if one.name != item.name and one.priority.rank <= rank]
    return (
        choose_evictions(
            others, _fits_without(item, state), rivals.least_residency_seconds, rank=rank, waited_seconds=rivals.waited_seconds
        )
        or ()
    )


def _fits_without(item: Prepared, state: ControlState) -> Callable[[Collection[str]], bool]:
    """Whether it could wake once the deployments of these names sleep."""

    def fits(names: Collection[str]) -> bool:
        left, after = as_if_asleep(state.snapshot, state.running, names)
        return not _plan(item, replace(state, snapshot=left, running=tuple(after))).refusals

    return fits


def _may_room_come(item: Prepared, state: ControlState) -> bool:
    """Whether it would fit if all that is not kept loaded always slept: those are busy or were just loaded."""
    names = {one.name for one in state.wanted.values() if one.keep_seconds is not None and one.name != item.name}
    loaded = tuple(
        replace(one, state=InstanceState.READY) if one.deployment in names and one.grants and not one.sleeps_in_place else one
        for one in state.running
    )
    return _fits_without(item, replace(state, running=loaded))(names)


def _with_ahead(state: ControlState, ahead: Sequence[Prepared]) -> ControlState:
    """The state in which those ahead that would fit now have their room."""
    for other in ahead:
        wakes, state = _find_wakes(other, state)
        ask = ask_for(other, 0)
        if wakes or ask.name in state.snapshot.running:
            continue
        (decision,) = decide_all(state.snapshot, [ask])
        if isinstance(decision, Placement):
            state = replace(state, snapshot=state.snapshot.with_placement(ask, decision))
    return state
