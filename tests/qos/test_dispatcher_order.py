"""What is promised about the order: classes, ages, deadlines and reserves, beside a model read off the documentation."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.qos.worlds import Engine, make, ticket

from aimgpu.domain import Priority, QueueSettings
from aimgpu.domain.queueing import ByClass
from aimgpu.qos.queueing.dispatcher import Dispatcher, Queued, Refused, RequestOutcome, Started
from aimgpu.qos.queueing.policy import DEFAULT_LONGEST_WAIT, DEFAULT_MOST_QUEUED, QueuePolicy, policy_for
from aimgpu.qos.queueing.ticket import Ticket

PRIORITIES = st.sampled_from(list(Priority))
ARRIVALS = st.lists(st.tuples(PRIORITIES, st.floats(0, 20), st.none() | st.floats(1, 200)), min_size=1, max_size=25)


def serve_all(dispatcher: Dispatcher[Engine], waiting: list[Ticket], running: Started[Engine], now: float) -> list[Ticket]:
    order: list[Ticket] = []
    while len(order) < len(waiting):
        dispatcher.finish(running.ticket, running.backend, RequestOutcome.OK, now)
        [running] = dispatcher.start_waiting(now)
        order.append(running.ticket)
    return order


@settings(max_examples=examples(35))
@given(ARRIVALS)
def test_an_engine_with_one_slot_serves_by_class_and_then_by_due(arrivals: list[tuple[Priority, float, float | None]]) -> None:
    """At a moment when nothing has waited long enough to be lifted."""
    dispatcher = make(m=(Engine(instance_id="e"),))
    running = dispatcher.submit(ticket(arrived=0.0), 0.0)
    assert isinstance(running, Started)
    waiting: list[Ticket] = []
    moment = 0.0
    for priority, gap, deadline in arrivals:
        moment += gap / 100
        new = ticket(priority.value, moment, deadline=deadline)
        if isinstance(dispatcher.submit(new, moment), Queued):
            waiting.append(new)
    assert len(waiting) == len(arrivals)
    order = serve_all(dispatcher, waiting, running, moment)
    assert order == sorted(waiting, key=lambda one: (-one.priority.rank, one.due))


@settings(max_examples=examples(35))
@given(st.lists(st.tuples(PRIORITIES, st.floats(0, 119)), min_size=2, max_size=20))
def test_what_was_lifted_by_its_age_goes_before_what_is_now_below_it(ages: list[tuple[Priority, float]]) -> None:
    now = 200.0
    policy = QueuePolicy(reserve_part=0.0)
    dispatcher = make(policy, m=(Engine(instance_id="e"),))
    running = dispatcher.submit(ticket(arrived=0.0), 0.0)
    assert isinstance(running, Started)
    waiting = []
    for priority, age in sorted(ages, key=lambda each: -each[1]):
        assume(age < policy.longest_wait_seconds[priority])
        new = ticket(priority.value, now - age)
        assert isinstance(dispatcher.submit(new, now - age), Queued)
        waiting.append(new)
    order = serve_all(dispatcher, waiting, running, now)
    ranks = [policy.effective_rank(one.priority, now - one.arrived) for one in order]
    assert ranks == sorted(ranks, reverse=True)
    for rank in set(ranks):
        level = [one.due for one, its in zip(order, ranks, strict=True) if its == rank]
        assert level == sorted(level)


@settings(max_examples=examples(35))
@given(PRIORITIES, st.floats(0, 1000))
def test_age_lifts_step_by_step_and_never_above_the_highest(priority: Priority, waited: float) -> None:
    policy = QueuePolicy()
    rank = policy.effective_rank(priority, waited)
    assert priority.rank <= rank <= Priority.HIGH.rank
    assert policy.effective_rank(priority, waited + 1) >= rank
    longest = policy.longest_wait_seconds[priority]
    if waited < longest * 0.66:
        assert rank == priority.rank
    if waited > longest * 0.84:
        assert rank == Priority.HIGH.rank


@settings(max_examples=examples(35))
@given(st.lists(st.tuples(PRIORITIES, st.integers(0, 3)), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 6))
def test_no_request_is_lost_or_started_twice(steps: list[tuple[Priority, int]], first: int, second: int) -> None:
    engines = (Engine(instance_id="a", slots=first), Engine(instance_id="b", slots=second))
    dispatcher = make(QueuePolicy(), m=engines)
    running: list[Started[Engine]] = []
    started: list[Ticket] = []
    queued: set[Ticket] = set()
    refused = 0
    for number, (priority, finishes) in enumerate(steps):
        now = number * 0.1
        new = ticket(priority.value, now)
        answer = dispatcher.submit(new, now)
        if isinstance(answer, Started):
            running.append(answer)
            started.append(new)
        elif isinstance(answer, Refused):
            refused += 1
        else:
            queued.add(new)
        for _ in range(min(finishes, len(running))):
            done = running.pop(0)
            dispatcher.finish(done.ticket, done.backend, RequestOutcome.OK, now)
        for one in dispatcher.start_waiting(now):
            queued.remove(one.ticket)
            running.append(one)
            started.append(one.ticket)
        assert dispatcher.in_flight("a") <= first
        assert dispatcher.in_flight("b") <= second
        assert dispatcher.in_flight("a") + dispatcher.in_flight("b") == len(running)
    now = len(steps) * 0.1
    while running:
        done = running.pop(0)
        dispatcher.finish(done.ticket, done.backend, RequestOutcome.OK, now)
        for one in dispatcher.start_waiting(now):
            queued.remove(one.ticket)
            running.append(one)
            started.append(one.ticket)
    left = dispatcher.expire(now + 1000)
    assert set(left) == queued
    assert len(started) == len(set(started))
    assert len(started) + len(left) + refused == len(steps)
    assert dispatcher.depth("m") == 0


@settings(max_examples=examples(35))
@given(st.integers(2, 40), st.lists(PRIORITIES, min_size=1, max_size=60))
def test_low_work_never_takes_what_is_kept_for_higher_classes_and_always_has_a_slot(
    slots: int, arrivals: list[Priority]
) -> None:
    policy = QueuePolicy(reserve_part=0.25, least_reserve_part=0.25)
    dispatcher = make(policy, m=(Engine(instance_id="e", slots=slots),))
    low = 0
    for priority in arrivals:
        answer = dispatcher.submit(ticket(priority.value), 0.0)
        low += isinstance(answer, Started) and priority is Priority.LOW
    assert low <= max(1, slots - int(0.25 * slots))
    if arrivals[0] is Priority.LOW:
        assert low >= 1


@settings(max_examples=examples(35))
@given(st.floats(0.05, 5), st.integers(1, 8), st.integers(1, 30))
def test_the_expected_wait_is_what_a_steady_engine_then_takes(service: float, slots: int, ahead: int) -> None:
    dispatcher = make(
        QueuePolicy(reserve_part=0.0, refuse_above=dict.fromkeys(Priority, 1000.0)), m=(Engine(instance_id="e", slots=slots),)
    )
    now = 0.0
    for _ in range(30):  # it learns how long a request takes
        one = dispatcher.submit(ticket(arrived=now), now)
        assert isinstance(one, Started)
        now += service
        dispatcher.finish(one.ticket, one.backend, RequestOutcome.OK, now)
    for _ in range(slots):
        assert isinstance(dispatcher.submit(ticket(arrived=now), now), Started)
    for position in range(1, ahead + 1):
        answer = dispatcher.submit(ticket(arrived=now), now)
        if isinstance(answer, Refused):
            assert position * service / slots > 30
            return
        assert isinstance(answer, Queued)
        assert answer.position == position
        expected = min(position * service / slots, 60.0)
        assert answer.expected_wait_seconds == pytest.approx(expected, rel=0.01)


def test_a_refusal_says_when_to_come_back_within_bounds() -> None:
    for expected in (0.0, 0.2, 50.0, 1e9):
        policy = QueuePolicy(most_queued=dict.fromkeys(Priority, 1), reserve_part=0.0)
        dispatcher = make(policy, m=(Engine(instance_id="e"),))
        one = dispatcher.submit(ticket(arrived=0.0), 0.0)
        assert isinstance(one, Started)
        dispatcher.finish(one.ticket, one.backend, RequestOutcome.OK, expected)
        dispatcher.submit(ticket(arrived=expected), expected)
        answers = [dispatcher.submit(ticket(arrived=expected), expected) for _ in range(3)]
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert refused
        assert all(1.0 <= answer.retry_after_seconds <= 600.0 for answer in refused)


def test_what_a_user_writes_changes_that_and_nothing_else() -> None:
    plain = policy_for(QueueSettings())
    assert plain.longest_wait_seconds == DEFAULT_LONGEST_WAIT
    assert plain.most_queued == DEFAULT_MOST_QUEUED
    assert not plain.limits_devices
    written = policy_for(QueueSettings(longest_wait_ms=ByClass(low=5000), most_queued=ByClass(high=3), per_gpu=7))
    assert written.longest_wait_seconds == {**DEFAULT_LONGEST_WAIT, Priority.LOW: 5.0}
    assert written.most_queued == {**DEFAULT_MOST_QUEUED, Priority.HIGH: 3}
    assert written.limit_of("any") == 7
    assert math.isclose(written.reserve_part, plain.reserve_part)
