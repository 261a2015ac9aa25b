"""Wakes that found no room and are tried again: who is ahead of whom, and for how long each has waited."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from aimgpu.control.planning.prepared import Prepared

_GIVEN_UP_SECONDS = 30.0  # after the last try: its callers are gone


@dataclass(slots=True, kw_only=True)
class _Waiting:
    item: Prepared
    since: float
    last: float

    @property
    def order(self) -> tuple[int, float]:
        return (-self.item.deployment.ask.priority.rank, self.since)


class WaitingWakes:
    """Higher priority first, then in the order in which they first asked. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._lock = threading.Lock()
        self._now = now

    def refused(self, item: Prepared) -> None:
        """It keeps the place that it first had."""
        with self._lock:
            now = self._now()
            known = self._waiting.get(item.name)
            since = known.since if known is not None and now - known.last < _GIVEN_UP_SECONDS else now
            self._waiting[item.name] = _Waiting(item=item, since=since, last=now)

    def woken(self, name: str) -> None:
        """It has its room."""
        with self._lock:
            self._waiting.pop(name, None)

    def waited_seconds(self, name: str) -> float:
        """Since it was first refused."""
        with self._lock:
            known = self._waiting.get(name)
            return self._now() - known.since if known is not None else 0.0

    def ahead_of(self, item: Prepared) -> tuple[Prepared, ...]:
        """Those whose room this one must leave to them."""
        with self._lock:
            now = self._now()
            self._waiting = {name: one for name, one in self._waiting.items() if now - one.last < _GIVEN_UP_SECONDS}
            known = self._waiting.get(item.name)
            mine = known.order if known is not None else (-item.deployment.ask.priority.rank, now)
            ahead = sorted((one for one in self._waiting.values() if one.order < mine), key=lambda one: one.order)
            return tuple(one.item for one in ahead if one.item.name != item.name)
