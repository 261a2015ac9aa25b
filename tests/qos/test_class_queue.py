"""One model's waiting line beside a plain list that does the same slowly."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.examples import examples
from tests.qos.worlds import ticket

from aimgpu.domain import Priority
from aimgpu.qos.queueing.queue import BY_RANK, ClassQueue
from aimgpu.qos.queueing.ticket import Ticket, TicketState


@dataclass
class PlainQueue:
    """Tickets in the order in which they came."""

    tickets: list[Ticket] = field(default_factory=list)

    def of(self, priority: Priority) -> list[Ticket]:
        """The first to go first."""
        mine = [one for one in self.tickets if one.priority is priority]
        return sorted(mine, key=lambda one: one.due if one.order is None else one.order)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue, self.plain = ClassQueue(), PlainQueue()
        self.left: list[Ticket] = []
        self.now = 0.0

    @rule(priority=st.sampled_from(list(Priority)), deadline=st.none() | st.floats(0.5, 100), count=st.integers(1, 40))
    def add(self, priority: Priority, deadline: float | None, count: int) -> None:
        for _ in range(count):
            self.now += 0.001  # no two come in the same moment, so that the order is one
            new = ticket(priority.value, self.now, deadline=deadline)
            self.queue.add(new)
            self.plain.tickets.append(new)

    @precondition(lambda self: self.plain.tickets)
    @rule(data=st.data(), count=st.integers(1, 60))
    def remove(self, data: st.DataObject, count: int) -> None:
        """Most of a heap may go at once: it is tidied up then."""
        for _ in range(min(count, len(self.plain.tickets))):
            gone = self.plain.tickets.pop(data.draw(st.integers(0, len(self.plain.tickets) - 1)))
            assert self.queue.remove(gone)
            self.left.append(gone)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def remove_again(self, data: st.DataObject) -> None:
        assert not self.queue.remove(data.draw(st.sampled_from(self.left)))

    @rule(seconds=st.floats(0, 60))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        expected = {one for one in self.plain.tickets if one.due <= self.now}
        expired = self.queue.pop_expired(self.now)
        assert len(expired) == len(set(expired))
        assert set(expired) == expected
        assert all(one.state is TicketState.LEFT for one in expired)
        self.plain.tickets = [one for one in self.plain.tickets if one not in expected]
        self.left += expired

    @rule(seconds=st.floats(1, 600))
    def extend(self, seconds: float) -> None:
        """While the model is away: who has no deadline may wait longer, and nobody loses its place."""
        before = {priority: self.plain.of(priority) for priority in Priority}
        dues = {one: one.due for one in self.plain.tickets}
        self.queue.extend(seconds)
        for one, due in dues.items():
            assert one.due == (due if one.has_deadline else max(due, one.arrived + seconds))
        assert {priority: self.plain.of(priority) for priority in Priority} == before

    @invariant()
    def the_counts_are_true(self) -> None:
        assert len(self.queue) == len(self.plain.tickets)
        for priority in Priority:
            assert self.queue.depth(priority) == len(self.plain.of(priority))

    @invariant()
    def the_first_of_each_class_is_next(self) -> None:
        expected = [self.plain.of(priority)[0] for priority in BY_RANK if self.plain.of(priority)]
        assert list(self.queue.heads()) == expected

    @invariant()
    def all_of_a_class_are_there(self) -> None:
        for priority in Priority:
            assert set(self.queue.waiting(priority)) == set(self.plain.of(priority))

    @precondition(lambda self: self.plain.tickets)
    @rule(deadline=st.none() | st.floats(0.5, 100), priority=st.sampled_from(list(Priority)))
    def count_those_before_a_newcomer(self, deadline: float | None, priority: Priority) -> None:
        new = ticket(priority.value, self.now, deadline=deadline)
        mine = self.plain.of(priority)
        before = [one for one in mine if one.due <= new.due] if deadline is not None else mine
        assert self.queue.ahead_of(new) == len(before)


QueueMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=15)
TestQueue = QueueMachine.TestCase
