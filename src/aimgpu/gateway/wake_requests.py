"""Models that callers wait for, and those that they want unloaded. The gateway writes it, the daemon's activator reads it."""

import threading
from dataclasses import dataclass

from aimgpu.domain import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeRequest:
    """`since`: when the first caller that still waits came, by the steady clock; `priority`: the highest that waits."""

    model: str
    priority: Priority
    since: float


class WakeRequests:
    """Thread-safe."""

    def __init__(self) -> None:
        self._wanted: dict[str, WakeRequest] = {}
        self._unwanted: dict[str, None] = {}
        self._changed = threading.Condition()
        self._news = False

    def want(self, model: str, priority: Priority, since: float) -> None:
        """A request waits for this model. Repeating it is harmless, and lifts the priority where it is higher."""
        known = self._wanted.get(model)
        if known is not None and known.priority.rank >= priority.rank:
            return
        since = since if known is None else known.since
        with self._changed:
            self._wanted[model] = WakeRequest(model=model, priority=priority, since=since)
            self._notify()

    def sleep(self, model: str) -> None:
        """A caller wants this model unloaded; one that is busy stays."""
        with self._changed:
            self._unwanted[model] = None
            self._notify()

    def take_sleeps(self) -> tuple[str, ...]:
        """The models of `sleep` since the last call."""
        with self._changed:
            unwanted, self._unwanted = tuple(self._unwanted), {}
            return unwanted

    def keep_only(self, models: frozenset[str]) -> None:
        """No request waits for the others any more."""
        if any(model not in models for model in self._wanted):
            with self._changed:
                self._wanted = {model: wanted for model, wanted in self._wanted.items() if model in models}

    def read(self) -> tuple[WakeRequest, ...]:
        """The most urgent first: by priority, then by who has waited longest."""
        with self._changed:
            return tuple(sorted(self._wanted.values(), key=lambda wanted: (-wanted.priority.rank, wanted.since)))

    def wait(self, seconds: float) -> None:
        """Wait until another model is wanted, or one more urgently, or the time is up."""
        with self._changed:
            if not self._news:
                self._changed.wait(seconds)
            self._news = False

    def poke(self) -> None:
        """Let a thread in `wait` look again now."""
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        self._news = True
        self._changed.notify_all()
