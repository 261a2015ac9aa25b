"""How many requests an engine really takes: never more than its slots, fewer when it says or shows that it is too many."""

from dataclasses import dataclass


@dataclass(slots=True)
class AdaptiveLimit:
    """Additive increase, multiplicative decrease, at most one decrease in `settle_seconds`.

    Signs of too many: the engine refuses (429, 503), goes silent, or makes tokens slower than promised.
    """

    slots: int
    decrease: float = 0.8
    settle_seconds: float = 1.0
    limit: float = 0.0
    last_decrease: float = float("-inf")

    def __post_init__(self) -> None:
        self.limit = float(self.slots)

    @property
    def allowed(self) -> int:
        """Requests at once, at least one."""
        return max(1, int(self.limit))

    def resize(self, slots: int) -> None:
        """The engine has another number of slots now."""
        if slots != self.slots:
            whole = self.limit >= self.slots
            self.slots = slots
            self.limit = float(slots) if whole else min(self.limit, float(slots))

    def went_well(self, in_flight: int) -> None:
        """Grows only when the limit was in use: an idle engine proves nothing."""
        if self.limit < self.slots and in_flight >= self.allowed:
            self.limit = min(self.limit + 1 / self.limit, float(self.slots))

    def overloaded(self, now: float) -> None:
        """A sign of too many: allow fewer."""
        if now - self.last_decrease >= self.settle_seconds:
            self.limit = max(1.0, self.limit * self.decrease)
            self.last_decrease = now
