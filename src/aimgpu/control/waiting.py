"""What is wanted and could not be started again: why, and when it is tried next. Room may come without anybody saying so."""

import threading
from collections.abc import Collection
from dataclasses import dataclass

from aimgpu.control.events import Emit, Event, EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    deployment: str
    reason: str
    retry_at: float


class WaitingRoom:
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
