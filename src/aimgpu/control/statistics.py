"""What the controller did since it started, counted for whoever watches."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from aimgpu.domain import Refusal


class Statistics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()

    def count(self, operation: str, result: str) -> None:
        with self._lock:
            self._operations[operation, result] += 1

    def count_refusals(self, refusals: Iterable[Refusal]) -> None:
        with self._lock:
            self._refusals.update(reason.code for refusal in refusals for reason in refusal.reasons)

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
