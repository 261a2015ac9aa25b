"""Who uses what, and so who sleeps and who is woken: the gateway asks here, the controller acts."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aimgpu.control.controller import Controller
from aimgpu.control.events import Emit
from aimgpu.control.residency import Resident, due_to_sleep
from aimgpu.domain import Instance, InstanceState
from aimgpu.errors import AimGpuError
from aimgpu.gateway.directory import Wake
from aimgpu.gateway.records import RequestRecord

log = logging.getLogger(__name__)

_HOUR_SECONDS = 3600.0
_RETRY_SECONDS = 0.5
_GUESSED_WAKE_SECONDS = 10.0  # for choosing among models that were never seen loading; never told to a caller
# A ready one is on its way too: the gateway's directory learns of it a moment after the books.
_WORTH_WAITING_FOR = frozenset(InstanceState) - {InstanceState.FAILED, InstanceState.ABSENT}


class Residence:
    """An Observer and a Waker for the gateway. `still_wanted` says whether requests still wait for a model."""

    def __init__(
        self, controller: Controller, still_wanted: Callable[[str], bool], emit: Emit, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._controller = controller
        self._still_wanted = still_wanted
        self._emit = emit
        self._now = now
        self._began = now()
        self._requests: dict[str, deque[float]] = {}
        self._ready_since: dict[str, float] = {}  # by instance
        self._load_seconds: dict[str, float] = {}  # by deployment, as last measured
        self._waking: set[str] = set()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="wake")
        self._closing = threading.Event()

    def finished(self, record: RequestRecord) -> None:
        with self._lock:
            times = self._requests.setdefault(record.model, deque())
            times.append(self._now())
            _forget_before(times, self._now() - _HOUR_SECONDS)

    def wake(self, model: str) -> Wake | None:
        with self._lock:
            if model in self._waking:  # between forgetting the sleeping instance and charging the new one there is none
                return Wake(expected_seconds=self._load_seconds.get(model))
        states = {instance.state for instance in self._controller.instances() if instance.deployment == model}
        if not states & _WORTH_WAITING_FOR:
            return None
        if states & {InstanceState.SLEEPING, InstanceState.DRAINING}:
            self._begin_to_wake(model)
        with self._lock:
            return Wake(expected_seconds=self._load_seconds.get(model))

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
        names = dict.fromkeys(instance.deployment for instance in ready if instance.deployment in deployments)
        return tuple(self._resident(name, deployments[name].keep_seconds, ready, now) for name in names)

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=True)

    def _resident(self, name: str, keep_seconds: int | None, ready: list[Instance], now: float) -> Resident:
        mine = [instance for instance in ready if instance.deployment == name]
        with self._lock:
            times = self._requests.get(name, deque())
            _forget_before(times, now - _HOUR_SECONDS)
            since = min(self._ready_since[instance.id] for instance in mine)
            last_used = max(times[-1] if times else since, since)
            wake_seconds = self._load_seconds.get(name, _GUESSED_WAKE_SECONDS)
        in_flight = sum(self._controller.parts.in_flight(instance.id) for instance in mine)
        return Resident(
            name=name,
            priority=mine[0].grants[0].priority,
            keep_seconds=keep_seconds,
            idle_seconds=0.0 if in_flight else now - last_used,
            resident_seconds=now - since,
            in_flight=in_flight,
            wake_seconds=wake_seconds,
            requests_per_hour=float(len(times)),
        )

    def _begin_to_wake(self, model: str) -> None:
        with self._lock:
            if model in self._waking or self._closing.is_set():
                return
            self._waking.add(model)
        self._threads.submit(self._wake, model)

    def _wake(self, model: str) -> None:
        """Until it is up, fails for good, or nobody waits any more: room may only come when another model falls idle."""
        try:
            while not self._closing.is_set():
                began = self._now()
                outcome = self._controller.wake(model, self.residents(), emit=self._emit)
                if not outcome.plan.refusals:
                    with self._lock:
                        self._load_seconds[model] = self._now() - began
                    return
                if not self._still_wanted(model):
                    return
                self._closing.wait(_RETRY_SECONDS)
        except AimGpuError as error:
            log.error("wake.failed", extra={"data": {"deployment": model, **error.to_json()}})  # noqa: TRY400
        finally:
            with self._lock:
                self._waking.discard(model)


def _forget_before(times: deque[float], moment: float) -> None:
    while times and times[0] < moment:
        times.popleft()
