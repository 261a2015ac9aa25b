"""Starts again what is wanted and gone, each deployment on its own, the most urgent first, with pauses that grow."""

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from aimgpu.control.changes import ChangeCounter
from aimgpu.control.dependencies import Timing
from aimgpu.control.events import Emit, Event, EventKind, ignore
from aimgpu.control.operations.threads import Background, side_by_side
from aimgpu.control.operations.turns import PlanningTurn
from aimgpu.control.retry import after_failure, after_refusal, is_due, is_stale
from aimgpu.domain import Deployment, Instance, InstanceState
from aimgpu.errors import AimGpuError, Conflict
from aimgpu.ledger import Ledger, Retry


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one restart came to; neither: everything runs."""

    refused: str | None = None
    failed: str | None = None


class PlaceAgain(Protocol):
    """Places a deployment again; calls `planned` once it is charged. `follow` gets what happens before that."""

    def __call__(self, deployment: Deployment, planned: Callable[[], None], follow: Emit, emit: Emit) -> Attempt: ...


def now_ms() -> int:
    """Wall clock: retries are kept over restarts of the daemon."""
    return time.time_ns() // 1_000_000


class Restarts:
    """Thread-safe. The pauses are in the ledger, so that they hold over restarts of the daemon."""

    def __init__(self, ledger: Ledger, timing: Timing, place: PlaceAgain, changes: ChangeCounter) -> None:
        self._ledger = ledger
        self._timing = timing
        self._place = place
        self._changes = changes
        self._background = Background()
        self._trying: set[str] = set()
        self._lock = threading.Lock()
        self._records = threading.RLock()  # a record is read, compared and replaced

    def waiting(self) -> tuple[Retry, ...]:
        """Wanted deployments that wait for another try, or for which none is left."""
        wanted = {deployment.name for deployment in self._ledger.deployments()}
        found = [one for one in self._ledger.retries() if one.retry_at_ms is not None or one.exhausted]
        return tuple(one for one in found if one.deployment in wanted)

    def waiting_for(self, name: str) -> Retry | None:
        """The same of one deployment; costs one look into memory."""
        found = self._ledger.retry(name)
        waits = found is not None and (found.retry_at_ms is not None or found.exhausted)
        return found if waits and self._ledger.deployment(name) is not None else None

    @property
    def busy(self) -> bool:
        """Whether something is being started again."""
        with self._lock:
            return bool(self._trying)

    def next_seconds(self) -> float:
        """Until the next try, of those that are not under way; infinite where there is none."""
        with self._lock:
            trying = set(self._trying)
        due = (one.retry_at_ms for one in self._ledger.retries() if one.deployment not in trying)
        return max(0.0, (min((at for at in due if at is not None), default=math.inf) - now_ms()) / 1000)

    def note_failure(self, name: str, reason: str) -> Retry:
        """Counted, and tried again after a pause."""
        failed = Retry(deployment=name, reason=reason, last_failure_ms=now_ms())
        with self._records:
            retry = after_failure(self._ledger.retry(name), failed, self._timing, random.random())  # noqa: S311 - jitter
            self._keep(retry)
        return retry

    def known(self, names: Iterable[str]) -> dict[str, Retry]:
        """What is recorded of them now, for `forget`."""
        found = ((name, self._ledger.retry(name)) for name in names)
        return {name: retry for name, retry in found if retry is not None}

    def forget(self, known: Mapping[str, Retry]) -> None:
        """A new request for them starts counting from zero. What failed since `known` was read is not forgotten."""
        with self._records:
            self._ledger.forget_retries(*(name for name, retry in known.items() if self._ledger.retry(name) == retry))

    def keep_trying(self, known: Mapping[str, Retry], started: Iterable[Instance]) -> None:
        """A request came in place of a try that was due: what it started and failed is tried again as it was before."""
        for one in started:
            waited = one.deployment in known and known[one.deployment].retry_at_ms is not None
            if waited and one.state is InstanceState.FAILED:
                self.note_failure(one.deployment, one.reason or "it did not start")

    def retry_due(self, emit: Emit, *, wait: bool) -> None:
        """Try those again whose time has come; counts of failures long past are dropped."""
        now = now_ms()
        known = self._ledger.retries()
        wanted = {deployment.name for deployment in self._ledger.deployments()}
        past = {one.deployment: one for one in known if is_stale(one, now) or one.deployment not in wanted}
        if past:
            self.forget(past)
        due = [one.deployment for one in known if is_due(one, now, self._timing) and one.deployment in wanted]
        if due:
            self.restart(due, emit, wait=wait)

    def restart(self, names: Iterable[str], emit: Emit, *, wait: bool) -> None:
        """One that no longer fits does not hold up the others, and one that is being tried is not tried twice."""
        chosen = self._take(set(names))
        going = [deployment for deployment in self._ledger.deployments() if deployment.name in chosen]
        self._give_back(chosen - {deployment.name for deployment in going})
        going.sort(key=lambda deployment: -deployment.ask.priority.rank)
        turns = [PlanningTurn(deployment.ask.priority.rank) for deployment in going]
        calls = [self._call(deployment, turn, turns, emit) for deployment, turn in zip(going, turns, strict=True)]
        if wait:
            side_by_side(calls, "restart")
            return
        for call in calls:
            self._background.run(call, "restart")

    def close(self, timeout_seconds: float) -> None:
        """What is being started is left to the next daemon."""
        self._background.close(timeout_seconds)

    def _take(self, names: set[str]) -> set[str]:
        with self._lock:
            free = names - self._trying
            self._trying |= free
            return free

    def _give_back(self, names: Iterable[str]) -> None:
        with self._lock:
            self._trying -= set(names)

    def _call(
        self, deployment: Deployment, turn: PlanningTurn, turns: Sequence[PlanningTurn], emit: Emit
    ) -> Callable[[], None]:
        earlier = [one for one in turns if one.rank > turn.rank]

        def work() -> None:
            try:
                for one in earlier:
                    one.wait()
                self._try(deployment, turn, emit)
            finally:
                turn.end()
                self._give_back([deployment.name])

        return work

    def _try(self, deployment: Deployment, turn: PlanningTurn, emit: Emit) -> None:
        """A restart that fails is shown, not raised: it was not asked for just now."""
        known = self._ledger.retry(deployment.name)
        try:
            # A try for room that is made every few seconds is worth reporting only where it finds some.
            follow = ignore if known is not None and known.failures == 0 else emit
            attempt = self._place(deployment, turn.end, follow, emit)
        except Conflict as error:  # released or changed meanwhile, the daemon is ending, or another plan was quicker
            if self._ledger.deployment(deployment.name) == deployment:
                self._note_refusal(known, deployment.name, error.message, self._timing.room_retry_seconds)
            emit(Event(kind=EventKind.ERROR, deployment=deployment.name, text=error.message, data=error.to_json()))
        except AimGpuError as error:
            self._note_refusal(known, deployment.name, error.message, self._timing.error_retry_seconds)
            if known is None or known.reason != error.message:
                emit(Event(kind=EventKind.ERROR, deployment=deployment.name, text=error.message, data=error.to_json()))
        except Exception as error:
            self._note_refusal(known, deployment.name, f"internal error: {error!r}", self._timing.error_retry_seconds)
            raise
        else:
            self._note(known, deployment.name, attempt, emit)

    def _note(self, known: Retry | None, name: str, attempt: Attempt, emit: Emit) -> None:
        with self._records:
            self._note_attempt(known, name, attempt, emit)

    def _note_attempt(self, known: Retry | None, name: str, attempt: Attempt, emit: Emit) -> None:
        if attempt.refused is not None:
            self._note_refusal(known, name, attempt.refused, self._timing.room_retry_seconds)
            if known is None or known.reason != attempt.refused:
                emit(Event(kind=EventKind.REFUSED, deployment=name, text=attempt.refused))
        elif attempt.failed is not None:
            self.note_failure(name, attempt.failed)
        elif self._ledger.retry(name) != known:
            return  # it failed again since this try began, and stays due
        elif known is not None and known.failures:
            self._keep(replace(known, retry_at_ms=None, exhausted=False))  # it counts until it has run for long
        else:
            self._ledger.forget_retries(name)

    def _note_refusal(self, known: Retry | None, name: str, reason: str, pause_seconds: float) -> None:
        refused = Retry(deployment=name, reason=reason, last_failure_ms=now_ms())
        with self._records:
            self._keep(after_refusal(self._ledger.retry(name) or known, refused, pause_seconds))

    def _keep(self, retry: Retry) -> None:
        self._ledger.keep_retry(retry)
        self._changes.notify()
