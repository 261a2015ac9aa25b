"""Keys to be reconciled: each once at a time, later again after a failure, however often it is added."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 60.0


class WorkQueue(Generic[_Key]):
    """A key that is added while it is worked on comes again when that is done."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._ready: asyncio.Queue[_Key] = asyncio.Queue()
        self._queued: set[_Key] = set()
        self._working: set[_Key] = set()
        self._again: set[_Key] = set()
        self._failures: dict[_Key, int] = {}
        self.finished: Counter[str] = Counter()  # by result: done, failed
        self._jitter = jitter

    def add(self, key: _Key) -> None:
        """Without effect where it waits already."""
        if key in self._working:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: _Key, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.add, key)

    async def take(self) -> _Key:
        """The next key; `done` or `failed` must follow."""
        key = await self._ready.get()
        self._queued.discard(key)
        self._working.add(key)
        return key

    def __len__(self) -> int:
        """Keys that wait."""
        return len(self._queued)

    def done(self, key: _Key) -> None:
        self.finished["done"] += 1
        self._failures.pop(key, None)
        self._finish(key)

    def failed(self, key: _Key) -> float:
        """It comes again after a pause that grows with every failure; returns the pause."""
        self.finished["failed"] += 1
        count = self._failures[key] = self._failures.get(key, 0) + 1
        pause: float = min(_FIRST_PAUSE_SECONDS * 2 ** (count - 1), _LONGEST_PAUSE_SECONDS) * (0.5 + self._jitter() / 2)
        self._finish(key)
        self.add_after(key, pause)
        return pause

    def _finish(self, key: _Key) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
