"""Taking a slot back: work whose caller has seen nothing of it yet makes way for a request that would else break its promise.

A slot in use cannot be shared, so where all slots are long in use no order of a queue keeps a promise that is tighter than one
request's time. What is recalled loses the time it ran, keeps its age and its place, and starts again. Three bounds keep that
from costing more than it helps: the recalls of one request, the time that must be left until it is due itself, and the part of
the time of lower work that may be lost in all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from aimgpu.qos.queueing.ticket import Ticket

_NEWS = 0.1  # weight of the last request in a smoothed time


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallPolicy:
    """`patience` is the part of its promised time after which a request is helped; the rest is for the help to take effect."""

    most: int = 2  # times that one request may be recalled; 0: nothing is ever recalled
    patience: float = 0.25
    waste: float = 0.1  # of the time that lower work runs, at most this part is lost by recalls
    least_left: float = 0.35  # of its longest wait, what a request must have before it: it must not come back aged above others


@dataclass(slots=True)
class WasteBudget:
    """Seconds of work that may be lost: earned by work that ends, kept up to a few minutes."""

    waste: float
    most_seconds: float = 300.0
    left_seconds: float = 100.0

    def earn(self, seconds: float) -> None:
        """Work that took `seconds` ran to its end."""
        self.left_seconds = min(self.left_seconds + self.waste * seconds, self.most_seconds)

    def spend(self, seconds: float) -> bool:
        """False, and nothing is spent, where the budget has not that much."""
        if seconds > self.left_seconds:
            return False
        self.left_seconds -= seconds
        return True


@dataclass(slots=True)
class HoldBudget:
    """For how long low work may be held back on a device: whole bursts, and a fifth of the time in the long run.

    Without it a promise that is tighter than what the engine usually needs would keep low work out until it ages.
    """

    most_seconds: float = 20.0
    part: float = 0.2
    left_seconds: float = 20.0
    looked: float = 0.0
    holding: bool = False

    def may_hold(self, now: float, *, wanted: bool) -> bool:
        """Asked several times a second while low work waits; time in between counts as it was answered last."""
        passed = now - self.looked
        self.left_seconds = min(self.left_seconds + self.part * passed, self.most_seconds)
        if self.holding:
            self.left_seconds -= min(passed, 1.0)
        self.looked = now
        self.holding = wanted and self.left_seconds > 0
        return self.holding


@dataclass(slots=True)
class Recalls:
    """Who is promised a first byte and has none yet, who would be late, and who makes way."""

    policy: RecallPolicy
    counts: dict[str, int] = field(default_factory=dict)  # model -> requests recalled so far
    _first_bytes: dict[str, float] = field(default_factory=dict)  # model -> seconds from the start, smoothed
    _waste: dict[str, WasteBudget] = field(default_factory=dict)
    _unanswered: dict[str, dict[Ticket, None]] = field(default_factory=dict)  # device -> promised requests that run
    _holds: dict[str, HoldBudget] = field(default_factory=dict)  # by device

    def began(self, ticket: Ticket, device_id: str | None) -> None:
        """A request runs; a promised one is watched until its first byte."""
        if ticket.promised_seconds is not None and device_id is not None:
            self._unanswered.setdefault(device_id, {})[ticket] = None

    def answered(self, ticket: Ticket, device_id: str | None, now: float) -> None:
        """Its first byte is out."""
        if ticket.promised_seconds is not None and ticket.started is not None:
            taken = now - ticket.started
            before = self._first_bytes.get(ticket.model, taken)
            self._first_bytes[ticket.model] = before + _NEWS * (taken - before)
            self.ended(ticket, device_id)

    def ended(self, ticket: Ticket, device_id: str | None) -> None:
        """It is not watched any more."""
        if ticket.promised_seconds is not None and device_id in self._unanswered:
            self._unanswered[device_id].pop(ticket, None)

    def earn(self, model: str, seconds: float) -> None:
        """Lower work that took `seconds` ran to its end."""
        self._budget(model).earn(seconds)

    def is_hurried(self, device_id: str, now: float) -> bool:
        """A promised request has run for long without its first byte: nothing new of the lowest class may start beside it."""
        hold = self._holds.get(device_id)
        if hold is None:
            hold = self._holds[device_id] = HoldBudget(looked=now)
        return hold.may_hold(now, wanted=self._is_any_late(device_id, now))

    def _is_any_late(self, device_id: str, now: float) -> bool:
        """One whose promise is broken does not count: no delay of others repairs that, and it may run for minutes."""
        for ticket in self._unanswered.get(device_id, ()):
            waited = now - ticket.arrived
            promised = ticket.promise_to_keep(waited)
            if promised is not None:
                return waited > self.policy.patience * promised
        return False

    def count_late(self, waiting: Iterable[Ticket], per_second: float, now: float) -> int:
        """How many of those that wait would break their promise, where slots come free for them at this rate."""
        late = 0
        for ticket in waiting:
            if ticket.promised_seconds is None:
                continue
            at_best = now - ticket.arrived + self._first_bytes.get(ticket.model, 0.0)
            promised = ticket.promise_to_keep(at_best)
            if promised is None:
                continue  # too late already: what would make way would do so in vain
            expected = at_best + ((late + 1) / per_second if per_second > 0 else 0.0)
            late += expected > self.policy.patience * promised
        return late

    def choose(self, running: Iterable[Ticket], wanted: int, now: float) -> list[Ticket]:
        """At most `wanted` to recall, of the lowest class those that started last: they lose least."""
        may = [ticket for ticket in running if self._may_recall(ticket, now)]
        may.sort(key=lambda ticket: (ticket.priority.rank, -(ticket.started or 0.0)))
        chosen = []
        for ticket in may[:wanted]:
            if not self._budget(ticket.model).spend(now - (ticket.started or now)):
                break
            chosen.append(ticket)
        return chosen

    def count(self, model: str) -> None:
        """One request of this model was recalled."""
        self.counts[model] = self.counts.get(model, 0) + 1

    def _may_recall(self, ticket: Ticket, now: float) -> bool:
        longest = ticket.due - ticket.arrived
        return ticket.recalls < self.policy.most and ticket.due - now >= self.policy.least_left * longest

    def _budget(self, model: str) -> WasteBudget:
        budget = self._waste.get(model)
        if budget is None:
            budget = self._waste[model] = WasteBudget(self.policy.waste)
        return budget
