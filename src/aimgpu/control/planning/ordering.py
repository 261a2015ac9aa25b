"""The order in which changed replicas are replaced: ready before the old one drains where there is room. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from aimgpu.control.planning.plan import GONE, without_instances
from aimgpu.control.planning.prepared import ask_for
from aimgpu.control.planning.steps import Begin, Chain, Release, Start, Step, Unload
from aimgpu.control.sleep.grants import has_room
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
    for replacements in by_deployment:
        chain: list[Step] = []
        removed: list[Step] = []  # failed ones, which hold nothing: what replaces them starts side by side
        again: list[Step] = []
        for one in replacements:
            ends = [Release.of(old) for old in one.olds]
            cleared = without_instances(snapshot, [old.id for old in one.olds])
            if not isinstance(one.begin, Start):
                chain += [*ends, *([one.begin] if one.begin else [])]
                snapshot = cleared
            elif one.serves and _fits(snapshot, one.begin):
                chain += [one.begin, *ends]
                snapshot = _with_start(snapshot, one.begin)  # the old one stays until the new one serves
            elif _fits(cleared, one.begin):
                if one.olds and all(old.state in GONE and not old.grants for old in one.olds):
                    removed += ends
                    again.append(one.begin)
                elif one.olds:
                    chain += [*ends, one.begin]
                else:
                    fresh.append(one.begin)
                snapshot = _with_start(cleared, one.begin)
            else:
                return None
        if removed or chain:
            chains.append((*removed, *again, *chain))
    return (*((tuple(fresh),) if fresh else ()), *chains)


def _fits(snapshot: Snapshot, start: Start) -> bool:
    states = {state.device.id: state for _, state in snapshot.devices()}
    return all(has_room(states.get(slot.device_id), slot, _NOBODY) for slot in start.slots)


def _with_start(snapshot: Snapshot, start: Start) -> Snapshot:
    return snapshot.with_placement(ask_for(start.prepared, start.replica), start.placement)
