"""Starts again what is wanted and gone, each deployment on its own, the most urgent first, with pauses that grow."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from aimgpu.control.changes import ChangeCounter
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind, ignore
from aimgpu.control.threads import Background, side_by_side
from aimgpu.control.waiting import PlanningTurn, after_refusal, is_due, is_stale
from aimgpu.domain import Deployment
from aimgpu.errors import AimGpuError, Conflict
from aimgpu.ledger import Retry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one restart came to; neither: everything runs."""

    refused: str | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """One restart; `give_up` where it cannot even begin."""

    work: Callable[[], None]
    give_up: Callable[[], None]

    def __call__(self) -> None:
        try:
            self.work()
        finally:
            self.give_up()


class PlaceAgain(Protocol):
    """Places a deployment again; calls `planned` once it is charged. `follow` gets what happens before that."""

    def __call__(self, deployment: Deployment, planned: Callable[[], None], follow: Emit, emit: Emit) -> Attempt: ...


class Restarts:
    """Thread-safe. The pauses are in the ledger, so that they hold over restarts of the daemon."""

    def __init__(self, dependencies: Dependencies, place: PlaceAgain, changes: ChangeCounter) -> None:
        self._ledger = dependencies.ledger
        self._timing = dependencies.timing
        self._effects = dependencies.effects
        self._place = place
        self._changes = changes
        self._background = Background(dependencies.effects)
        self._trying: set[str] = set()
        self._lock = dependencies.effects.lock()

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
    def trying(self) -> frozenset[str]:
        """Deployments that are being started again."""
        with self._lock:
            return frozenset(self._trying)

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
        return max(0.0, (min((at for at in due if at is not None), default=math.inf) - self._effects.wall_ms()) / 1000)

    def known(self, names: Iterable[str]) -> dict[str, Retry]:
        """What is recorded of them now, for `forget`."""
        found = ((name, self._ledger.retry(name)) for name in names)
        return {name: retry for name, retry in found if retry is not None}

    def forget(self, known: Mapping[str, Retry]) -> None:
        """A new request for them starts counting from zero. What failed since `known` was read is not forgotten."""
        with self._ledger.held():
            self._ledger.forget_retries(*(name for name, retry in known.items() if self._ledger.retry(name) == retry))

    def retry_due(self, emit: Emit, *, wait: bool) -> None:
        """Try those again whose time has come; counts of failures long past are dropped."""
        now = self._effects.wall_ms()
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
        wanted = [deployment for deployment in self._ledger.deployments() if deployment.name in chosen]
        going = [deployment for deployment in wanted if not deployment.has_caller]  # which is started once, by its caller
        self._give_back(chosen - {deployment.name for deployment in going})
        going.sort(key=lambda deployment: -deployment.ask.priority.rank)
        turns = [PlanningTurn(deployment.ask.priority.rank, self._effects) for deployment in going]
        calls = [self._call(deployment, turn, turns, emit) for deployment, turn in zip(going, turns, strict=True)]
        if wait:
            side_by_side(calls, "restart", self._effects)
            return
        for call in calls:
            try:
                self._background.run(call, "restart")
            except RuntimeError:  # no thread could be started: the next round tries again
                log.exception("restart.failed")
                call.give_up()

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

    def _call(self, deployment: Deployment, turn: PlanningTurn, turns: Sequence[PlanningTurn], emit: Emit) -> "_Call":
        earlier = [one for one in turns if one.rank > turn.rank]

        def work() -> None:
            for one in earlier:
                one.wait()
            self._try(deployment, turn, emit)

        def end() -> None:
            turn.end()
            self._give_back([deployment.name])

        return _Call(work, end)

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
        with self._ledger.held():
            self._note_attempt(known, name, attempt, emit)

    def _note_attempt(self, known: Retry | None, name: str, attempt: Attempt, emit: Emit) -> None:
        if attempt.refused is not None:
            self._note_refusal(known, name, attempt.refused, self._timing.room_retry_seconds)
            if known is None or known.reason != attempt.refused:
                emit(Event(kind=EventKind.REFUSED, deployment=name, text=attempt.refused))
        elif attempt.failed is not None or self._ledger.retry(name) != known:
            return  # it failed in this try or since it began: that was recorded with the failure, and it stays due
        elif known is not None and known.failures:
            self._keep(replace(known, retry_at_ms=None, exhausted=False))  # it counts until it has run for long
        else:
            self._ledger.forget_retries(name)

    def _note_refusal(self, known: Retry | None, name: str, reason: str, pause_seconds: float) -> None:
        refused = Retry(deployment=name, reason=reason, last_failure_ms=self._effects.wall_ms())
        with self._ledger.held():
            self._keep(after_refusal(self._ledger.retry(name) or known, refused, pause_seconds))

    def _keep(self, retry: Retry) -> None:
        self._ledger.keep_retry(retry)
        self._changes.notify()
