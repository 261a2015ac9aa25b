"""A request as the queue sees it."""

from dataclasses import dataclass
from enum import Enum

from aimgpu.domain import Priority


class TicketState(Enum):
    """Where a ticket is."""

    NEW = "new"
    WAITING = "waiting"
    STARTED = "started"
    LEFT = "left"  # withdrawn, expired or done


@dataclass(slots=True, eq=False)
class Ticket:
    """Equal only to itself. `due` is when it must have started: its deadline, or the longest wait of its class.

    `order` is what its class is sorted by; it differs from `due` for one that may wait longer because its model is not up yet.
    """

    model: str
    priority: Priority
    arrived: float
    due: float
    has_deadline: bool = False
    promised_seconds: float | None = None  # within which its first byte was promised, from arrival: the tightest
    avoid: frozenset[str] = frozenset()  # servers that already failed it
    state: TicketState = TicketState.NEW
    started: float | None = None
    looser_promises: tuple[float, ...] = ()  # the others that were made, ascending
    recalls: int = 0  # times it was taken from its engine again
    order: float | None = None  # None: as `due`

    def promise_to_keep(self, seconds: float) -> float | None:
        """The tightest promise that still holds if its first byte takes that long; None: there is none."""
        promised = self.promised_seconds
        if promised is None or seconds <= promised:
            return promised
        return next((looser for looser in self.looser_promises if seconds <= looser), None)
