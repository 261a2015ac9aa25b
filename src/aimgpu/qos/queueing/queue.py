"""One model's waiting line: a heap per class, earliest due first.

Within a class every ticket without a deadline gets the same time to start, so the earliest due is the first come; one with a
deadline of its own goes before those that can wait longer. Nothing starves: whatever waits comes nearer to its due.
"""

import heapq
from collections.abc import Iterator
from itertools import count

from aimgpu.domain import Priority
from aimgpu.qos.queueing.ticket import Ticket, TicketState

BY_RANK: tuple[Priority, ...] = (Priority.HIGH, Priority.MEDIUM, Priority.LOW)
_COMPACT_ABOVE = 64


class ClassQueue:
    """What waits for one model."""

    def __init__(self) -> None:
        self._heaps: dict[Priority, list[tuple[float, int, Ticket]]] = {priority: [] for priority in BY_RANK}
        self._counts: dict[Priority, int] = dict.fromkeys(BY_RANK, 0)
        self._order = count()

    def __len__(self) -> int:
        return sum(self._counts.values())

    def depth(self, priority: Priority) -> int:
        """Number of waiting requests of a class."""
        return self._counts[priority]

    def add(self, ticket: Ticket) -> None:
        """At the place that its due gives it."""
        ticket.state = TicketState.WAITING
        order = ticket.due if ticket.order is None else ticket.order
        heapq.heappush(self._heaps[ticket.priority], (order, next(self._order), ticket))
        self._counts[ticket.priority] += 1

    def remove(self, ticket: Ticket) -> bool:
        """True when it was waiting. The heap forgets it when it comes to the front, or when most of it is forgotten."""
        if ticket.state is not TicketState.WAITING:
            return False
        ticket.state = TicketState.LEFT
        self._counts[ticket.priority] -= 1
        heap = self._heaps[ticket.priority]
        if len(heap) > _COMPACT_ABOVE and len(heap) > 2 * self._counts[ticket.priority]:
            heap[:] = [entry for entry in heap if entry[2].state is TicketState.WAITING]
            heapq.heapify(heap)
        return True

    def heads(self) -> Iterator[Ticket]:
        """The next ticket of each class that has one, highest class first."""
        for priority in BY_RANK:
            head = self._head(priority)
            if head is not None:
                yield head

    def ahead_of(self, ticket: Ticket) -> int:
        """Of its own class: all, or where it has a deadline only those that are due before it."""
        if not ticket.has_deadline:
            return self._counts[ticket.priority]
        return sum(other.due <= ticket.due for other in self.waiting(ticket.priority))

    def waiting(self, priority: Priority) -> Iterator[Ticket]:
        """All of one class, the first among the first."""
        return (entry[2] for entry in self._heaps[priority] if entry[2].state is TicketState.WAITING)

    def pop_expired(self, now: float) -> list[Ticket]:
        """Those whose time is up leave. Looks at the first ones only: an order is never after its due."""
        expired = []
        for priority in BY_RANK:
            heap = self._heaps[priority]
            if not heap or heap[0][0] > now:
                continue
            for ticket in [entry[2] for entry in heap if entry[0] <= now and entry[2].state is TicketState.WAITING]:
                if ticket.due <= now:
                    self.remove(ticket)
                    expired.append(ticket)
        return expired

    def late(self, now: float) -> list[Ticket]:
        """Requests whose time in the queue is over, whether or not they may wait on."""
        heaps = self._heaps.values()
        return [ticket for heap in heaps for order, _, ticket in heap if order <= now and ticket.state is TicketState.WAITING]

    def extend(self, seconds: float) -> None:
        """All without a deadline may wait that long from their arrival, and keep their place."""
        for priority in BY_RANK:
            for ticket in self.waiting(priority):
                if not ticket.has_deadline and ticket.due < ticket.arrived + seconds:
                    if ticket.order is None:
                        ticket.order = ticket.due
                    ticket.due = ticket.arrived + seconds

    def _head(self, priority: Priority) -> Ticket | None:
        heap = self._heaps[priority]
        while heap and heap[0][2].state is not TicketState.WAITING:
            heapq.heappop(heap)
        return heap[0][2] if heap else None
