"""A circuit breaker: stop asking an engine that keeps failing, try one request now and then."""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Opens after several failures in a row, for pauses that double; one request tries at the end of each."""

    failures_to_open: int = 5  # in a row
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0
    failures: int = 0
    pause_seconds: float = 0.0
    opened_until: float | None = None
    probing: bool = False
    excluded: bool = False  # for good: no success of an earlier request closes it again

    def may_send(self, now: float) -> bool:
        """Whether a request may go to the engine now."""
        if self.opened_until is None:
            return True
        return now >= self.opened_until and not self.probing

    def sent(self) -> None:
        """A request goes to the engine; while open, it is the one that tries."""
        if self.opened_until is not None:
            self.probing = True

    def succeeded(self) -> None:
        """The engine answered."""
        if self.excluded:
            return
        self.failures = 0
        self.pause_seconds = 0.0
        self.opened_until = None
        self.probing = False

    def failed(self, now: float) -> None:
        """The engine broke off, refused or went silent."""
        if self.excluded:
            return
        self.failures += 1
        self.probing = False
        if self.failures >= self.failures_to_open:
            self.pause_seconds = min(max(self.pause_seconds * 2, self.first_pause_seconds), self.longest_pause_seconds)
            self.opened_until = now + self.pause_seconds

    def trip(self, now: float) -> None:
        """The engine cannot be reached at all: no need to count."""
        self.failures = max(self.failures, self.failures_to_open - 1)
        self.failed(now)

    def let_go(self) -> None:
        """The request ended without saying anything about the engine: its caller left."""
        self.probing = False
