"""What is wanted and could not be started again: why, and when it is tried next. Room may come without anybody saying so."""

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from aimgpu.control.events import Emit, Event, EventKind

_TURN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    deployment: str
    reason: str
    retry_at: float


class RetryQueue:
    """Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._lock = threading.Lock()

    def enter(self, deployment: str, reason: str, retry_at: float) -> bool:
        """Whether that is news."""
        with self._lock:
            known = self._waiting.get(deployment)
            self._waiting[deployment] = Waiting(deployment=deployment, reason=reason, retry_at=retry_at)
            return known is None or known.reason != reason

    def leave(self, deployment: str) -> None:
        with self._lock:
            self._waiting.pop(deployment, None)

    def read(self, wanted: Collection[str]) -> tuple[Waiting, ...]:
        """Those that are still wanted; the others are forgotten."""
        with self._lock:
            self._waiting = {name: item for name, item in self._waiting.items() if name in wanted}
            return tuple(self._waiting.values())


class Turn:
    """Until it is over, the less urgent are not placed; it is over once this one is planned, or ended otherwise."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._over = threading.Event()

    def wait(self) -> None:
        """Not for long: preparing may mean a download."""
        self._over.wait(_TURN_SECONDS)

    def ending_with_plan(self, emit: Emit) -> Emit:
        """A plan is told while nobody else may plan, and what it grants is charged before another may."""

        def tell(event: Event) -> None:
            emit(event)
            if event.kind in (EventKind.PLAN, EventKind.STATE):
                self._over.set()

        return tell

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()


def from_first_state(emit: Emit) -> Emit:
    """Tells nothing until an instance changes its state: a try that ends before that is no news."""
    held: list[Event] = []
    began = False

    def tell(event: Event) -> None:
        nonlocal began
        held.append(event)
        began = began or event.kind is EventKind.STATE
        while began and held:
            emit(held.pop(0))

    return tell
