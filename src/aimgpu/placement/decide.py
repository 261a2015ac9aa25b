"""Choosing: Snapshot and asks in, decisions out."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from aimgpu.domain import Ask, Decision
from aimgpu.placement.affinity import affinity_first
from aimgpu.placement.scoring.mix import Mix, shape_of
from aimgpu.placement.session import PlacementSession
from aimgpu.placement.snapshot import Snapshot

_KEPT = 8  # sessions of the last snapshot; one serves every ask of one shape


class _Same:
    """Compares a snapshot by identity, so that a known one is found without reading it."""

    __slots__ = ("snapshot",)

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.snapshot is self.snapshot

    def __hash__(self) -> int:
        return id(self.snapshot)


class _Known:
    """What was worked out for one snapshot: the mix that runs, and a session for each mix that was decided with."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.given = Mix.given(snapshot)
        self._sessions: dict[tuple[object, ...], PlacementSession] = {}

    def session(self, ask: Ask, mix: Mix | None, reserved: Mapping[str, int] | None) -> PlacementSession:
        """By the shape of the ask where the mix is learned: hashing a whole mix takes longer than deciding."""
        held = tuple(sorted(reserved.items())) if reserved else ()
        learning = mix is None and bool(self.snapshot.running)
        key = (held, shape_of(ask)) if learning else (held, mix)
        found = self._sessions.get(key)
        if found is None:
            if len(self._sessions) >= _KEPT:
                del self._sessions[next(iter(self._sessions))]
            learned = self.given.with_asks([ask]) if learning else mix or Mix()
            found = self._sessions[key] = PlacementSession(self.snapshot, mix=learned, reserved=reserved)
        return found


def decide(snapshot: Snapshot, ask: Ask, *, mix: Mix | None = None, reserved: Mapping[str, int] | None = None) -> Decision:
    """Where this ask goes. Raises InvalidInput or UnknownPartition where the ask itself is wrong.

    `mix` is what asks to expect; by default what runs and this one. A caller that decides often keeps a `PlacementSession`.
    """
    return session_for(snapshot, ask, mix=mix, reserved=reserved).decide(ask)


def decide_all(
    snapshot: Snapshot, asks: Sequence[Ask], *, mix: Mix | None = None, reserved: Mapping[str, int] | None = None
) -> tuple[Decision, ...]:
    """One decision per ask, each seeing what the earlier ones took: in their order, but after those that they must run with."""
    learned = Mix.given(snapshot).with_asks(asks) if mix is None else mix
    session = PlacementSession(snapshot, mix=learned, reserved=reserved, planned=())
    if not any(ask.with_deployments for ask in asks):
        return tuple(session.place(ask) for ask in asks)
    decisions: dict[int, list[Decision]] = {}
    for ask in affinity_first(asks):
        decisions.setdefault(id(ask), []).append(session.place(ask))
    return tuple(decisions[id(ask)].pop(0) for ask in asks)


def session_for(snapshot: Snapshot, ask: Ask, *, mix: Mix | None, reserved: Mapping[str, int] | None) -> PlacementSession:
    """A session for questions only, never charged; kept while the snapshot stays the same."""
    return _known(_Same(snapshot)).session(ask, mix, reserved)


@lru_cache(maxsize=1)
def _known(same: _Same) -> _Known:
    return _Known(same.snapshot)
