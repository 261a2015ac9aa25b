"""Which models sleep and which are woken: the gateway's activity in, the controller's acts out."""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import no_requests
from aimgpu.control.effects import REAL
from aimgpu.control.events import Emit
from aimgpu.control.plan.eviction import Resident, describe_next, due_to_sleep, explain_residents, is_due_to_wake
from aimgpu.control.waiting import PlanningTurn
from aimgpu.domain import Deployment, Instance, InstanceState
from aimgpu.errors import AimGpuError
from aimgpu.gateway.routes import Arrival
from aimgpu.gateway.slo_monitor import ModelActivity
from aimgpu.gateway.wake_requests import WakeRequest, WakeRequests
from aimgpu.placement.residency import format_seconds
from aimgpu.units import format_bytes

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0  # after a failure
_LONGEST_ROOM_PAUSE_SECONDS = 4.0  # while busy models are in the way: they may fall idle at any moment
_MOST_AT_ONCE = 32
_MOST_HOLDERS_NAMED = 5
_SHOWN_SECONDS = 30.0  # that a model waits for room, after its last try: its callers are gone
_DECIDING_SECONDS = 5.0  # from the end of an instance until the controller has planned its restart, at most
# For choosing among models that were never seen waking; never shown to a caller.
_GUESSED_LOAD_SECONDS = 10.0
_GUESSED_WAKE_SECONDS = 3.0
_FIRST_TOKEN_SECONDS = 2.0  # where nothing was promised
_ASLEEP = frozenset({InstanceState.SLEEPING, InstanceState.DRAINING})
# A ready one counts as coming too: the route table learns of it a moment after the ledger.
_COMING = frozenset({InstanceState.READY, InstanceState.LOADING, InstanceState.QUEUED})

ReadActivity = Callable[[], Mapping[str, ModelActivity]]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A model that is being woken, or was tried and could not be."""

    began: float | None  # None: not running now
    failures: int = 0
    problem: str | None = None
    room_may_come: bool = False  # only busy models are in the way
    problem_since: float = 0.0
    retry_at: float = 0.0
    refused: bool = False  # for want of room, so that it is worth trying again when something has gone


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocked:
    """Since when a deployment could not be started again, and which of its instances had served before that."""

    since: float
    served: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    reason: str
    refused: bool = False  # for want of room
    room_may_come: bool = False  # when a model that is busy now falls idle


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUsage:
    """Requests in flight by instance, and how long a model that was just loaded stays."""

    in_flight: Callable[[str], int] = no_requests
    least_residency_seconds: float = 30.0


class Activator:
    """Wakes what the gateway's callers wait for, most urgent first, and puts idle models to sleep. Thread-safe."""

    def __init__(  # noqa: PLR0913 - what it connects
        self,
        controller: Controller,
        wake_requests: WakeRequests,
        read_activity: ReadActivity,
        emit: Emit,
        now: Clock = time.monotonic,
        *,
        usage: InstanceUsage | None = None,
    ) -> None:
        self._controller = controller
        self._usage = usage or InstanceUsage()
        self._wake_requests = wake_requests
        self._read_activity = read_activity
        self._emit = emit
        self._now = now
        self._ready_since: dict[str, float] = {}  # by instance
        self._loading_since: dict[str, float] = {}  # by deployment, as the next
        self._blocked: dict[str, _Blocked] = {}  # the controller could not start it again
        self._missing_since: dict[str, float] = {}  # it has no instance, and nothing is planned for it
        # By deployment and whether it slept in place: from the request until it was ready, unloading others included.
        self._learned: dict[tuple[str, bool], float] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._seen: Mapping[str, ModelActivity] = {}
        self._woken_ahead: dict[str, float] = {}  # by deployment, its last request before that
        self._refused_at: dict[str, int] = {}  # programs that made room and found none, by the version of what they saw
        self._granted: frozenset[tuple[str, str, int]] = frozenset()  # at the last look for room
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=_MOST_AT_ONCE, thread_name_prefix="wake")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="activator", daemon=True)

    def start(self) -> None:
        """Serve the gateway's wake requests from now on."""
        self._thread.start()

    def close(self) -> None:
        """Wake nothing more; returns when what is being woken is up or given up."""
        self._closing.set()
        self._wake_requests.poke()
        if self._thread.is_alive():
            self._thread.join()
        self._threads.shutdown(wait=True)

    def wake(self, model: str) -> Arrival | None:
        """Begin to wake a model without waiting for it, whether or not a caller waits. None: it is not asleep."""
        mine = [instance for instance in self._controller.instances() if instance.deployment == model]
        deployment = next((item for item in self._controller.deployments() if item.name == model), None)
        if deployment is None or self._closing.is_set() or not {instance.state for instance in mine} & (_ASLEEP | _COMING):
            return None
        if {instance.state for instance in mine} & _ASLEEP:
            self._begin([WakeRequest(model=model, priority=deployment.ask.priority, since=self._now())])
        return self.find_arrival(deployment, mine)

    def find_arrival(self, deployment: Deployment, instances: Sequence[Instance]) -> Arrival | None:
        """When a model without a ready instance will be up; None: not by itself, and not by a request either."""
        name, states = deployment.name, {instance.state for instance in instances}
        in_place = any(instance.sleeps_in_place for instance in instances)
        seconds = self._expect(name, instances, in_place=in_place)
        slots = sum(instance.concurrency or deployment.concurrency or 1 for instance in instances)
        arrival = Arrival(slots=slots or deployment.concurrency or 1, seconds=seconds)
        with self._lock:
            attempt = self._attempts.get(name)
            if InstanceState.LOADING in states:
                arrival = replace(arrival, since=self._loading_since.setdefault(name, self._now()))
            else:
                self._loading_since.pop(name, None)
            if states & (_ASLEEP | _COMING):
                self._missing_since.pop(name, None)
            if InstanceState.READY in states:
                self._blocked.pop(name, None)
        if attempt is not None:
            # Between forgetting the sleeping instance and charging the new one there is no instance at all.
            return _with_attempt(arrival, attempt)
        if states & (_ASLEEP | _COMING):
            return arrival
        return self._find_restart(name, arrival, _served_before(instances))

    def waiting_for_room(self) -> dict[str, str]:
        """Sleeping models that callers wait for, and why they find no room."""
        shown_from = self._now() - _SHOWN_SECONDS
        with self._lock:
            return {
                name: f"waits for room: {attempt.problem}"
                for name, attempt in self._attempts.items()
                if attempt.refused and attempt.problem and attempt.retry_at >= shown_from
            }

    def explain(self) -> dict[str, str]:
        """Why each model is awake or asleep, for people; by what the last tick saw, so that nobody waits for the gateway."""
        activity = self._seen
        found = explain_residents(self.residents(activity), self._usage.least_residency_seconds)
        for one in self._controller.instances():
            if one.state is InstanceState.SLEEPING and one.deployment not in found:
                seconds = self._expect(one.deployment, [one], in_place=one.sleeps_in_place)
                held = format_bytes(sum(grant.memory_bytes for grant in one.grants), up=True)
                where = f"in place, it holds {held}" if one.sleeps_in_place else "and stopped"
                back = f", awake in {format_seconds(seconds)}" if seconds is not None else ""
                expected = activity.get(one.deployment, ModelActivity()).expected_seconds
                found[one.deployment] = f"asleep {where}: {describe_next(expected)}{back}"
        return found

    def serve_requests(self) -> None:
        """Begin to wake what callers wait for and whose time has come; returns without waiting for it."""
        for name in self._wake_requests.take_sleeps():
            self._threads.submit(self._controller.sleep, name, emit=self._emit)
        self._begin(self._wake_requests.read())

    def tick(self) -> None:
        """Put to sleep what was idle for long enough, and wake into free room who is due; call about once a second."""
        activity = self._seen = self._read_activity()
        for name in due_to_sleep(self.residents(activity), self._usage.least_residency_seconds):
            self._controller.sleep(name, emit=self._emit)
        self._wake_ahead(activity)

    def _wake_ahead(self, activity: Mapping[str, ModelActivity]) -> None:
        """The one that is due first, once after each of its requests, and only while no callers wait."""
        now = self._now()
        with self._lock:
            if self._closing.is_set() or any(one.began is not None or one.retry_at > now for one in self._attempts.values()):
                return
        instances: dict[str, list[Instance]] = {}
        for one in self._controller.instances():
            instances.setdefault(one.deployment, []).append(one)
        self._start_programs([one for each in instances.values() for one in each if one.is_program])
        for name, used in sorted(activity.items(), key=lambda item: (item[1].expected_seconds, item[0])):
            mine, last = instances.get(name, []), used.last_request
            if last is None or self._woken_ahead.get(name) == last or {one.state for one in mine} != {InstanceState.SLEEPING}:
                continue
            in_place = any(one.sleeps_in_place for one in mine)
            seconds = self._expect(name, mine, in_place=in_place) or _GUESSED_LOAD_SECONDS
            if is_due_to_wake(now - last, used.expected_seconds, seconds):
                self._woken_ahead[name] = last
                log.info("wake.ahead", extra={"data": {"deployment": name, "expected_seconds": used.expected_seconds}})
                self._threads.submit(self._try_ahead, name)
                return

    def _start_programs(self, programs: Sequence[Instance]) -> None:
        """Those that made room start again once there is some; asked again only after something changed."""
        for name in dict.fromkeys(one.deployment for one in programs if one.state is InstanceState.SLEEPING):
            version = self._controller.changes.version
            if self._refused_at.get(name) != version:
                self._try_ahead(name)
                self._refused_at[name] = self._controller.changes.version

    def _try_ahead(self, name: str) -> None:
        try:
            self._controller.wake(name, None, emit=self._emit)
        except AimGpuError as error:  # its callers have it tried again
            log.info("wake.ahead_failed", extra={"data": {"deployment": name, "problem": error.message}})
        except Exception:
            log.exception("wake.failed")

    def residents(self, activity: Mapping[str, ModelActivity] | None = None) -> tuple[Resident, ...]:
        """The loaded deployments, as they are used."""
        activity = self._read_activity() if activity is None else activity
        now = self._now()
        ready = [instance for instance in self._controller.instances() if instance.state is InstanceState.READY]
        with self._lock:
            self._ready_since = {i.id: self._ready_since.get(i.id, now) for i in ready}
            for one in ready:  # a restart makes a new instance, which knows nothing of the last
                if one.load_ms:
                    self._learned.setdefault((one.deployment, False), one.load_ms / 1000)
        deployments = {item.name: item for item in self._controller.deployments()}
        names = dict.fromkeys(instance.deployment for instance in ready if instance.deployment in deployments)
        return tuple(
            self._resident(deployments[name], [i for i in ready if i.deployment == name], activity.get(name), now)
            for name in names
        )

    def _resident(
        self, deployment: Deployment, mine: Sequence[Instance], activity: ModelActivity | None, now: float
    ) -> Resident:
        if deployment.overrides.program is not None:  # no callers: it is the first to make room
            activity = ModelActivity(expected_seconds=inf)
        activity = activity or ModelActivity()
        with self._lock:
            since = min(self._ready_since.get(instance.id, now) for instance in mine)
        last_used = max(activity.last_request or since, since)
        in_flight = sum(self._usage.in_flight(instance.id) for instance in mine)
        return Resident(
            name=deployment.name,
            priority=mine[0].grants[0].priority,
            keep_seconds=deployment.keep_seconds,
            idle_seconds=0.0 if in_flight or deployment.overrides.program else now - last_used,
            resident_seconds=inf if deployment.overrides.program else now - since,
            in_flight=in_flight,
            wake_seconds=_wake_seconds(mine),
            expected_seconds=activity.expected_seconds,
            freed_bytes=max(1, sum(_freed_bytes(instance) for instance in mine)),
            first_token_seconds=_promised_seconds(deployment),
            at_risk=activity.overspending,
        )

    def _expect(self, model: str, instances: Sequence[Instance], *, in_place: bool) -> float | None:
        """Seconds that it took the last time, in the way that it will come now; None where that was never seen."""
        with self._lock:
            learned = self._learned.get((model, in_place))
        times = [one.wake_ms if in_place else one.load_ms for one in instances]
        return learned or max((milliseconds / 1000 for milliseconds in times if milliseconds), default=None)

    def _find_restart(self, name: str, arrival: Arrival, served: frozenset[str]) -> Arrival | None:
        """A deployment that the controller starts again, now or at its next try. `served`: what was ready, and ended."""
        waiting = self._controller.waiting_for(name)
        with self._lock:
            if waiting is None:
                self._blocked.pop(name, None)
                missing = self._now() - self._missing_since.setdefault(name, self._now())
                return arrival if missing < _DECIDING_SECONDS else None
            self._missing_since.pop(name, None)
            if waiting.exhausted:
                self._blocked.pop(name, None)
                return None
            blocked = self._blocked.get(name)
            if blocked is None or not served <= blocked.served:  # it was up in between: another end, not the same trouble
                blocked = self._blocked[name] = _Blocked(since=self._now(), served=served)
            left_seconds = 0.0 if waiting.retry_at_ms is None else (waiting.retry_at_ms - REAL.wall_ms()) / 1000
            if left_seconds <= 0:  # it is being tried
                return arrival
        return replace(arrival, problem=waiting.reason, problem_since=blocked.since, retry_at=self._now() + left_seconds)

    def _follow(self) -> None:
        while not self._closing.is_set():
            try:
                self.serve_requests()
            except Exception:  # whatever it was, the next round must come: without it nothing is ever woken
                log.exception("activator.failed")
            self._wake_requests.wait(_LOOK_SECONDS)

    def _begin(self, wanted: Sequence[WakeRequest]) -> None:
        """Try those whose time has come. A lower one is placed after the higher ones of this round are."""
        turns: list[PlanningTurn] = []
        for request in self._choose_due(wanted):
            turn = PlanningTurn(request.priority.rank)
            self._threads.submit(self._wake, request.model, turn, [one for one in turns if one.rank > turn.rank])
            turns.append(turn)

    def _choose_due(self, wanted: Sequence[WakeRequest]) -> list[WakeRequest]:
        """Those to try now; from here on they are being tried.

        What waits for room is tried again as soon as something has gone, and before anything less urgent is tried: its pause
        must not let a lower one take the room that it waits for.
        """
        with self._lock:
            waiting = any(attempt.began is None and attempt.refused for attempt in self._attempts.values())
        room_came = waiting and self._notice_room()
        chosen: list[WakeRequest] = []
        with self._lock:
            for request in reversed(wanted):  # the least urgent first
                attempt = self._attempts.get(request.model) or _Attempt(began=None)
                before_another = attempt.refused and any(one.priority.rank < request.priority.rank for one in chosen)
                due = attempt.retry_at <= self._now() or (attempt.refused and room_came) or before_another
                if attempt.began is None and due and not self._closing.is_set():
                    self._attempts[request.model] = replace(attempt, began=self._now())
                    chosen.append(request)
        return chosen[::-1]

    def _notice_room(self) -> bool:
        """Whether something that was granted at the last look is not granted any more."""
        granted = frozenset(
            (one.id, grant.partition_id, grant.memory_bytes) for one in self._controller.instances() for grant in one.grants
        )
        before, self._granted = self._granted, granted
        return bool(before - granted)

    def _wake(self, model: str, turn: PlanningTurn, earlier: Sequence[PlanningTurn]) -> None:
        for one in earlier:
            one.wait()
        began = self._now()
        try:
            outcome = self._try(model, turn)
        finally:
            turn.end()
        with self._lock:
            if outcome is None:
                self._attempts.pop(model, None)
            else:
                self._attempts[model] = _note_failure(self._attempts.get(model), outcome, self._now())
        data = {"deployment": model, "seconds": self._now() - began, "problem": outcome.reason if outcome else None}
        log.info("wake.ended", extra={"data": data})
        self._controller.changes.notify()

    def _try(self, model: str, turn: PlanningTurn) -> _Failure | None:
        """Why it could not be woken. None: it is awake."""
        mine = [instance for instance in self._controller.instances() if instance.deployment == model]
        if not {instance.state for instance in mine} & _ASLEEP:
            return None
        in_place, began = any(instance.sleeps_in_place for instance in mine), self._now()
        try:
            residents = self.residents()
            outcome = self._controller.wake(model, residents, emit=self._emit, planned=turn.end)
        except AimGpuError as error:
            return _Failure(reason=error.message)
        except Exception as error:
            log.exception("wake.failed")
            return _Failure(reason=f"a fault of ours: {error!r}")
        if outcome.plan.refusals:
            reason = "; ".join(refusal.summary for refusal in outcome.plan.refusals)
            reason += _describe_holders(self._controller.instances(), residents, model)
            return _Failure(reason=reason, refused=True, room_may_come=outcome.plan.room_may_come)
        if outcome.failed:
            return _Failure(reason=outcome.failed[0].reason or "its engine failed to start")
        with self._lock:
            self._learned[model, in_place] = self._now() - began
        return None


def _served_before(instances: Sequence[Instance]) -> frozenset[str]:
    """Those that failed after they had been ready."""
    return frozenset(one.id for one in instances if one.state is InstanceState.FAILED and one.load_ms is not None)


def _with_attempt(arrival: Arrival, attempt: _Attempt) -> Arrival:
    if attempt.began is not None:
        return replace(arrival, since=attempt.began)
    arrival = replace(arrival, problem=attempt.problem, problem_since=attempt.problem_since, retry_at=attempt.retry_at)
    # While busy models hold the room it is not known when there will be some.
    return replace(arrival, seconds=None, room_may_come=True) if attempt.room_may_come else arrival


def _describe_holders(instances: Sequence[Instance], residents: Sequence[Resident], model: str) -> str:
    """Who has the memory that it misses, the largest first, and why they stay."""
    held = [
        (sum(grant.memory_bytes for grant in one.grants), one) for one in instances if one.deployment != model and one.grants
    ]
    used = {resident.name: resident for resident in residents}
    held.sort(key=lambda each: -each[0])
    named = [
        f"{one.deployment} {format_bytes(size)} on {', '.join(dict.fromkeys(grant.device_id for grant in one.grants))}"
        f" ({_why_held(one, used.get(one.deployment))})"
        for size, one in held[:_MOST_HOLDERS_NAMED]
    ]
    more = f" and {len(held) - len(named)} more" if len(held) > len(named) else ""
    return f"; held by {', '.join(named)}{more}" if named else ""


def _why_held(instance: Instance, resident: Resident | None) -> str:
    if resident is None:
        return instance.state.value
    if resident.keep_seconds is None:
        return "kept loaded"
    return f"{resident.in_flight} in flight" if resident.in_flight else f"idle for {resident.idle_seconds:.0f} s"


def _note_failure(attempt: _Attempt | None, failure: _Failure, now: float) -> _Attempt:
    """Pauses double, with jitter, so that many that failed together do not come back together."""
    failures = 1 if attempt is None else attempt.failures + 1
    longest = _LONGEST_ROOM_PAUSE_SECONDS if failure.room_may_come else _LONGEST_PAUSE_SECONDS
    pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(failures - 1, 10), longest) * random.uniform(0.8, 1.2)  # noqa: S311
    since = now if attempt is None or attempt.problem is None or attempt.room_may_come else attempt.problem_since
    return _Attempt(
        began=None,
        failures=failures,
        problem=failure.reason,
        room_may_come=failure.room_may_come,
        problem_since=since,
        retry_at=now + pause,
        refused=failure.refused,
    )


def _freed_bytes(instance: Instance) -> int:
    asleep = instance.sleep_footprint.device_bytes if instance.sleep_footprint else 0
    return sum(max(0, grant.memory_bytes - asleep) for grant in instance.grants)


def _promised_seconds(deployment: Deployment) -> float:
    promised = deployment.objective.ttft_p95_ms if deployment.objective is not None else None
    return promised / 1000 if promised else _FIRST_TOKEN_SECONDS


def _wake_seconds(mine: Sequence[Instance]) -> float:
    """What loading it again would take, by the way in which it would be unloaded."""
    in_place = all(instance.sleep_footprint is not None for instance in mine)
    seen = [instance.wake_ms if in_place else instance.load_ms for instance in mine]
    known = max((milliseconds / 1000 for milliseconds in seen if milliseconds), default=None)
    return known or (_GUESSED_WAKE_SECONDS if in_place else _GUESSED_LOAD_SECONDS)
