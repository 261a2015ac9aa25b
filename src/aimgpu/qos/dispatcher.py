"""What waits and what starts: the one place that hands requests to engines.

`submit` answers at once with Started, Queued or Refused; `finish` and `start_waiting` move the lines; `expire` ends what
waited too long. The caller passes the time and does the sending.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from aimgpu.domain import Priority
from aimgpu.qos.concurrency import AdaptiveLimit
from aimgpu.qos.policy import QueuePolicy
from aimgpu.qos.queue import WaitingLine
from aimgpu.qos.rate import SmoothedRate
from aimgpu.qos.server import Server, ServerState
from aimgpu.qos.ticket import Ticket, TicketState

ServerT = TypeVar("ServerT", bound=Server)
_RATE_WINDOW_SECONDS = 30.0
_LEAST_RETRY_SECONDS = 1.0


class RefusalKind(StrEnum):
    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"
    SHED = "shed"


class Outcome(StrEnum):
    """What a finished request says about its engine."""

    OK = "ok"
    SLOW = "slow"  # served, but slower than promised: too many at once
    OVERLOADED = "overloaded"  # the engine refused or went silent
    BROKEN = "broken"  # it broke off or cannot be reached
    UNKNOWN = "unknown"  # the caller left, or asked for nonsense


@dataclass(frozen=True, slots=True)
class Started(Generic[ServerT]):
    ticket: Ticket
    server: ServerT


@dataclass(frozen=True, slots=True)
class Queued:
    position: int
    expected_wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class Refused:
    kind: RefusalKind
    queued: int
    retry_after_seconds: float


class Dispatcher(Generic[ServerT]):
    def __init__(self, policy: QueuePolicy, servers_of: Callable[[str], Sequence[ServerT]]) -> None:
        self.policy = policy
        self.low_shares: dict[str, float] = {}  # device -> part of the slots that low work may use; absent: all
        self.shed_low: set[str] = set()  # devices on which new low work is refused
        self._servers_of = servers_of
        self._lines: dict[str, WaitingLine] = {}
        self._states: dict[str, ServerState] = {}
        self._departures: dict[tuple[str, Priority], SmoothedRate] = {}
        self._on_device: dict[str, int] = {}

    def submit(self, ticket: Ticket, now: float) -> Started[ServerT] | Queued | Refused:
        servers = self._servers_of(ticket.model)
        line = self._lines.get(ticket.model)
        if line is None or self._goes_first(ticket, line, now):
            server = self._choose(servers, ticket, ticket.priority.rank, now)
            if server is not None:
                return self._start(ticket, server, now)
        refused = self._refuse(ticket, servers, line, now)
        if refused is not None:
            return refused
        self._note_blocked(ticket, servers, now)
        if line is None:
            line = self._lines[ticket.model] = WaitingLine()
        expected = self.expected_wait(ticket.model, ticket.priority, now)
        line.add(ticket)
        return Queued(len(line), expected)

    def finish(self, ticket: Ticket, server: Server, outcome: Outcome, now: float) -> None:
        """Exactly once for every Started."""
        state = self._states[server.instance_id]
        rank = ticket.priority.rank
        if outcome is Outcome.OK:
            state.limit.went_well(state.in_flight)
        elif outcome in (Outcome.SLOW, Outcome.OVERLOADED):
            state.limit.overloaded(now)
        if outcome in (Outcome.OK, Outcome.SLOW):
            state.breaker.succeeded()
        elif outcome in (Outcome.BROKEN, Outcome.OVERLOADED):
            state.breaker.failed(now)
        else:
            state.breaker.let_go()
        state.ended(rank)
        if state.device_id is not None:
            self._on_device[state.device_id] -= 1
        ticket.state = TicketState.LEFT

    def start_waiting(self, now: float, models: Iterable[str] | None = None) -> list[Started[ServerT]]:
        """Everything that can start now, of these models (all, when none are named), best first."""
        started: list[Started[ServerT]] = []
        names = [name for name in (self._lines if models is None else models) if name in self._lines]
        while names:
            found = self._best(names, now)
            if found is None:
                break
            ticket, server = found
            line = self._lines[ticket.model]
            line.remove(ticket)
            self._departed(ticket, now)
            started.append(self._start(ticket, server, now))
            if not len(line):
                del self._lines[ticket.model]
                names.remove(ticket.model)
        return started

    def withdraw(self, ticket: Ticket) -> bool:
        line = self._lines.get(ticket.model)
        if line is None or not line.remove(ticket):
            return False
        if not len(line):
            del self._lines[ticket.model]
        return True

    def expire(self, now: float) -> list[Ticket]:
        expired: list[Ticket] = []
        for name in tuple(self._lines):
            line = self._lines[name]
            expired.extend(line.pop_expired(now))
            if not len(line):
                del self._lines[name]
        return expired

    def withdraw_all(self, model: str) -> list[Ticket]:
        """Everyone who waits for a model that will not come back."""
        line = self._lines.pop(model, None)
        return [] if line is None else line.pop_expired(float("inf"))

    def waiting_models(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def depth(self, model: str, priority: Priority | None = None) -> int:
        line = self._lines.get(model)
        if line is None:
            return 0
        return len(line) if priority is None else line.depth(priority)

    def in_flight(self, instance_id: str) -> int:
        state = self._states.get(instance_id)
        return state.in_flight if state else 0

    def allowed(self, instance_id: str) -> int | None:
        state = self._states.get(instance_id)
        return state.limit.allowed if state else None

    def forget(self, instance_id: str) -> None:
        """An engine that is gone for good; kept while something is still in flight there."""
        state = self._states.get(instance_id)
        if state is not None and state.in_flight == 0:
            del self._states[instance_id]

    def expected_wait(self, model: str, priority: Priority, now: float) -> float | None:
        """From how fast this class has been leaving the line; None when that is not known."""
        depth = self.depth(model, priority)
        if depth == 0:
            return 0.0
        rate = self._departures.get((model, priority))
        per_second = rate.read(now) if rate is not None else None
        if per_second is None:
            return None
        return depth / per_second if per_second > 0 else float("inf")

    def _goes_first(self, ticket: Ticket, line: WaitingLine, now: float) -> bool:
        rank = ticket.priority.rank
        return all(self.policy.effective_rank(head.priority, now - head.arrived) < rank for head in line.heads())

    def _best(self, names: list[str], now: float) -> tuple[Ticket, ServerT] | None:
        best: tuple[Ticket, ServerT] | None = None
        best_key: tuple[int, float] = (0, 0.0)
        for name in names:
            servers = self._servers_of(name)
            for ticket in self._lines[name].heads():
                rank = self.policy.effective_rank(ticket.priority, now - ticket.arrived)
                key = (-rank, ticket.due)
                if best is not None and key >= best_key:
                    continue
                server = self._choose(servers, ticket, rank, now)
                if server is not None:
                    best, best_key = (ticket, server), key
        return best

    def _choose(self, servers: Sequence[ServerT], ticket: Ticket, rank: int, now: float) -> ServerT | None:
        """The least loaded engine that has room."""
        chosen: ServerT | None = None
        least = float("inf")
        for server in servers:
            state = self._state(server)
            load = state.in_flight / state.limit.allowed
            if load < least and server.instance_id not in ticket.avoid and self._has_room(server, state, rank, now):
                chosen, least = server, load
        return chosen

    def _has_room(self, server: ServerT, state: ServerState, rank: int, now: float) -> bool:
        device = server.device_id
        share = 1.0
        if device is not None:
            limit = self.policy.device_limits.get(device)
            if limit is not None and self._on_device.get(device, 0) >= limit:
                return False
            share = self.low_shares.get(device, 1.0)
        if state.reserved:
            state.relax(now, self.policy.reserve_seconds)
        return state.can_take(rank, share) and state.breaker.may_send(now)

    def _state(self, server: ServerT) -> ServerState:
        state = self._states.get(server.instance_id)
        if state is None:
            state = ServerState(AdaptiveLimit(server.slots), server.device_id)
            self._states[server.instance_id] = state
        elif state.limit.slots != server.slots:
            state.limit.resize(server.slots)
        return state

    def _start(self, ticket: Ticket, server: ServerT, now: float) -> Started[ServerT]:
        self._state(server).began(ticket.priority.rank)
        if server.device_id is not None:
            self._on_device[server.device_id] = self._on_device.get(server.device_id, 0) + 1
        ticket.state = TicketState.STARTED
        ticket.started = now
        return Started(ticket, server)

    def _refuse(self, ticket: Ticket, servers: Sequence[ServerT], line: WaitingLine | None, now: float) -> Refused | None:
        priority = ticket.priority
        if priority is Priority.LOW and servers and all(server.device_id in self.shed_low for server in servers):
            return Refused(RefusalKind.SHED, self.depth(ticket.model), 10.0)
        depth = line.depth(priority) if line is not None else 0
        expected = self.expected_wait(ticket.model, priority, now)
        if depth >= self.policy.most_queued[priority]:
            return Refused(RefusalKind.QUEUE_FULL, depth, max(expected or 0.0, _LEAST_RETRY_SECONDS))
        longest = min(self.policy.longest_wait_seconds[priority] * self.policy.refuse_above, max(ticket.due - now, 0.0))
        if expected is not None and expected > longest:
            return Refused(RefusalKind.WAIT_TOO_LONG, depth, max(expected - longest, _LEAST_RETRY_SECONDS))
        return None

    def _note_blocked(self, ticket: Ticket, servers: Sequence[ServerT], now: float) -> None:
        rank = ticket.priority.rank
        if self.policy.reserve and rank:
            for server in servers:
                self._state(server).was_blocked(rank, now, self.policy.reserve_seconds)

    def _departed(self, ticket: Ticket, now: float) -> None:
        key = (ticket.model, ticket.priority)
        rate = self._departures.get(key)
        if rate is None:
            rate = self._departures[key] = SmoothedRate(_RATE_WINDOW_SECONDS)
        rate.add(now)
