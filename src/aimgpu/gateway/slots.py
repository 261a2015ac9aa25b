"""The queue as tasks see it: `take` waits until the dispatcher of the qos room starts the request, or says why not."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from aimgpu.domain import Priority
from aimgpu.errors import DeadlinePassed, LoadShed, ModelNotReady, QueueFull, RequestRefused
from aimgpu.gateway.routes import Backend, RequestSignals, RouteTable, ServedModel, Waker
from aimgpu.qos.queueing.dispatcher import Dispatcher, RefusalKind, Refused, RequestOutcome, Started
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.ticket import Ticket

_LOOK_AGAIN_SECONDS = 0.05
_RETRY_SECONDS = 5
_HIGH = Priority.HIGH  # a member of an enumeration is looked for anew each time it is named


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

    def __post_init__(self) -> None:
        if self.slots.announcer is not None:
            self.slots.announcer.begin(self.backend.instance_id)

    def release(self, outcome: RequestOutcome) -> None:
        if self.held:
            self.held = False
            if self.slots.announcer is not None:
                self.slots.announcer.end(self.backend.instance_id)
            self.slots.give_back(self, outcome)

    def answered(self, now: float) -> None:
        """The caller is about to see something of the answer."""
        if self.held:
            self.slots.note_first_byte(self, now)

    def recall(self) -> None:
        self.held = False
        self.recalled = True
        if self.slots.announcer is not None:
            self.slots.announcer.end(self.backend.instance_id)
        if self.on_recall is not None:
            self.on_recall()


class SlotRequest(Protocol):
    """Whoever wants a slot."""

    model: ServedModel
    priority: Priority
    deadline_seconds: float | None


class Slots:
    def __init__(
        self, directory: RouteTable, policy: QueuePolicy, waker: Waker | None = None, longest_wake_seconds: float = 300.0
    ) -> None:
        self.dispatcher: Dispatcher[Backend] = Dispatcher(policy, self._servers_of)
        self._directory = directory
        self._waker = waker
        self.announcer: RequestSignals | None = None
        self._longest_wake_seconds = longest_wake_seconds
        self._waiting: dict[Ticket, asyncio.Future[Lease]] = {}
        self._looking_at: set[str] = set()
        self._recallable: dict[Ticket, Lease] = {}  # of those below the highest class
        self._timer: asyncio.TimerHandle | None = None

    def in_flight(self, instance_id: str) -> int:
        return self.dispatcher.in_flight(instance_id)

    def queued(self, model: str, priority: Priority | None = None) -> int:
        return self.dispatcher.depth(model, priority)

    def change_policy(self, policy: QueuePolicy) -> None:
        self.dispatcher.change_policy(policy)
        self._hand_out(self.dispatcher.start_waiting(monotonic()))

    def take(self, wish: SlotRequest, now: float, avoid: frozenset[str] = frozenset()) -> Lease | Awaitable[Lease]:
        """A slot, or where none is free what to await for one. Raises a RequestRefused, now or then."""
        model = wish.model
        longest = self.dispatcher.policy.longest_wait_seconds[wish.priority]
        expected: float | None = None
        if not model.backends:
            wake = self._waker.wake(model.name) if self._waker is not None else None
            if wake is None:
                raise not_ready(model)
            longest = self._longest_wake_seconds
            expected = wake.expected_seconds
        deadline = wish.deadline_seconds
        due = now + (longest if deadline is None else min(deadline, longest))
        promised = promised_seconds(model, wish.priority, deadline)
        ticket = Ticket(model.name, wish.priority, now, due, deadline is not None, promised, avoid)
        if promised is not None and model.looser_promises:
            ticket.looser_promises = looser_promises(model, deadline)
        answer = self.dispatcher.submit(ticket, now)
        if isinstance(answer, Started):
            return self._lease(ticket, answer.server)
        if isinstance(answer, Refused):
            raise _refusal(model.name, answer)
        if ticket.promised_seconds is not None:
            self._look_soon(model.name)
        # A wake that was never seen before has no estimate: what the queue alone would take is not the answer.
        return self._wait(ticket, answer.expected_wait_seconds if model.backends else expected)

    async def take_again(self, lease: Lease) -> Lease:
        """For a request that was recalled: wait at the place that its age gives it."""
        ticket = lease.ticket
        self.dispatcher.queue_again(ticket)
        self._look_soon(ticket.model)
        return await self._wait(ticket, lease.expected_wait_seconds)

    def note_first_byte(self, lease: Lease, now: float) -> None:
        self._recallable.pop(lease.ticket, None)
        self.dispatcher.note_first_byte(lease.ticket, lease.backend, now)

    def give_back(self, lease: Lease, outcome: RequestOutcome) -> None:
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

    def _lease(self, ticket: Ticket, backend: Backend) -> Lease:
        lease = Lease(self, ticket, backend)
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
        recalled = self._recall(now)  # for whoever waits, whichever model it waits for
        self._hand_out(self.dispatcher.start_waiting(now, None if recalled else (model,)))

    def _recall(self, now: float) -> bool:
        chosen = self.dispatcher.choose_recalls(now)
        for one in chosen:
            self.dispatcher.take_back(one.ticket, one.server)
            self._recallable.pop(one.ticket).recall()
        return bool(chosen)

    def _hand_out(self, started: list[Started[Backend]]) -> None:
        for one in started:
            waiter = self._waiting.get(one.ticket)
            lease = self._lease(one.ticket, one.server)
            if waiter is None or waiter.done():
                lease.release(RequestOutcome.UNKNOWN)
            else:
                waiter.set_result(lease)

    def _servers_of(self, name: str) -> tuple[Backend, ...]:
        model = self._directory.find(name)
        return model.backends if model is not None else ()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        """Engines come and go without a word to this room, and time passes: while somebody waits, look."""
        self._timer = None
        now = monotonic()
        for ticket in self.dispatcher.expire(now):
            self._fail(ticket, _expired(ticket, now))
        for name in self.dispatcher.waiting_models():
            reason = self._hopeless(name)
            if reason is not None:
                for ticket in self.dispatcher.withdraw_all(name):
                    self._fail(ticket, reason)
        self._recall(now)
        self._hand_out(self.dispatcher.start_waiting(now))
        if self._waiting:
            self._arm()

    def _hopeless(self, name: str) -> RequestRefused | None:
        model = self._directory.find(name)
        if model is None:
            return ModelNotReady(f"'{name}' was removed.")
        if model.backends or (self._waker is not None and self._waker.wake(name) is not None):
            return None
        return not_ready(model)

    def _fail(self, ticket: Ticket, error: RequestRefused) -> None:
        waiter = self._waiting.get(ticket)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)


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


def not_ready(model: ServedModel) -> ModelNotReady:
    reason = f": {model.reason}" if model.reason else ""
    return ModelNotReady(f"'{model.name}' is {model.state}{reason}.", retry_after_seconds=_RETRY_SECONDS)


def _refusal(name: str, refused: Refused) -> RequestRefused:
    retry = math.ceil(refused.retry_after_seconds)
    if refused.kind is RefusalKind.SHED:
        return LoadShed(
            f"'{name}' takes no low-priority work now: something more important on its GPU is late.", retry_after_seconds=retry
        )
    before = f"{refused.queued} request{' waits' if refused.queued == 1 else 's wait'} for '{name}'"
    why = "this one would wait longer than it may" if refused.kind is RefusalKind.WAIT_TOO_LONG else "as many as may"
    return QueueFull(f"{before} already: {why}.", retry_after_seconds=retry)


def _expired(ticket: Ticket, now: float) -> RequestRefused:
    waited = f"It waited {now - ticket.arrived:.1f} s for '{ticket.model}'"
    if ticket.has_deadline:
        return DeadlinePassed(f"{waited}; its deadline has passed.")
    return LoadShed(f"{waited}, the longest that this class may.", retry_after_seconds=_RETRY_SECONDS)
