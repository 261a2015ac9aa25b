"""What an engine is given: breakers, adaptive limits, reserves, pools of devices, and budgets for recalls and holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.qos.worlds import Engine, make, ticket

from aimgpu.domain import Priority
from aimgpu.qos.queueing.backend import Pool
from aimgpu.qos.queueing.breaker import Breaker
from aimgpu.qos.queueing.concurrency import AdaptiveLimit
from aimgpu.qos.queueing.dispatcher import Queued, RequestOutcome, Started
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.rate import SmoothedRate, TokenBucket
from aimgpu.qos.queueing.recalls import HoldBudget, RecallPolicy, Recalls, WasteBudget

STEPS = st.lists(st.tuples(st.sampled_from(["ok", "failed", "trip", "let go"]), st.floats(0, 30)), max_size=60)


@settings(max_examples=examples(35))
@given(STEPS)
def test_an_open_breaker_lets_one_request_try_at_the_end_of_each_pause(steps: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    in_a_row = 0
    for outcome, passed in steps:
        now += passed
        if not breaker.may_send(now):
            assert breaker.opened_until is not None
            assert now < breaker.opened_until, "nobody tries at this moment"
            now = breaker.opened_until
        assert breaker.may_send(now)
        was_open = breaker.opened_until is not None
        breaker.sent()
        assert breaker.may_send(now) is not was_open, "one tries, others wait for what it finds"
        if outcome == "ok":
            breaker.succeeded()
            in_a_row = 0
        elif outcome == "failed":
            breaker.failed(now)
            in_a_row += 1
        elif outcome == "trip":
            breaker.trip(now)
            in_a_row = max(in_a_row, 4) + 1
        else:
            breaker.let_go()
        if in_a_row >= 5:
            assert breaker.opened_until is not None
            assert 1.0 <= breaker.pause_seconds <= 60.0
        elif outcome == "ok":
            assert breaker.opened_until is None


def test_pauses_double_up_to_a_minute_and_begin_again_after_a_success() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(14):
        breaker.failed(now)
        if breaker.opened_until is not None:
            pauses.append(breaker.opened_until - now)
            now = breaker.opened_until
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    breaker.succeeded()
    for _ in range(5):
        breaker.failed(now)
    assert breaker.opened_until == now + 1


def test_nothing_opens_an_engine_that_was_excluded() -> None:
    dispatcher = make(m=(Engine(instance_id="e", slots=2),))
    running = dispatcher.submit(ticket(), 0.0)
    assert isinstance(running, Started)
    dispatcher.exclude("e")
    dispatcher.finish(running.ticket, running.backend, RequestOutcome.OK, 1.0)
    assert isinstance(dispatcher.submit(ticket(arrived=2.0), 2.0), Queued)
    assert dispatcher.start_waiting(50.0) == []
    dispatcher.exclude("unknown")  # harmless
    dispatcher.keep_only(())
    assert dispatcher.allowed("e") is None
    assert len(dispatcher.start_waiting(50.0)) == 1, "another of the same name is a new engine"


LIMIT_STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.floats(0, 3)), max_size=80)


@settings(max_examples=examples(35))
@given(st.integers(1, 64), LIMIT_STEPS)
def test_a_limit_stays_between_one_and_the_slots(slots: int, steps: list[tuple[bool, int, float]]) -> None:
    limit, now = AdaptiveLimit(slots), 0.0
    for went_well, in_flight, passed in steps:
        now += passed
        before = limit.limit
        if went_well:
            limit.went_well(in_flight)
            assert before <= limit.limit <= before + 1
        else:
            limit.overloaded(now)
            assert max(1.0, before * 0.8) <= limit.limit <= before
        assert 1 <= limit.allowed <= slots


@settings(max_examples=examples(35))
@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 20))
def test_another_number_of_slots_keeps_what_was_learned_about_the_engine(before: int, after: int, overloads: int) -> None:
    limit = AdaptiveLimit(before)
    for second in range(overloads):
        limit.overloaded(float(second * 2))
    learned = limit.limit
    limit.resize(after)
    assert limit.limit == (float(after) if overloads == 0 or learned >= before else min(learned, float(after)))


def test_many_signs_of_one_overload_count_once() -> None:
    limit = AdaptiveLimit(100)
    for _ in range(50):
        limit.overloaded(10.0)
    assert limit.allowed == 80
    limit.overloaded(11.0)
    assert limit.allowed == 64


RANKS = st.sampled_from([0, 1, 2])


@settings(max_examples=examples(35))
@given(st.integers(1, 30), st.lists(st.tuples(RANKS, st.integers(0, 10), st.floats(0, 900)), max_size=60))
def test_a_pool_never_runs_more_than_it_may_and_keeps_no_more_than_its_part(
    allowed: int, steps: list[tuple[int, int, float]]
) -> None:
    policy, pool, now = QueuePolicy(), Pool(), 0.0
    for rank, waiting, passed in steps:
        now += passed
        if rank:
            pool.note_need(rank, waiting, now, policy.reserve_seconds)
        if pool.has_room(rank, allowed, policy, now):
            pool.began(rank)
        assert pool.in_flight == sum(pool.by_rank) <= allowed
        for each in (0, 1, 2):
            usable = pool.usable(each, allowed, policy, now, 1.0)
            assert max(1, allowed - int(policy.reserve_part * allowed)) <= usable <= allowed
    assert pool.has_room(2, allowed + 1, policy, now), "the highest class is never kept out by what is kept for it"


def test_what_is_kept_fades() -> None:
    policy, pool = QueuePolicy(reserve_part=0.5), Pool()
    pool.note_need(2, 7, 0.0, policy.reserve_seconds)
    usable = [pool.usable(0, 16, policy, second, 1.0) for second in (0.0, 300.0, 900.0, 3000.0)]
    assert usable == sorted(usable)
    assert (usable[0], usable[-1]) == (8, 16)


@settings(max_examples=examples(35))
@given(st.integers(1, 20), st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans()), max_size=60))
def test_a_device_runs_no_more_than_its_limit_over_all_models(limit: int, steps: list[tuple[str, bool]]) -> None:
    engines = {name: (Engine(instance_id=name, slots=30, device_id="gpu"),) for name in ("a", "b")}
    dispatcher = make(QueuePolicy(every_device_limit=limit, reserve_part=0.0), **engines)
    running: list[Started[Engine]] = []
    for model, finishes in steps:
        answer = dispatcher.submit(ticket(model=model), 0.0)
        if isinstance(answer, Started):
            running.append(answer)
        if finishes and running:
            done = running.pop(0)
            dispatcher.finish(done.ticket, done.backend, RequestOutcome.OK, 1.0)
            running += dispatcher.start_waiting(1.0)
        assert dispatcher.on_device("gpu") == len(running) <= limit
        assert len(running) == limit or dispatcher.depth("a") + dispatcher.depth("b") == 0, "no slot stays empty"


@settings(max_examples=examples(35))
@given(st.floats(0, 1), st.lists(st.tuples(st.booleans(), st.floats(0, 400)), max_size=60))
def test_waste_is_bounded_by_what_was_earned(waste: float, steps: list[tuple[bool, float]]) -> None:
    budget = WasteBudget(waste)
    earned, spent = 100.0, 0.0
    for earns, seconds in steps:
        if earns:
            budget.earn(seconds)
            earned += waste * seconds
        elif budget.spend(seconds):
            spent += seconds
        assert 0 <= budget.left_seconds <= 300.0
        assert spent <= earned + 1e-6


@settings(max_examples=examples(35))
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=20, max_size=300))
def test_low_work_is_held_for_a_burst_and_a_fifth_of_the_time_after(steps: list[tuple[float, bool]]) -> None:
    hold, now, held = HoldBudget(), 0.0, 0.0
    holding = False
    for passed, wanted in steps:
        now += passed
        held += passed if holding else 0.0
        holding = hold.may_hold(now, wanted=wanted)
        assert not holding or wanted
    assert held <= 20.0 + 0.2 * now + 1.0


@settings(max_examples=examples(35))
@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 3), st.sampled_from(list(Priority))), min_size=1, max_size=20),
    st.integers(0, 5),
)
def test_who_makes_way_is_of_the_lowest_class_and_lost_least(running: list[tuple[float, int, Priority]], wanted: int) -> None:
    policy = RecallPolicy()
    recalls, now = Recalls(policy), 100.0
    tickets = []
    for age, recalled, priority in running:
        one = ticket(priority.value, now - age)
        one.started, one.recalls = now - age, recalled
        tickets.append(one)
    chosen = recalls.choose(tickets, wanted, now)
    assert len(chosen) <= wanted
    for one in chosen:
        assert one.recalls < policy.most
        assert one.due - now >= policy.least_left * (one.due - one.arrived)
        assert one.started is not None
        better = [
            other
            for other in tickets
            if other not in chosen
            and other.recalls < policy.most
            and other.due - now >= policy.least_left * (other.due - other.arrived)
            and (other.priority.rank, -(other.started or 0)) < (one.priority.rank, -one.started)
        ]
        assert better == []
    assert sum(now - (one.started or now) for one in chosen) <= 100.0 * 3


@settings(max_examples=examples(35))
@given(st.floats(0.1, 50), st.floats(1, 20), st.lists(st.floats(0, 3), min_size=1, max_size=100))
def test_a_bucket_lets_through_its_rate_and_its_burst_and_says_exactly_when_the_next_may(
    rate: float, burst: float, gaps: list[float]
) -> None:
    bucket, now, passed = TokenBucket.full(rate, burst, 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        wait = bucket.take(now)
        if wait:
            assert TokenBucket(rate, burst, bucket.tokens, now).take(now + wait * 0.99) > 0
            assert TokenBucket(rate, burst, bucket.tokens, now).take(now + wait * 1.01 + 1e-9) == 0
        else:
            passed += 1
        assert passed <= burst + rate * now + 1e-6


@settings(max_examples=examples(35))
@given(st.floats(0.2, 20), st.integers(100, 400))
def test_a_smoothed_rate_finds_a_steady_one(rate: float, events: int) -> None:
    smoothed = SmoothedRate(10.0)
    for number in range(events):
        smoothed.add(number / rate)
    found = smoothed.read(events / rate)
    if events / rate > 20:
        assert found == pytest.approx(rate, rel=0.25)
    assert smoothed.read(events / rate + 1000) == pytest.approx(0, abs=1e-6)
