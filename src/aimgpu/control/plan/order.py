"""The order in which changed replicas are replaced: ready before the old one drains where there is room. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from aimgpu.control.plan.asleep import has_room
from aimgpu.control.plan.prepared import ask_for
from aimgpu.control.plan.steps import GONE, Begin, Chain, Release, Start, Step, Unload, without_instances
from aimgpu.domain import Instance, InstanceState
from aimgpu.placement import Snapshot

_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One replica: what ends and what begins in its place."""

    olds: tuple[Instance, ...]
    begin: Begin | None

    @property
    def serves(self) -> bool:
        """Whether callers would miss the old one."""
        return any(old.state is InstanceState.READY for old in self.olds)


def order_steps(
    by_deployment: Sequence[Sequence[Replacement]],
    snapshot: Snapshot,
    *,
    unloads: Sequence[Unload] = (),
    going: Sequence[Instance] = (),
) -> tuple[Chain, ...]:
    """Chains that may run side by side: one per deployment that is replaced, one for everything that is new.

    `going`: what merely ends. Where a start needs room that something else gives up, everything is one chain.
    """
    releases = [Release.of(one) for one in going]
    chains = None if unloads else _independent(by_deployment, snapshot)
    if chains is not None:
        return (*((one,) for one in releases), *chains)
    ends = [Release.of(old) for each in by_deployment for one in each for old in one.olds]
    begins = [one.begin for each in by_deployment for one in each if one.begin is not None]
    whole = (*releases, *unloads, *ends, *begins)
    return (whole,) if whole else ()


def _independent(by_deployment: Sequence[Sequence[Replacement]], snapshot: Snapshot) -> tuple[Chain, ...] | None:
    fresh: list[Step] = []
    chains: list[Chain] = []
    ends_something = any(one.olds for each in by_deployment for one in each)
    held = snapshot  # as chains that run beside each other see it: what another chain ends may still be there
    for replacements in by_deployment:
        chain: list[Step] = []
        removed: list[Step] = []  # failed ones, which hold nothing: what replaces them starts side by side
        again: list[Step] = []
        mine = held  # as this chain sees it, step by step
        for one in replacements:
            olds = [old.id for old in one.olds]
            ends = [Release.of(old) for old in one.olds]
            cleared = without_instances(snapshot, olds)
            if not isinstance(one.begin, Start):
                chain += [*ends, *([one.begin] if one.begin else [])]
                snapshot, mine = cleared, without_instances(mine, olds)
                continue
            at_once = not ends_something or _fits(held, one.begin)
            beside = one.serves and _fits(snapshot, one.begin) and _fits(mine, one.begin)
            in_turn = True
            if ends_something:
                held, mine = _with_most(held, one, beside=beside), without_instances(mine, olds)
                in_turn, mine = _fits(mine, one.begin), _with_start(mine, one.begin)
            if beside:
                chain += [one.begin, *ends]
                cleared = snapshot  # the old one stays until the new one serves
            elif not (in_turn and _fits(cleared, one.begin)):
                return None
            elif at_once and not one.olds:
                fresh.append(one.begin)
            elif at_once and all(old.state in GONE and not old.grants for old in one.olds):
                removed += ends
                again.append(one.begin)
            else:
                chain += [*ends, one.begin]
            snapshot = _with_start(cleared, one.begin)
        if removed or chain:
            chains.append((*removed, *again, *chain))
    return (*((tuple(fresh),) if fresh else ()), *chains)


def _fits(snapshot: Snapshot, start: Start) -> bool:
    states = {state.device.id: state for _, state in snapshot.devices()}
    return all(has_room(states.get(slot.device_id), slot, _NOBODY) for slot in start.slots)


def _with_start(snapshot: Snapshot, start: Start) -> Snapshot:
    return snapshot.with_placement(ask_for(start.prepared, start.replica), start.placement)


def _with_most(held: Snapshot, one: Replacement, *, beside: bool) -> Snapshot:
    """With the most that this replacement holds at any moment: the old copy, the new one, or both."""
    start = one.begin
    if not isinstance(start, Start):
        return held
    old = {grant.partition_id: grant.memory_bytes for each in one.olds for grant in each.grants}
    new = {slot.partition_id: slot.memory_bytes for slot in start.slots}
    if not beside and old and all(old.get(partition, 0) >= size for partition, size in new.items()):
        return held
    if not beside and all(new.get(partition, 0) >= size for partition, size in old.items()):
        return _with_start(without_instances(held, [each.id for each in one.olds]), start)
    return _with_start(held, start)
