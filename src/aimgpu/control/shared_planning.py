"""Restarts that come at the same time are planned by one of them for all: one snapshot, one plan, one transaction."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aimgpu.control.events import Emit
from aimgpu.control.operations.applier import CommittedPlan
from aimgpu.control.operations.reservations import DeploymentClaim
from aimgpu.control.planning.plan import Plan
from aimgpu.control.planning.prepared import Prepared
from aimgpu.domain import Deployment

# A plan with what was committed of it, or the operations to wait for before it is tried again.
Placed = tuple[Plan, CommittedPlan | None] | list[DeploymentClaim]


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingRestart:
    """One deployment that is prepared, and is to be placed again."""

    deployment: Deployment
    ready: Mapping[str, Prepared]
    emit: Emit
    placed: Placed | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def settle(self, place: Callable[[], Placed]) -> None:
        """Keep what `place` returns or raises, for the thread that waits for it."""
        try:
            self.placed = place()
        except Exception as error:  # noqa: BLE001 - raised again in that thread
            self.error = error
        self.done.set()

    def result(self) -> Placed:
        if self.error is not None:
            raise self.error
        if self.placed is None:
            raise RuntimeError(f"{self.deployment.name} was not placed")
        return self.placed


class SharedPlanning:
    """Thread-safe. `lock` is the planning lock; `place` settles every one that it is given, with the lock held."""

    def __init__(self, lock: threading.RLock, place: Callable[[Sequence[WaitingRestart]], None]) -> None:
        self._lock = lock
        self._place = place
        self._waiting: list[WaitingRestart] = []
        self._waiting_lock = threading.Lock()

    def plan(self, restart: WaitingRestart) -> Placed:
        """The thread that gets the planning lock plans for all that wait for it by then, the most urgent first."""
        with self._waiting_lock:
            self._waiting.append(restart)
        with self._lock:
            if not restart.done.is_set():
                with self._waiting_lock:
                    taken, self._waiting = self._waiting, []
                self._place(sorted(taken, key=lambda one: -one.deployment.ask.priority.rank))
        return restart.result()
