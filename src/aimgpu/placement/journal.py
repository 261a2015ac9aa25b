"""What a session did to its snapshot, applied when it is read."""

from collections.abc import Callable, Iterable
from itertools import islice

from aimgpu.domain import Ask, Placement
from aimgpu.placement.snapshot import Snapshot

Event = tuple[Ask, Placement] | str  # a placement that was charged, or the instance that was released


class Journal:
    """A snapshot and the events since. Entries are only ever added, so that a moment stays what it was."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._events: list[Event] = []

    def placed(self, ask: Ask, placement: Placement) -> None:
        self._events.append((ask, placement))

    def released(self, instance_id: str) -> None:
        self._events.append(instance_id)

    def snapshot(self) -> Snapshot:
        """The world now."""
        if self._events:
            self._snapshot = _after(self._snapshot, self._events)
            self._events = []
        return self._snapshot

    def moment(self) -> Callable[[], Snapshot]:
        """The world as it is now, to be made when it is wanted, whatever happens in between."""
        snapshot, events, count = self._snapshot, self._events, len(self._events)
        return lambda: _after(snapshot, islice(events, count))


def _after(snapshot: Snapshot, events: Iterable[Event]) -> Snapshot:
    placed: list[tuple[Ask, Placement]] = []
    for event in events:
        if isinstance(event, str):
            snapshot = snapshot.with_placements(placed).without_instance(event)
            placed = []
        else:
            placed.append(event)
    return snapshot.with_placements(placed) if placed else snapshot
