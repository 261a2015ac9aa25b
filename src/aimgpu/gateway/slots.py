"""The queue as tasks see it: `take` waits until the dispatcher of the qos room starts the request, or raises a refusal."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from aimgpu.domain import Priority
from aimgpu.errors import DeadlinePassed, LoadShed, ModelNotReady, QueueFull, RequestRefused
from aimgpu.gateway.engine_faults import EngineFaults
from aimgpu.gateway.routes import Arrival, Backend, RouteTable, ServedModel
from aimgpu.gateway.wake_requests import WakeRequests
from aimgpu.qos.queueing.dispatcher import Dispatcher, RefusalKind, Refused, RequestOutcome, Started
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.queue import BY_RANK
from aimgpu.qos.queueing.ticket import Ticket

_LOOK_AGAIN_SECONDS = 0.05
_NUDGE_SECONDS = 1.0  # whoever wakes models looks at what is wanted several times in it
_HIGH = Priority.HIGH  # named once: looking up a member of an enumeration costs as much as a call


@dataclass(slots=True, eq=False)
class Lease:
    """A slot at one engine, to be given back exactly once; giving it back twice does nothing."""

    slots: "Slots"
    ticket: Ticket
    backend: Backend
    waited: bool = False
    expected_wait_seconds: float | None = None  # what was expected when it began to wait; None: that was not known
    held: bool = True
    recalled: bool = False  # the slot was taken back for something more urgent: stop, and `take_again`
    on_recall: Callable[[], None] | None = None

    def release(self, outcome: RequestOutcome) -> None:
        """The request is over; `outcome` is what that says about its engine."""
        if self.held:
            self.held = False
            for signal in self.backend.signals:
                signal.end()
            self.slots.give_back(self, outcome)

    def answered(self, now: float) -> None:
        """The caller is about to see something of the answer."""
        if self.held:
            self.slots.note_first_byte(self, now)

    def recall(self) -> None:
        """The slot was taken back: the request has to stop, and wait again."""
        self.held = False
        self.recalled = True
        for signal in self.backend.signals:
            signal.end()
        if self.on_recall is not None:
            self.on_recall()


class SlotRequest(Protocol):
    """What `take` needs to know of a request."""

    model: ServedModel
    priority: Priority
    arrived: float
    deadline_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingLimits:
    """How long callers are held while their model is not up."""

    longest_seconds: float = 300.0  # while it starts or wakes
    longest_blocked_seconds: float = 15.0  # while attempts to start it fail


class Slots:
    """The slots of all engines behind the route table, handed out by the dispatcher. Lives on the gateway's event loop."""

    def __init__(self, routes: RouteTable, policy: QueuePolicy, holding: HoldingLimits | None = None) -> None:
        self.dispatcher: Dispatcher[Backend] = Dispatcher(policy, self._backends_of, self._arrival_of)
        self.wake_requests = WakeRequests()
        self.engine_faults = EngineFaults()
        self._routes = routes
        self._holding = holding or HoldingLimits()
        self._waiting: dict[Ticket, asyncio.Future[Lease]] = {}
        self._looking_at: set[str] = set()
        self._recallable: dict[Ticket, Lease] = {}  # of those below the highest class
        self._timer: asyncio.TimerHandle | None = None
        # Models whose request was refused because they take too long to start, until when they stay wanted all the same:
        # a caller who comes back must find them started, and an estimate that is wrong must not stay so.
        self._nudged: dict[str, float] = {}

    def in_flight(self, instance_id: str) -> int:
        """Requests that this instance works on now."""
        return self.dispatcher.in_flight(instance_id)

    def queued(self, model: str, priority: Priority | None = None) -> int:
        """Requests that wait for a slot of this model."""
        return self.dispatcher.depth(model, priority)

    def find(self, name: str) -> ServedModel | None:
        """The model that has this name now."""
        return self._routes.find(name)

    def find_current(self, model: ServedModel) -> ServedModel:
        """The model as it is now; one that was removed stays as it was."""
        return self._routes.find(model.name) or model

    def may_wait(self, request: SlotRequest, now: float) -> bool:
        """Whether a request whose engine cannot be reached may wait for another, or has waited long enough."""
        waited = now - request.arrived
        longest = self.dispatcher.policy.longest_wait_seconds[request.priority]
        return waited < (longest if request.deadline_seconds is None else min(request.deadline_seconds, longest))

    def exclude(self, instance_id: str, reason: str) -> None:
        """Send nothing more to this instance: it has to be replaced."""
        self.dispatcher.exclude(instance_id)
        self.engine_faults.report(instance_id, reason)

    def change_policy(self, policy: QueuePolicy) -> None:
        """From now on; what can start under the new policy starts."""
        self.dispatcher.change_policy(policy)
        self._hand_out(self.dispatcher.start_waiting(monotonic()))

    def routes_changed(self) -> None:
        """Engines came or went: start what can start now, forget what is gone."""
        self.dispatcher.keep_only({backend.instance_id for model in self._routes.list() for backend in model.backends})
        if self._waiting:
            self._look_again()

    def take(self, request: SlotRequest, now: float, avoid: frozenset[str] = frozenset()) -> Lease | Awaitable[Lease]:
        """A slot, or where none is free what to await for one. Raises a RequestRefused, now or then."""
        model = request.model
        longest = order = self.dispatcher.policy.longest_wait_seconds[request.priority]
        if not model.backends:
            self._check_coming(model, request.priority, now)
            longest = self._holding.longest_seconds
        deadline = request.deadline_seconds
        arrived = request.arrived
        due = arrived + (longest if deadline is None else min(deadline, longest))
        promised = promised_seconds(model, request.priority, deadline)
        ticket = Ticket(model.name, request.priority, arrived, due, deadline is not None, promised, avoid)
        if promised is not None and model.looser_promises:
            ticket.looser_promises = looser_promises(model, deadline)
        if not model.backends:
            ticket.order = min(due, arrived + order)
        answer = self.dispatcher.submit(ticket, now)
        if isinstance(answer, Started):
            return self._lease(ticket, answer.backend)
        if isinstance(answer, Refused):
            if not model.backends:
                self._nudge(model.name, request.priority, now)
            raise _refusal(model, answer)
        if not model.backends:
            self.wake_requests.want(model.owner, request.priority, now)
        elif ticket.promised_seconds is not None:
            self._look_soon(model.name)
        return self._wait(ticket, answer.expected_wait_seconds)

    async def take_again(self, lease: Lease) -> Lease:
        """For a request that was recalled: wait at the place that its age gives it."""
        ticket = lease.ticket
        self.dispatcher.queue_again(ticket)
        self._look_soon(ticket.model)
        return await self._wait(ticket, lease.expected_wait_seconds)

    def note_first_byte(self, lease: Lease, now: float) -> None:
        """The caller is about to see something of the answer: it is not recalled any more."""
        self._recallable.pop(lease.ticket, None)
        self.dispatcher.note_first_byte(lease.ticket, lease.backend, now)

    def give_back(self, lease: Lease, outcome: RequestOutcome) -> None:
        """The slot is free: start what waits for it."""
        now = monotonic()
        dispatcher = self.dispatcher
        self._recallable.pop(lease.ticket, None)
        dispatcher.finish(lease.ticket, lease.backend, outcome, now)
        if self._waiting:
            shared = dispatcher.policy.limits_devices
            self._hand_out(dispatcher.start_waiting(now, None if shared else (lease.ticket.model,)))

    async def _wait(self, ticket: Ticket, expected_seconds: float | None) -> Lease:
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = waiter
        self._arm()
        try:
            lease = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release(RequestOutcome.UNKNOWN)  # granted and cancelled in the same moment
            raise
        finally:
            self._waiting.pop(ticket, None)
            self.dispatcher.withdraw(ticket)
        lease.waited = True
        lease.expected_wait_seconds = expected_seconds
        return lease

    def _nudge(self, name: str, priority: Priority, now: float) -> None:
        self._nudged[name] = now + _NUDGE_SECONDS
        self.wake_requests.want(self._owner_of(name), priority, now)
        self._arm()

    def _lease(self, ticket: Ticket, backend: Backend) -> Lease:
        lease = Lease(self, ticket, backend)
        for signal in backend.signals:
            signal.begin()
        if ticket.priority is not _HIGH:
            self._recallable[ticket] = lease
        return lease

    def _look_soon(self, model: str) -> None:
        """Something urgent or something recalled is about to wait for this model; many may come in one turn of the loop."""
        if model not in self._looking_at:
            self._looking_at.add(model)
            asyncio.get_running_loop().call_soon(self._look_at, model)

    def _look_at(self, model: str) -> None:
        self._looking_at.discard(model)
        now = monotonic()
        recalled = self._recall(now)  # for any that waits, whichever model it waits for
        self._hand_out(self.dispatcher.start_waiting(now, None if recalled else (model,)))

    def _recall(self, now: float) -> bool:
        chosen = self.dispatcher.choose_recalls(now)
        for one in chosen:
            self.dispatcher.take_back(one.ticket, one.backend)
            self._recallable.pop(one.ticket).recall()
        return bool(chosen)

    def _hand_out(self, started: list[Started[Backend]]) -> None:
        for one in started:
            waiter = self._waiting.get(one.ticket)
            lease = self._lease(one.ticket, one.backend)
            if waiter is None or waiter.done():
                lease.release(RequestOutcome.UNKNOWN)
            else:
                waiter.set_result(lease)

    def _backends_of(self, name: str) -> tuple[Backend, ...]:
        model = self._routes.find(name)
        return model.backends if model is not None else ()

    def _owner_of(self, name: str) -> str:
        model = self._routes.find(name)
        return model.owner if model is not None else name

    def _arrival_of(self, name: str) -> Arrival | None:
        model = self._routes.find(name)
        return model.arrival if model is not None else None

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        """While requests wait, look now and then: time passes, and breakers close."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = monotonic()
        self._look_at_missing(now)
        self._recall(now)
        self._hand_out(self.dispatcher.start_waiting(now))
        for ticket in self.dispatcher.expire(now):
            self._fail(ticket, _expired(ticket, now, self._routes.find(ticket.model)))
        if self._waiting or self._nudged:
            self._arm()

    def _look_at_missing(self, now: float) -> None:
        """Models that are waited for and have no engine: callers are held while it is on its way, else they get the reason."""
        self._nudged = {name: until for name, until in self._nudged.items() if until > now}
        missing = set(self._nudged)
        for name in self.dispatcher.waiting_models():
            model = self._routes.find(name)
            if model is not None and model.backends:
                continue
            reason = self._why_in_vain(name, model, now)
            if reason is not None:
                for ticket in self.dispatcher.withdraw_all(name):
                    self._fail(ticket, reason)
                continue
            missing.add(name)
            self.dispatcher.extend(name, self._holding.longest_seconds)
            priority = next(each for each in BY_RANK if self.dispatcher.depth(name, each))
            self.wake_requests.want(self._owner_of(name), priority, now)
            blocked = _blocked(model, now)
            if blocked is not None and model is not None and model.arrival is not None and model.arrival.room_may_come:
                for ticket in self.dispatcher.withdraw_late(name, now):
                    self._fail(ticket, blocked)
        self.wake_requests.keep_only(frozenset(map(self._owner_of, missing)))

    def _check_coming(self, model: ServedModel, priority: Priority, now: float) -> None:
        """Raises where a model without an engine is not worth waiting for; the next caller may find it started."""
        reason = self._why_in_vain(model.name, model, now)
        if reason is not None:
            if model.arrival is not None:
                self._nudge(model.name, priority, now)
            raise reason

    def _why_in_vain(self, name: str, model: ServedModel | None, now: float) -> RequestRefused | None:
        if model is None:
            return ModelNotReady(f"'{name}' was removed.")
        arrival = model.arrival
        if arrival is None:
            return not_ready(model)
        blocked = _blocked(model, now)
        if blocked is None or arrival.room_may_come or arrival.no_room:
            return blocked if arrival.no_room else None
        longest = self._holding.longest_blocked_seconds
        held = now - arrival.problem_since <= longest and (arrival.retry_at or now) - now <= longest
        return None if held else blocked

    def _fail(self, ticket: Ticket, error: RequestRefused) -> None:
        waiter = self._waiting.get(ticket)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)


def _blocked(model: ServedModel | None, now: float) -> ModelNotReady | None:
    """A refusal with the reason of the last failed start. None: no start failed, or the next is about to begin."""
    arrival = model.arrival if model is not None else None
    if model is None or arrival is None or arrival.problem is None or arrival.retry_at is None:
        return None
    if arrival.retry_at <= now and not arrival.no_room:
        return None
    retry = max(1, math.ceil(arrival.retry_at - now))
    return ModelNotReady(f"'{model.name}' could not be started: {arrival.problem}", retry_after_seconds=retry)


def promised_seconds(model: ServedModel, priority: Priority, deadline_seconds: float | None) -> float | None:
    """Within which a high request was promised its first byte: by its model's objective, or its own deadline."""
    if priority is not _HIGH:
        return None
    promised = model.first_byte_promise
    if promised is None or deadline_seconds is None:
        return promised or deadline_seconds
    return min(promised, deadline_seconds)


def looser_promises(model: ServedModel, deadline_seconds: float | None) -> tuple[float, ...]:
    """What a high request was promised beside the tightest: worth keeping when that is lost. Nothing is after its deadline."""
    if deadline_seconds is None:
        return model.looser_promises
    sooner = tuple(promise for promise in model.looser_promises if promise < deadline_seconds)
    return (*sooner, deadline_seconds)


def _measured_retry(model: ServedModel | None, now: float) -> int | None:
    """What is left of its start or wake, by what the last one took; all of it again where this one takes longer."""
    arrival = model.arrival if model is not None else None
    if arrival is None or arrival.seconds is None:
        return None
    left = arrival.seconds_left(now)
    return max(1, math.ceil(arrival.seconds if left is None else left))


def not_ready(model: ServedModel) -> ModelNotReady:
    """The refusal for a model that waiting does not help."""
    reason = f": {model.reason}" if model.reason else ""
    return ModelNotReady(f"'{model.name}' is {model.state}{reason}.")


def _refusal(model: ServedModel, refused: Refused) -> RequestRefused:
    name, retry = model.name, math.ceil(refused.retry_after_seconds)
    if not model.backends and refused.kind is RefusalKind.WAIT_TOO_LONG:
        text = f"'{name}' is {model.state}, and will not be ready within the time that this request may wait."
        return ModelNotReady(text, retry_after_seconds=retry)
    if refused.kind is RefusalKind.SHED:
        return LoadShed(
            f"'{name}' takes no low-priority work now: something more important on its GPU is late.", retry_after_seconds=retry
        )
    before = f"{refused.queued} request{' waits' if refused.queued == 1 else 's wait'} for '{name}'"
    why = "this one would wait longer than it may" if refused.kind is RefusalKind.WAIT_TOO_LONG else "as many as may"
    return QueueFull(f"{before} already: {why}.", retry_after_seconds=retry)


def _expired(ticket: Ticket, now: float, model: ServedModel | None) -> RequestRefused:
    waited = f"It waited {now - ticket.arrived:.1f} s for '{ticket.model}'"
    retry = _measured_retry(model, now)
    if ticket.has_deadline:
        return DeadlinePassed(f"{waited}; its deadline has passed.", retry_after_seconds=retry)
    if model is not None and not model.backends:
        reason = f": {model.reason}" if model.reason else ""
        return ModelNotReady(f"{waited}, which is still {model.state}{reason}.", retry_after_seconds=retry)
    return LoadShed(f"{waited}, the longest that this class may.")
