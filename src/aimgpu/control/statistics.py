"""What the controller did since it started, counted for metrics and for the limit on preemptions."""

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from aimgpu.domain import Refusal


class Statistics:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        self._preemptions: deque[float] = deque(maxlen=1000)

    def count(self, operation: str, result: str) -> None:
        with self._lock:
            self._operations[operation, result] += 1

    def count_refusals(self, refusals: Iterable[Refusal]) -> None:
        with self._lock:
            self._refusals.update(reason.code for refusal in refusals for reason in refusal.reasons)

    def note_preemption(self, now: float) -> None:
        """Preemptions are bounded per hour, so they are remembered."""
        with self._lock:
            self._preemptions.append(now)
            self._operations["preempt", "ok"] += 1

    def preemptions_since(self, moment: float) -> int:
        """How many there were."""
        with self._lock:
            return sum(when >= moment for when in self._preemptions)

    def operations(self) -> Mapping[tuple[str, str], int]:
        with self._lock:
            return dict(self._operations)

    def refusals(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._refusals)

    def count_restart(self, deployment: str) -> None:
        """An instance ended in use and will be started again."""
        with self._lock:
            self._restarts[deployment] += 1

    def restarts(self) -> Mapping[str, int]:
        """By deployment."""
        with self._lock:
            return dict(self._restarts)
