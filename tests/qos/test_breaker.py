"""The circuit breaker before an engine: any sequence of requests, failures and time."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aimgpu.qos.queueing.breaker import Breaker

TO_OPEN, FIRST, LONGEST = 3, 1.0, 8.0


def make() -> Breaker:
    return Breaker(failures_to_open=TO_OPEN, first_pause_seconds=FIRST, longest_pause_seconds=LONGEST)


def test_one_failure_short_of_the_limit_sends_on() -> None:
    breaker = make()
    for now in range(TO_OPEN - 1):
        breaker.failed(float(now))
    assert breaker.may_send(0.0)
    breaker.succeeded()
    for now in range(TO_OPEN - 1):
        breaker.failed(float(now))
    assert breaker.may_send(0.0), "a success in between starts the count again"


def test_pauses_double_up_to_the_longest_and_a_success_forgets_them() -> None:
    breaker, now, pauses = make(), 0.0, []
    for _ in range(TO_OPEN - 1):
        breaker.failed(now)
    for _ in range(6):
        breaker.failed(now)
        assert breaker.opened_until is not None
        pauses.append(breaker.opened_until - now)
        now = breaker.opened_until
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    breaker.succeeded()
    for _ in range(TO_OPEN):
        breaker.failed(now)
    assert breaker.opened_until == now + FIRST


def test_an_engine_that_cannot_be_reached_is_left_alone_at_once() -> None:
    breaker = make()
    breaker.trip(10.0)
    assert not breaker.may_send(10.0)
    assert breaker.may_send(10.0 + FIRST)


def test_a_caller_that_leaves_lets_the_next_one_try() -> None:
    breaker = make()
    breaker.trip(0.0)
    breaker.sent()
    assert not breaker.may_send(FIRST), "one tries"
    breaker.let_go()
    assert breaker.may_send(FIRST)


@pytest.mark.parametrize("then", ["succeeded", "failed", "trip"])
def test_an_engine_that_was_excluded_stays_so(then: str) -> None:
    breaker = make()
    breaker.trip(0.0)
    breaker.excluded = True
    breaker.opened_until = float("inf")
    getattr(breaker, then)(*([] if then == "succeeded" else [1.0]))
    assert not breaker.may_send(1e12)


class AnyEngine(RuleBasedStateMachine):
    """What the breaker promises, whatever happens."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker, self.now = make(), 0.0
        self.in_a_row = 0
        self.under_way = 0
        self.probes = 0

    @rule(seconds=st.floats(0.01, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.may_send(self.now))
    @rule()
    def send(self) -> None:
        is_probe = self.breaker.opened_until is not None
        self.breaker.sent()
        self.under_way += 1
        self.probes += is_probe
        if is_probe:
            assert not self.breaker.may_send(self.now), "while one tries, no other does"

    @precondition(lambda self: self.under_way)
    @rule()
    def answer(self) -> None:
        self.breaker.succeeded()
        self.under_way -= 1
        self.in_a_row = self.probes = 0
        assert self.breaker.may_send(self.now)

    @precondition(lambda self: self.under_way)
    @rule()
    def fail(self) -> None:
        self.breaker.failed(self.now)
        self.under_way -= 1
        self.in_a_row += 1
        self.probes = 0
        if self.in_a_row >= TO_OPEN:
            assert not self.breaker.may_send(self.now)
            assert self.breaker.may_send(self.now + LONGEST), "never shut for longer than the longest pause"

    @invariant()
    def it_opens_only_after_enough_failures_in_a_row(self) -> None:
        assert (self.breaker.opened_until is not None) == (self.in_a_row >= TO_OPEN)
        assert self.probes <= 1


TestAnyEngine = AnyEngine.TestCase
TestAnyEngine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
