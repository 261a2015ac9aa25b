"""Who uses what, and so who sleeps and who is woken: the gateway asks here, the controller acts."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aimgpu.control.controller import Controller
from aimgpu.control.events import Emit
from aimgpu.control.sleep.eviction_policy import Resident, due_to_sleep
from aimgpu.domain import Instance, InstanceState, ServiceObjective
from aimgpu.errors import AimGpuError
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.routes import Wake
from aimgpu.gateway.slo_monitor import to_sample
from aimgpu.qos.queueing.rate import RecentCount
from aimgpu.qos.slo.scores import ModelScores

log = logging.getLogger(__name__)

_HOUR_SECONDS = 3600.0
_RETRY_SECONDS = 0.5
# For choosing among models that were never seen waking; never told to a caller.
_GUESSED_LOAD_SECONDS = 10.0
_GUESSED_WAKE_SECONDS = 3.0
# A ready one is on its way too: the gateway's directory learns of it a moment after the books.
_WORTH_WAITING_FOR = frozenset(InstanceState) - {InstanceState.FAILED, InstanceState.ABSENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waking:
    began: float
    expected_seconds: float | None
    in_place: bool

    def seconds_left(self, now: float) -> float | None:
        """None: not known, or it takes longer than it did before, and nobody knows how much."""
        if self.expected_seconds is None or now - self.began > self.expected_seconds:
            return None
        return self.expected_seconds - (now - self.began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    objective: ServiceObjective
    scores: ModelScores

    def is_broken(self, now: float) -> bool:
        """Whether its budget goes faster than it may: its callers have waited enough already."""
        return self.scores.is_overspending(now)


class Activator:
    """An Observer and a Waker for the gateway. `still_wanted` says whether requests still wait for a model."""

    def __init__(
        self, controller: Controller, still_wanted: Callable[[str], bool], emit: Emit, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._controller = controller
        self._still_wanted = still_wanted
        self._emit = emit
        self._now = now
        self._began = now()
        self._requests: dict[str, RecentCount] = {}
        self._ready_since: dict[str, float] = {}  # by instance
        # By deployment and whether it slept in place: from the request until it was ready, others unloaded for it included.
        self._seen_seconds: dict[tuple[str, bool], float] = {}
        self._waking: dict[str, _Waking] = {}
        self._promises: dict[str, _Promise] = {}  # by deployment, of those that promised something
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="wake")
        self._closing = threading.Event()

    def finished(self, record: RequestRecord) -> None:
        with self._lock:
            now = self._now()
            requests = self._requests.get(record.model)
            if requests is None:
                requests = self._requests[record.model] = RecentCount(_HOUR_SECONDS)
            requests.add(now)
            promise = self._promises.get(record.model)
            sample = to_sample(record) if promise is not None else None
            if promise is not None and sample is not None:
                promise.scores.record(sample, record.priority, now)

    def wake(self, model: str) -> Wake | None:
        if self._closing.is_set():
            return None
        with self._lock:
            if model in self._waking:  # between forgetting the sleeping instance and charging the new one there is none
                return Wake(expected_seconds=self._waking[model].seconds_left(self._now()))
        mine = [instance for instance in self._controller.instances() if instance.deployment == model]
        states = {instance.state for instance in mine}
        if not states & _WORTH_WAITING_FOR:
            return None
        in_place = any(instance.sleeps_in_place for instance in mine)
        expected = self._expect(model, mine, in_place=in_place)
        if states & {InstanceState.SLEEPING, InstanceState.DRAINING}:
            self._begin_to_wake(model, _Waking(began=self._now(), expected_seconds=expected, in_place=in_place))
        return Wake(expected_seconds=expected)

    def sleep(self, model: str) -> None:
        """Begin to unload a model that nobody uses; one that is busy stays."""
        if not self._closing.is_set():
            self._threads.submit(self._controller.sleep, model, emit=self._emit)

    def _expect(self, model: str, mine: list[Instance], *, in_place: bool) -> float | None:
        """Seconds that it took the last time, in the way that it will come now; None where that was never seen."""
        with self._lock:
            seen = self._seen_seconds.get((model, in_place))
        times = [one.wake_ms if in_place else one.load_ms for one in mine]
        return seen or max((milliseconds / 1000 for milliseconds in times if milliseconds), default=None)

    def tick(self) -> None:
        """Put to sleep what was idle for long enough; call about once a second."""
        residents = self.residents()
        for name in due_to_sleep(residents, self._controller.parts.timing.least_residency_seconds):
            self._controller.sleep(name, emit=self._emit)

    def residents(self) -> tuple[Resident, ...]:
        now = self._now()
        ready = [instance for instance in self._controller.instances() if instance.state is InstanceState.READY]
        with self._lock:
            self._ready_since = {i.id: self._ready_since.get(i.id, now) for i in ready}
        deployments = {item.name: item for item in self._controller.deployments()}
        with self._lock:
            self._promises = {
                name: self._promise(name, item.objective) for name, item in deployments.items() if item.objective is not None
            }
        names = dict.fromkeys(instance.deployment for instance in ready if instance.deployment in deployments)
        return tuple(self._resident(name, deployments[name].keep_seconds, ready, now) for name in names)

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=True)

    def _resident(self, name: str, keep_seconds: int | None, ready: list[Instance], now: float) -> Resident:
        mine = [instance for instance in ready if instance.deployment == name]
        with self._lock:
            requests = self._requests.get(name) or RecentCount(_HOUR_SECONDS)
            since = min(self._ready_since[instance.id] for instance in mine)
            last_used = max(requests.last or since, since)
            at_risk = name in self._promises and self._promises[name].is_broken(now)
        in_flight = sum(self._controller.parts.in_flight(instance.id) for instance in mine)
        return Resident(
            name=name,
            priority=mine[0].grants[0].priority,
            keep_seconds=keep_seconds,
            idle_seconds=0.0 if in_flight else now - last_used,
            resident_seconds=now - since,
            in_flight=in_flight,
            wake_seconds=self._wake_seconds(mine),
            requests_per_hour=float(requests.read(now)),
            at_risk=at_risk,
        )

    def _promise(self, name: str, objective: ServiceObjective) -> _Promise:
        known = self._promises.get(name)
        if known is not None and known.objective == objective:
            return known
        return _Promise(objective=objective, scores=ModelScores(objective))

    def _wake_seconds(self, mine: list[Instance]) -> float:
        """What bringing it back would take, by the way in which it would be unloaded."""
        in_place = all(instance.sleep_footprint is not None for instance in mine)
        seen = [instance.wake_ms if in_place else instance.load_ms for instance in mine]
        known = max((milliseconds / 1000 for milliseconds in seen if milliseconds), default=None)
        return known or (_GUESSED_WAKE_SECONDS if in_place else _GUESSED_LOAD_SECONDS)

    def _begin_to_wake(self, model: str, waking: _Waking) -> None:
        with self._lock:
            if model in self._waking or self._closing.is_set():
                return
            self._waking[model] = waking
        self._threads.submit(self._wake, model, in_place=waking.in_place)

    def _wake(self, model: str, *, in_place: bool) -> None:
        """Until it is up, fails for good, or nobody waits any more: room may only come when another model falls idle."""
        try:
            while not self._closing.is_set():
                began = self._now()
                outcome = self._controller.wake(model, self.residents(), emit=self._emit)
                with self._lock:
                    if not outcome.plan.refusals:
                        self._seen_seconds[model, in_place] = self._now() - began
                        return
                    # Nobody knows when there will be room.
                    self._waking[model] = _Waking(began=began, expected_seconds=None, in_place=in_place)
                if not self._still_wanted(model):
                    return
                self._closing.wait(_RETRY_SECONDS)
        except AimGpuError as error:
            log.error("wake.failed", extra={"data": {"deployment": model, **error.to_json()}})  # noqa: TRY400
        finally:
            with self._lock:
                self._waking.pop(model, None)
