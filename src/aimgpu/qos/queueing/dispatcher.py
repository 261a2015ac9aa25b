"""What waits and what starts: the one place that hands requests to engines.

`submit` answers at once with Started, Queued or Refused; `finish` and `start_waiting` move the queues; `expire` ends what
waited too long. The caller passes the time and does the sending.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Generic, TypeVar

from aimgpu.domain import Priority
from aimgpu.qos.queueing.backend import Arrival, Backend, BackendState
from aimgpu.qos.queueing.concurrency import AdaptiveLimit
from aimgpu.qos.queueing.device_pools import DevicePools
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.queue import ClassQueue
from aimgpu.qos.queueing.rate import SmoothedRate
from aimgpu.qos.queueing.recalls import Recalls
from aimgpu.qos.queueing.ticket import Ticket, TicketState

BackendT = TypeVar("BackendT", bound=Backend)
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 600.0  # a queue that hardly moves would say years
_RATE_WINDOW_SECONDS = 30.0
_MOST_LOOKED_AT = 256  # of those that wait: more cannot be helped at once, and there may be thousands
_HIGHEST = Priority.HIGH.rank
_NEWS = 0.1  # weight of the last request in the smoothed service time


class RefusalKind(StrEnum):
    """Why new work is not queued."""

    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"
    SHED = "shed"


class RequestOutcome(StrEnum):
    """What a finished request says about its engine."""

    OK = "ok"
    SLOW = "slow"  # served, but slower than promised: too many at once
    OVERLOADED = "overloaded"  # the engine refused or went silent
    BROKEN = "broken"  # it broke off
    UNREACHABLE = "unreachable"  # nothing listens there
    UNKNOWN = "unknown"  # the caller left, or asked for nonsense


# Named once: looking up a member of an enumeration costs as much as a call, and every request would look up ten.
_LOW = Priority.LOW
_STARTED, _LEFT = TicketState.STARTED, TicketState.LEFT
_OK, _UNKNOWN, _UNREACHABLE = RequestOutcome.OK, RequestOutcome.UNKNOWN, RequestOutcome.UNREACHABLE
_TOO_MUCH = (RequestOutcome.SLOW, RequestOutcome.OVERLOADED)
_SERVED = (RequestOutcome.OK, RequestOutcome.SLOW)
_FAILED = (RequestOutcome.BROKEN, RequestOutcome.OVERLOADED)


@dataclass(slots=True)
class Started(Generic[BackendT]):
    """Not frozen: one is made for every request."""

    ticket: Ticket
    backend: BackendT


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits: the number before it, and the expected wait (None: not known)."""

    position: int
    expected_wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class Refused:
    """It is not queued; another try is worthwhile after that time."""

    kind: RefusalKind
    queued: int
    retry_after_seconds: float


class Dispatcher(Generic[BackendT]):
    """`arrival_of`: for a model without backends, when it is expected to have some; None: not at all."""

    def __init__(
        self,
        policy: QueuePolicy,
        backends_of: Callable[[str], Sequence[BackendT]],
        arrival_of: Callable[[str], Arrival | None] = lambda _: None,
    ) -> None:
        self.policy = policy
        self.low_shares: dict[str, float] = {}  # device -> part of the slots that low work may use; absent: all
        self.shed_low: set[str] = set()  # devices on which new low work is refused
        self._backends_of = backends_of
        self._arrival_of = arrival_of
        self._queues: dict[str, ClassQueue] = {}
        self._states: dict[str, BackendState] = {}
        self._backends: dict[str, BackendT] = {}  # by instance, as the states
        self._devices = DevicePools(policy)
        self._departures: dict[tuple[str, Priority], SmoothedRate] = {}  # of queues that never emptied since
        self._service_seconds: dict[tuple[str, Priority], float] = {}  # how long a request takes, smoothed
        self.recalls = Recalls(policy.recall)

    def change_policy(self, policy: QueuePolicy) -> None:
        """From now on. Requests that run or wait stay, and keeps the due that it was given."""
        self.policy = policy
        self.recalls.policy = policy.recall
        self._devices.change_limits(policy, self._states.values())

    def submit(self, ticket: Ticket, now: float) -> Started[BackendT] | Queued | Refused:
        """Start it, queue it or refuse it, at once."""
        backends = self._backends_of(ticket.model)
        queue = self._queues.get(ticket.model)
        if ticket.priority is not _LOW and self.policy.reserve_part:
            self._note_need(ticket, backends, queue, now)
        if queue is None or self._goes_first(ticket, queue, now):
            backend = self._choose(backends, ticket, ticket.priority.rank, now)
            if backend is not None:
                return self._start(ticket, backend, now)
        refused = self._refuse(ticket, backends, queue, now)
        if refused is not None:
            return refused
        if queue is None:
            queue = self._queues[ticket.model] = ClassQueue()
        expected = self._expected_wait_of(ticket, queue, now, its_own=True)
        queue.add(ticket)
        return Queued(len(queue), None if expected is None else min(expected, ticket.due - now))

    def finish(self, ticket: Ticket, backend: Backend, outcome: RequestOutcome, now: float) -> None:
        """Exactly once for every Started."""
        state = self._states[backend.instance_id]
        rank = ticket.priority.rank
        if outcome is _OK:
            state.limit.went_well(state.pool.in_flight)
        elif outcome in _TOO_MUCH:
            state.limit.overloaded(now)
        if outcome in _SERVED:
            state.breaker.succeeded()
        elif outcome in _FAILED:
            state.breaker.failed(now)
        elif outcome is _UNREACHABLE:
            state.breaker.trip(now)
        else:
            state.breaker.let_go()
        self._free(state, rank)
        if outcome is not _UNKNOWN and outcome is not _UNREACHABLE and ticket.started is not None:
            key = (ticket.model, ticket.priority)
            before = self._service_seconds.get(key)
            taken = now - ticket.started
            self._service_seconds[key] = taken if before is None else before + _NEWS * (taken - before)
            if rank < _HIGHEST:
                self.recalls.earn(ticket.model, taken)
        state.recallable.pop(ticket, None)
        self.recalls.ended(ticket, state.device_id)
        ticket.state = _LEFT

    def note_first_byte(self, ticket: Ticket, backend: Backend, now: float) -> None:
        """The caller has something of the answer now: from here on it is not recalled."""
        self._states[backend.instance_id].recallable.pop(ticket, None)
        self.recalls.answered(ticket, backend.device_id, now)

    def choose_recalls(self, now: float) -> list[Started[BackendT]]:
        """Requests to recall now so that waiting high requests keep their promise: pass each to `take_back`.

        Where only the device's limit is in the way, work of any model on it makes way.
        """
        if not self.policy.recall.most:
            return []
        chosen: list[Started[BackendT]] = []
        for name, queue in self._queues.items():
            if not queue.depth(Priority.HIGH):
                continue
            groups = [group for backend in self._backends_of(name) if (group := self._could_make_way(backend, now))]
            if not groups:
                continue
            late = self.recalls.count_late(
                islice(queue.waiting(Priority.HIGH), _MOST_LOOKED_AT), self._rate_for(name, Priority.HIGH, now) or 0.0, now
            )
            for backends, most in groups:
                running = {ticket: backend for backend in backends for ticket in self._states[backend.instance_id].recallable}
                for ticket in self.recalls.choose(running, min(late, most), now):
                    del self._states[running[ticket].instance_id].recallable[ticket]
                    chosen.append(Started(ticket, running[ticket]))
                    late -= 1
        return chosen

    def _could_make_way(self, backend: BackendT, now: float) -> tuple[list[BackendT], int] | None:
        """Where something is to be stopped so that one more can start at this engine, and how many that could help."""
        state = self._state(backend)
        free = state.limit.allowed - state.pool.in_flight
        device = backend.device_id
        if free > 0 and device is not None and self._devices.is_full(device) and state.breaker.may_send(now):
            found = [self._backends[name] for name, one in self._states.items() if one.device_id == device and one.recallable]
            return (found, free) if found else None
        return ([backend], len(state.recallable)) if state.recallable else None

    def take_back(self, ticket: Ticket, backend: Backend) -> None:
        """A recalled request gives its slot back; `queue_again` is to follow."""
        state = self._states[backend.instance_id]
        state.breaker.let_go()
        self._free(state, ticket.priority.rank)
        ticket.recalls += 1
        ticket.state = TicketState.NEW
        self.recalls.count(ticket.model)

    def queue_again(self, ticket: Ticket) -> None:
        """At the place that its age gives it; it was admitted before, so the bounds on new work are not asked."""
        ticket.started = None
        queue = self._queues.get(ticket.model)
        if queue is None:
            queue = self._queues[ticket.model] = ClassQueue()
        queue.add(ticket)

    def start_waiting(self, now: float, models: Iterable[str] | None = None) -> list[Started[BackendT]]:
        """Everything that can start now, of these models (all, when none are named), best first."""
        started: list[Started[BackendT]] = []
        names = [name for name in (self._queues if models is None else models) if name in self._queues]
        while names:
            found = self._best(names, now)
            if found is None:
                break
            ticket, backend = found
            queue = self._queues[ticket.model]
            queue.remove(ticket)
            self._note_departure(ticket, queue, now)
            started.append(self._start(ticket, backend, now))
            if not len(queue):
                del self._queues[ticket.model]
                names.remove(ticket.model)
        return started

    def withdraw(self, ticket: Ticket) -> bool:
        """Its caller no longer waits. False where it was not waiting."""
        queue = self._queues.get(ticket.model)
        if queue is None or not queue.remove(ticket):
            return False
        if not len(queue):
            del self._queues[ticket.model]
        return True

    def expire(self, now: float) -> list[Ticket]:
        """Take out and return those that waited as long as they may."""
        expired: list[Ticket] = []
        for name in tuple(self._queues):
            queue = self._queues[name]
            expired.extend(queue.pop_expired(now))
            if not len(queue):
                del self._queues[name]
        return expired

    def extend(self, model: str, seconds: float) -> None:
        """The model has no backend now: those that wait for it without a deadline may wait that long from their arrival."""
        queue = self._queues.get(model)
        if queue is not None:
            queue.extend(seconds)

    def withdraw_all(self, model: str) -> list[Ticket]:
        """Everyone who waits for a model that will not come back."""
        queue = self._queues.pop(model, None)
        return [] if queue is None else queue.pop_expired(float("inf"))

    def withdraw_late(self, model: str, now: float) -> list[Ticket]:
        """Those that have waited as long as their class may, though they were held for longer."""
        queue = self._queues.get(model)
        late = [] if queue is None else queue.late(now)
        for ticket in late:
            self.withdraw(ticket)
        return late

    def waiting_models(self) -> tuple[str, ...]:
        """Models that something waits for."""
        return tuple(self._queues)

    def depth(self, model: str, priority: Priority | None = None) -> int:
        """How many wait for a model, of all classes or of one."""
        queue = self._queues.get(model)
        if queue is None:
            return 0
        return len(queue) if priority is None else queue.depth(priority)

    def longest_wait(self, model: str, now: float) -> float | None:
        """Of what is next in each class, how long the one that came first has waited; None: nothing waits."""
        queue = self._queues.get(model)
        return max((now - head.arrived for head in queue.heads()), default=None) if queue is not None else None

    def in_flight(self, instance_id: str) -> int:
        """Requests that an engine works on now."""
        state = self._states.get(instance_id)
        return state.pool.in_flight if state else 0

    def on_device(self, device_id: str) -> int | None:
        """Requests that run on a device; None where it has no limit, and nothing is counted."""
        return self._devices.in_flight(device_id)

    def allowed(self, instance_id: str) -> int | None:
        """Requests that an engine may have at once now; None: it was never used."""
        state = self._states.get(instance_id)
        return state.limit.allowed if state else None

    def exclude(self, instance_id: str) -> None:
        """Start nothing more at this engine; it is forgotten when it is gone."""
        state = self._states.get(instance_id)
        if state is not None:
            state.breaker.opened_until = float("inf")
            state.breaker.excluded = True

    def keep_only(self, instance_ids: Collection[str]) -> None:
        """Forget the engines that are not among these, unless something is still in flight there."""
        gone = [name for name, state in self._states.items() if name not in instance_ids and state.pool.in_flight == 0]
        for name in gone:
            del self._states[name], self._backends[name]

    def _expected_wait_of(self, ticket: Ticket, queue: ClassQueue | None, now: float, *, its_own: bool) -> float | None:
        """Those before it, by how fast slots come free for them; None when that is not known.

        Before it are higher classes, and of its own those that came earlier or, if it has a deadline, are due earlier.
        `its_own`: until it starts itself, and not only those before it.
        """
        ahead = int(its_own)
        if queue is not None:
            ahead += sum(queue.depth(each) for each in Priority if each.rank > ticket.priority.rank) + queue.ahead_of(ticket)
        return self._wait_behind(ahead, ticket.model, ticket.priority, now)

    def _wait_behind(self, ahead: int, model: str, priority: Priority, now: float) -> float | None:
        if not self._backends_of(model):
            return self._wait_for_arrival(ahead, model, priority, now)
        if ahead == 0:
            return 0.0
        per_second = self._rate_for(model, priority, now)
        if per_second is None:
            return None
        return ahead / per_second if per_second > 0 else float("inf")

    def _wait_for_arrival(self, ahead: int, model: str, priority: Priority, now: float) -> float | None:
        """Until the model is up, and then until those before it that find no slot at once are through."""
        arrival = self._arrival_of(model)
        left = arrival.seconds_left(now) if arrival is not None else None
        if arrival is None or left is None:
            return None
        behind = max(0, ahead - arrival.slots)
        return left + behind * self._service_seconds.get((model, priority), 0.0) / max(arrival.slots, 1)

    def _rate_for(self, model: str, priority: Priority, now: float) -> float | None:
        """How fast this class leaves its queue, if that was measured; else how fast slots should come free.

        Those are the slots that it and lower classes hold now: what higher ones hold goes to higher ones again. A class that
        holds nothing is credited with a tenth of what it may hold.
        """
        seen = self._departures.get((model, priority))
        leaving = seen.read(now) if seen is not None else None
        if leaving is not None:
            return leaving
        own = self._service_seconds.get((model, priority))
        if not own:
            return None
        freed = 0.0
        usable = 0
        for backend in self._backends_of(model):
            state = self._state(backend)
            usable += state.pool.usable(priority.rank, state.limit.allowed, self.policy, now, self._low_share(backend))
            for each in Priority:
                if each.rank <= priority.rank and state.pool.by_rank[each.rank]:
                    freed += state.pool.by_rank[each.rank] / (self._service_seconds.get((model, each)) or own)
        return max(freed, usable / own / 10)

    def _note_departure(self, ticket: Ticket, queue: ClassQueue, now: float) -> None:
        key = (ticket.model, ticket.priority)
        if queue.depth(ticket.priority) == 0:
            self._departures.pop(key, None)  # the next queue's pace has nothing to do with this one's
            return
        rate = self._departures.get(key)
        if rate is None:
            rate = self._departures[key] = SmoothedRate(_RATE_WINDOW_SECONDS)
        rate.add(now)

    def _low_share(self, backend: BackendT) -> float:
        return self.low_shares.get(backend.device_id, 1.0) if backend.device_id is not None else 1.0

    def _goes_first(self, ticket: Ticket, queue: ClassQueue, now: float) -> bool:
        rank = ticket.priority.rank
        return all(self.policy.effective_rank(head.priority, now - head.arrived) < rank for head in queue.heads())

    def _best(self, names: list[str], now: float) -> tuple[Ticket, BackendT] | None:
        best: tuple[Ticket, BackendT] | None = None
        best_key: tuple[int, float] = (0, 0.0)
        for name in names:
            backends = self._backends_of(name)
            for ticket in self._queues[name].heads():
                rank = self.policy.effective_rank(ticket.priority, now - ticket.arrived)
                key = (-rank, ticket.due if ticket.order is None else ticket.order)
                if best is not None and key >= best_key:
                    continue
                backend = self._choose(backends, ticket, rank, now)
                if backend is not None:
                    best, best_key = (ticket, backend), key
        return best

    def _choose(self, backends: Sequence[BackendT], ticket: Ticket, rank: int, now: float) -> BackendT | None:
        """The least loaded engine that has room."""
        chosen: BackendT | None = None
        least = float("inf")
        for backend in backends:
            state = self._state(backend)
            allowed = state.limit.allowed
            load = state.pool.in_flight / allowed
            if load < least and backend.instance_id not in ticket.avoid and self._has_room(state, allowed, rank, now):
                chosen, least = backend, load
        return chosen

    def _has_room(self, state: BackendState, allowed: int, rank: int, now: float) -> bool:
        device = state.device_id
        share = 1.0
        if device is not None:
            if rank == 0 and self.recalls.is_hurried(device, now):
                return False
            share = self.low_shares.get(device, 1.0)
            if self._devices.limited and not self._devices.has_room(device, rank, now, share):
                return False
        return state.pool.has_room(rank, allowed, self.policy, now, share) and state.breaker.may_send(now)

    def _free(self, state: BackendState, rank: int) -> None:
        state.pool.ended(rank)
        if self._devices.limited:
            self._devices.ended(state.device_id, rank)

    def _state(self, backend: BackendT) -> BackendState:
        state = self._states.get(backend.instance_id)
        if state is None:
            state = BackendState(AdaptiveLimit(backend.slots), backend.device_id)
            self._states[backend.instance_id] = state
            self._backends[backend.instance_id] = backend
        elif state.limit.slots != backend.slots:
            state.limit.resize(backend.slots)
        return state

    def _start(self, ticket: Ticket, backend: BackendT, now: float) -> Started[BackendT]:
        state = self._states[backend.instance_id]
        state.pool.began(ticket.priority.rank)
        state.breaker.sent()
        if self._devices.limited:
            self._devices.began(state.device_id, ticket.priority.rank)
        if ticket.priority.rank < _HIGHEST:
            state.recallable[ticket] = None
        else:
            self.recalls.began(ticket, backend.device_id)
        ticket.state = _STARTED
        ticket.started = now
        return Started(ticket, backend)

    def _refuse(self, ticket: Ticket, backends: Sequence[BackendT], queue: ClassQueue | None, now: float) -> Refused | None:
        priority = ticket.priority
        if priority is Priority.LOW and backends and all(backend.device_id in self.shed_low for backend in backends):
            return Refused(RefusalKind.SHED, self.depth(ticket.model), 10.0)
        depth = queue.depth(priority) if queue is not None else 0
        expected = self._expected_wait_of(ticket, queue, now, its_own=ticket.has_deadline and queue is not None)
        if depth >= self.policy.most_queued[priority]:
            return Refused(RefusalKind.QUEUE_FULL, depth, _retry_seconds(expected or 0.0))
        longest = self.policy.longest_wait_seconds[priority] * self.policy.refuse_above[priority]
        if not backends:
            longest = ticket.due - now
        if ticket.has_deadline and ticket.promised_seconds is None:  # for one that is promised, others may make way
            longest = min(longest, max(ticket.due - now, 0.0))
        if expected is not None and expected > longest:
            return Refused(RefusalKind.WAIT_TOO_LONG, depth, _retry_seconds(expected - longest))
        return None

    def _note_need(self, ticket: Ticket, backends: Sequence[BackendT], queue: ClassQueue | None, now: float) -> None:
        rank = ticket.priority.rank
        waiting = 0
        if queue is not None:
            waiting = sum(queue.depth(each) for each in Priority if each.rank >= rank)
        for backend in backends:
            self._state(backend).pool.note_need(rank, waiting // len(backends), now, self.policy.reserve_seconds)
            if self._devices.limited:
                self._devices.note_need(backend.device_id, rank, waiting, now)


def _retry_seconds(seconds: float) -> float:
    return min(max(seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
