from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.examples import examples
from tests.qos.worlds import Engine, make, ticket

from aimgpu.domain import Priority
from aimgpu.qos.queueing.dispatcher import Dispatcher, Queued, RefusalKind, Refused, RequestOutcome, Started
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.ticket import Ticket, TicketState

ONE = (Engine(instance_id="e"),)


def occupy(dispatcher: Dispatcher[Engine], priority: str = "medium", now: float = 0.0) -> Started[Engine]:
    started = dispatcher.submit(ticket(priority, now), now)
    assert isinstance(started, Started)
    return started


def drain(dispatcher: Dispatcher[Engine], running: Started[Engine], now: float) -> list[Ticket]:
    """Finish one after the other; the order in which the rest started."""
    order: list[Ticket] = []
    while True:
        dispatcher.finish(running.ticket, running.backend, RequestOutcome.OK, now)
        started = dispatcher.start_waiting(now)
        if not started:
            return order
        [running] = started
        order.append(running.ticket)


def test_high_goes_before_medium_before_low_and_first_come_within() -> None:
    dispatcher = make(m=ONE)
    running = occupy(dispatcher)
    tickets = [
        ticket(priority, 0.1 * index) for index, priority in enumerate(["low", "medium", "high", "low", "high", "medium"])
    ]
    for waiting in tickets:
        assert isinstance(dispatcher.submit(waiting, waiting.arrived), Queued)
    order = drain(dispatcher, running, 1.0)
    assert [tickets.index(started) for started in order] == [2, 4, 1, 5, 0, 3]


def test_a_deadline_goes_first_within_its_class_only() -> None:
    dispatcher = make(m=ONE)
    running = occupy(dispatcher)
    patient, urgent, above = ticket("medium", 0.1), ticket("medium", 0.2, deadline=5), ticket("high", 0.3)
    for waiting in (patient, urgent, above):
        dispatcher.submit(waiting, waiting.arrived)
    assert drain(dispatcher, running, 1.0) == [above, urgent, patient]


def test_a_low_request_that_was_overtaken_long_enough_goes_first() -> None:
    dispatcher = make(m=ONE)
    running = occupy(dispatcher)
    old = ticket("low", 0.0)
    dispatcher.submit(old, 0.0)
    fresh = ticket("high", 119.0)
    dispatcher.submit(fresh, 119.0)
    assert drain(dispatcher, running, 119.5) == [old, fresh]


def test_a_newcomer_does_not_overtake_an_equal_that_waits() -> None:
    dispatcher = make(m=(Engine(instance_id="e", slots=2),))
    first, _second = occupy(dispatcher), occupy(dispatcher)
    waiting = ticket()
    dispatcher.submit(waiting, 0.0)
    dispatcher.finish(first.ticket, first.backend, RequestOutcome.OK, 1.0)
    assert isinstance(dispatcher.submit(ticket(arrived=1.0), 1.0), Queued)
    assert [started.ticket for started in dispatcher.start_waiting(1.0)] == [waiting]


def test_expired_tickets_leave_the_queue_and_the_count() -> None:
    dispatcher = make(m=ONE)
    occupy(dispatcher)
    urgent, patient = ticket("high", 0.0, deadline=2), ticket("high", 0.0)
    dispatcher.submit(urgent, 0.0)
    dispatcher.submit(patient, 0.0)
    assert dispatcher.expire(1.9) == []
    assert dispatcher.expire(2.0) == [urgent]
    assert dispatcher.depth("m") == 1
    assert dispatcher.expire(30.0) == [patient]
    assert dispatcher.depth("m") == 0
    assert dispatcher.waiting_models() == ()


def test_a_full_queue_refuses_that_class_only() -> None:
    policy = QueuePolicy(most_queued={Priority.HIGH: 5, Priority.MEDIUM: 5, Priority.LOW: 1}, reserve_part=0.0)
    dispatcher = make(policy, m=ONE)
    occupy(dispatcher)
    assert isinstance(dispatcher.submit(ticket("low"), 0.0), Queued)
    refused = dispatcher.submit(ticket("low"), 0.0)
    assert isinstance(refused, Refused)
    assert refused.kind is RefusalKind.QUEUE_FULL
    assert refused.retry_after_seconds > 0
    assert isinstance(dispatcher.submit(ticket("high"), 0.0), Queued)


def test_work_that_would_wait_too_long_is_refused_at_the_door_with_a_time() -> None:
    dispatcher = make(m=ONE)
    running = occupy(dispatcher, "low")
    now = 0.0
    refused: Refused | None = None
    for step in range(400):
        now = step * 1.0  # two come for every one that is served
        for _ in range(2):
            answer = dispatcher.submit(ticket("low", now), now)
            if isinstance(answer, Refused):
                refused = answer
        dispatcher.finish(running.ticket, running.backend, RequestOutcome.OK, now)
        [running] = dispatcher.start_waiting(now)
        assert dispatcher.expire(now) == []
    assert refused is not None
    assert refused.kind is RefusalKind.WAIT_TOO_LONG
    assert 0.15 * 120 < dispatcher.depth("m") < 0.35 * 120  # one a second: a quarter of the longest wait


def test_a_burst_after_a_long_silence_is_not_refused_by_an_old_pace() -> None:
    dispatcher = make(m=ONE)
    running = occupy(dispatcher, "low")
    for second in range(10):
        dispatcher.submit(ticket("low", float(second)), float(second))
    order = drain(dispatcher, running, 11.0)
    assert len(order) == 10
    started = occupy(dispatcher, "low", now=5000.0)
    dispatcher.finish(started.ticket, started.backend, RequestOutcome.OK, 5001.0)
    occupy(dispatcher, "low", now=5002.0)
    for _ in range(5):
        assert isinstance(dispatcher.submit(ticket("low", 5002.0), 5002.0), Queued)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    dispatcher = make(m=ONE)
    running = occupy(dispatcher)
    dispatcher.finish(running.ticket, running.backend, RequestOutcome.OK, 10.0)
    occupy(dispatcher, now=10.0)
    assert isinstance(dispatcher.submit(ticket(arrived=10.0), 10.0), Queued)
    refused = dispatcher.submit(ticket(arrived=10.0, deadline=2.0), 10.0)
    assert isinstance(refused, Refused)
    assert refused.kind is RefusalKind.WAIT_TOO_LONG


def test_replicas_take_turns_by_load_and_a_failed_one_is_avoided() -> None:
    engines = (Engine(instance_id="a", slots=4), Engine(instance_id="b", slots=2))
    dispatcher = make(m=engines)
    used = [occupy(dispatcher).backend.instance_id for _ in range(6)]
    assert (used.count("a"), used.count("b")) == (4, 2)
    again = ticket()
    again.avoid = frozenset({"a"})
    assert isinstance(dispatcher.submit(again, 0.0), Queued)


def test_an_engine_that_keeps_failing_is_left_alone_for_a_while() -> None:
    dispatcher = make(m=ONE)
    for _ in range(5):
        started = occupy(dispatcher)
        dispatcher.finish(started.ticket, started.backend, RequestOutcome.BROKEN, 0.0)
    assert isinstance(dispatcher.submit(ticket(), 0.5), Queued)
    [probe] = dispatcher.start_waiting(1.5)
    assert isinstance(dispatcher.submit(ticket(arrived=1.6), 1.6), Queued)
    dispatcher.finish(probe.ticket, probe.backend, RequestOutcome.OK, 2.0)
    assert len(dispatcher.start_waiting(2.0)) == 1


def test_concurrency_follows_what_the_engine_really_takes() -> None:
    dispatcher = make(m=(Engine(instance_id="e", slots=10),))
    for second in range(5):
        started = occupy(dispatcher, now=float(2 * second))
        dispatcher.finish(started.ticket, started.backend, RequestOutcome.SLOW, float(2 * second))
    shrunk = dispatcher.allowed("e")
    assert shrunk is not None
    assert shrunk < 5
    running: list[Started[Engine]] = []
    now = 20.0
    for _ in range(400):
        now += 0.1
        while isinstance(answer := dispatcher.submit(ticket(arrived=now), now), Started):
            running.append(answer)
        dispatcher.expire(float("inf"))
        done = running.pop(0)
        dispatcher.finish(done.ticket, done.backend, RequestOutcome.OK, now)
    assert dispatcher.allowed("e") == 10


def test_a_blocked_high_request_keeps_a_slot_free_for_the_next_one() -> None:
    dispatcher = make(QueuePolicy(), m=(Engine(instance_id="e", slots=4),))
    running = [occupy(dispatcher, "low") for _ in range(4)]
    urgent = ticket("high", 0.0)
    assert isinstance(dispatcher.submit(urgent, 0.0), Queued)
    for _ in range(4):
        dispatcher.submit(ticket("low"), 0.0)
    done = running.pop()
    dispatcher.finish(done.ticket, done.backend, RequestOutcome.OK, 1.0)
    assert [started.ticket for started in dispatcher.start_waiting(1.0)] == [urgent]
    dispatcher.finish(urgent, done.backend, RequestOutcome.OK, 2.0)
    assert dispatcher.start_waiting(2.0) == []  # three low ones run; the fourth slot waits for a high one
    assert isinstance(dispatcher.submit(ticket("high", 3.0), 3.0), Started)
    assert len(dispatcher.start_waiting(110.0)) == 0
    assert dispatcher.depth("m", Priority.LOW) == 4


def test_pressure_holds_low_work_back_and_sheds_it() -> None:
    dispatcher = make(m=(Engine(instance_id="e", slots=8, device_id="gpu0"),))
    dispatcher.low_shares["gpu0"] = 0.25
    occupy(dispatcher, "low")
    occupy(dispatcher, "low")
    assert isinstance(dispatcher.submit(ticket("low"), 0.0), Queued)
    assert isinstance(dispatcher.submit(ticket("medium"), 0.0), Started)
    dispatcher.shed_low.add("gpu0")
    refused = dispatcher.submit(ticket("low"), 0.0)
    assert isinstance(refused, Refused)
    assert refused.kind is RefusalKind.SHED


def test_a_limit_of_the_device_holds_over_all_its_models_and_the_best_waits_least() -> None:
    engines = {name: (Engine(instance_id=name, slots=4, device_id="gpu0"),) for name in ("a", "b")}
    dispatcher = Dispatcher(QueuePolicy(device_limits={"gpu0": 2}, reserve_part=0.0), lambda model: engines[model])
    first = dispatcher.submit(ticket(model="a"), 0.0)
    assert isinstance(first, Started)
    assert isinstance(dispatcher.submit(ticket(model="b"), 0.0), Started)
    low, high = ticket("low", model="a"), ticket("high", model="b")
    dispatcher.submit(low, 0.1)
    dispatcher.submit(high, 0.2)
    dispatcher.finish(first.ticket, first.backend, RequestOutcome.OK, 1.0)
    assert [started.ticket for started in dispatcher.start_waiting(1.0)] == [high]


def test_a_new_limit_counts_what_runs_and_stops_nothing() -> None:
    engine = Engine(instance_id="e", slots=8, device_id="gpu0")
    dispatcher = make(m=(engine,))
    running = [occupy(dispatcher) for _ in range(4)]
    dispatcher.change_policy(QueuePolicy(every_device_limit=2, reserve_part=0.0))
    assert (dispatcher.in_flight("e"), dispatcher.on_device("gpu0")) == (4, 4)
    waiting = ticket(arrived=1.0)
    assert isinstance(dispatcher.submit(waiting, 1.0), Queued)
    for done in running[:2]:
        dispatcher.finish(done.ticket, done.backend, RequestOutcome.OK, 2.0)
        assert dispatcher.start_waiting(2.0) == []
    dispatcher.finish(running[2].ticket, engine, RequestOutcome.OK, 3.0)
    assert [started.ticket for started in dispatcher.start_waiting(3.0)] == [waiting]
    assert isinstance(dispatcher.submit(ticket(arrived=3.0), 3.0), Queued)
    dispatcher.change_policy(QueuePolicy(reserve_part=0.0))
    assert len(dispatcher.start_waiting(3.0)) == 1
    assert dispatcher.on_device("gpu0") is None


def test_ten_thousand_may_wait_and_leave_in_any_order() -> None:
    policy = QueuePolicy(most_queued=dict.fromkeys(Priority, 20_000), reserve_part=0.0)
    dispatcher = make(policy, m=ONE)
    occupy(dispatcher)
    tickets = [ticket("low", 0.0) for _ in range(10_000)]
    for waiting in tickets:
        assert isinstance(dispatcher.submit(waiting, 0.0), Queued)
    assert dispatcher.depth("m") == 10_000
    assert all(dispatcher.withdraw(waiting) for waiting in tickets[::2])
    assert not dispatcher.withdraw(tickets[0])
    assert dispatcher.depth("m") == 5_000
    assert len(dispatcher.expire(1000.0)) == 5_000


class DispatcherMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, the counts are the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = {
            "m": (Engine(instance_id="m0", slots=3, device_id="g"), Engine(instance_id="m1", slots=1, device_id="h")),
            "n": (Engine(instance_id="n0", slots=2, device_id="g"),),
        }
        self.policy = QueuePolicy(most_queued=dict.fromkeys(Priority, 6), device_limits={"g": 4})
        self.dispatcher = Dispatcher(self.policy, lambda model: self.engines[model])
        self.now = 0.0
        self.running: list[Started[Engine]] = []
        self.waiting: list[Ticket] = []
        self.answered: set[Ticket] = set()
        self.most_on_g = 4  # its limit, or what ran there when that was lowered

    @rule(model=st.sampled_from(["m", "n"]), priority=st.sampled_from(list(Priority)), deadline=st.none() | st.floats(0.5, 20))
    def submit(self, model: str, priority: Priority, deadline: float | None) -> None:
        new = ticket(priority.value, self.now, model=model, deadline=deadline)
        new.promised_seconds = 10.0 if priority is Priority.HIGH else None
        answer = self.dispatcher.submit(new, self.now)
        if isinstance(answer, Started):
            self.running.append(answer)
        elif isinstance(answer, Queued):
            assert answer.expected_wait_seconds is None or answer.expected_wait_seconds >= 0
            self.waiting.append(new)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(list(RequestOutcome)))
    def finish(self, data: st.DataObject, outcome: RequestOutcome) -> None:
        done = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.dispatcher.finish(done.ticket, done.backend, outcome, self.now)
        self.start()

    @rule()
    def start(self) -> None:
        for started in self.dispatcher.start_waiting(self.now):
            self.waiting.remove(started.ticket)
            self.running.append(started)

    @rule()
    def recall(self) -> None:
        for chosen in self.dispatcher.choose_recalls(self.now):
            assert chosen.ticket.priority is not Priority.HIGH
            assert chosen.ticket not in self.answered
            [running] = [started for started in self.running if started.ticket is chosen.ticket]
            assert running.backend is chosen.backend
            self.running.remove(running)
            self.dispatcher.take_back(chosen.ticket, chosen.backend)
            self.dispatcher.queue_again(chosen.ticket)
            self.waiting.append(chosen.ticket)
        self.start()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        one = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        self.dispatcher.note_first_byte(one.ticket, one.backend, self.now)
        self.answered.add(one.ticket)

    @rule(limits=st.sampled_from([{}, {"g": 1}, {"g": 4}]), every=st.sampled_from([None, 2]))
    def change_limits(self, limits: dict[str, int], every: int | None) -> None:
        self.dispatcher.change_policy(replace(self.policy, device_limits=limits, every_device_limit=every))
        limit = self.dispatcher.policy.limit_of("g")
        self.most_on_g = 1000 if limit is None else max(limit, self.on_g())

    def on_g(self) -> int:
        return sum(started.backend.device_id == "g" for started in self.running)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        gone = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.dispatcher.withdraw(gone)

    @rule(seconds=st.floats(0.01, 50))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        expired = self.dispatcher.expire(self.now)
        assert {id(t) for t in expired} == {id(t) for t in self.waiting if t.due <= self.now}
        self.waiting = [t for t in self.waiting if t.due > self.now]

    @rule(model=st.sampled_from(["m", "n"]))
    def withdraw_all(self, model: str) -> None:
        gone = self.dispatcher.withdraw_all(model)
        assert {id(t) for t in gone} == {id(t) for t in self.waiting if t.model == model}
        self.waiting = [t for t in self.waiting if t.model != model]

    @rule(instance_id=st.sampled_from(["m0", "m1", "n0"]))
    def forget(self, instance_id: str) -> None:
        self.dispatcher.keep_only({"m0", "m1", "n0"} - {instance_id})

    @rule(share=st.sampled_from([0.1, 0.5, 1.0]))
    def press(self, share: float) -> None:
        self.dispatcher.low_shares["g"] = share

    @invariant()
    def counts_are_true(self) -> None:
        for servers in self.engines.values():
            for server in servers:
                at_it = sum(started.backend is server for started in self.running)
                assert self.dispatcher.in_flight(server.instance_id) == at_it <= server.slots
        limit = self.dispatcher.policy.limit_of("g")
        if limit is not None:
            assert self.dispatcher.on_device("g") == self.on_g() <= self.most_on_g
            self.most_on_g = max(limit, self.on_g())
        for model in self.engines:
            assert self.dispatcher.depth(model) == sum(t.model == model for t in self.waiting)
        assert all(t.state is TicketState.WAITING for t in self.waiting)

    @invariant()
    def lines_hold_each_once(self) -> None:
        for model, line in self.dispatcher._queues.items():
            for priority in Priority:
                there = list(line.waiting(priority))
                assert len(there) == len(set(there)) == line.depth(priority)
                assert set(there) == {t for t in self.waiting if t.model == model and t.priority is priority}


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_a_class_served_in_no_time_at_all_does_not_break_the_expected_wait_of_a_higher_one() -> None:
    dispatcher = make(m=(Engine(instance_id="e", slots=2),))
    at_once = occupy(dispatcher, "medium")
    dispatcher.finish(at_once.ticket, at_once.backend, RequestOutcome.OK, 0.0)
    slower = occupy(dispatcher, "high")
    occupy(dispatcher, "medium")
    dispatcher.finish(slower.ticket, slower.backend, RequestOutcome.SLOW, 1.0)
    assert dispatcher.submit(ticket("high", 1.0), 1.0) == Queued(1, 1.0)
    assert dispatcher.submit(ticket("high", 1.0), 1.0) == Queued(2, 2.0)


@given(st.lists(st.sampled_from(["high", "medium", "low"]), min_size=1, max_size=40))
@settings(max_examples=examples(50))
def test_nobody_who_was_admitted_starts_after_the_stated_bound(classes: list[str]) -> None:
    policy = QueuePolicy()
    dispatcher = make(policy, m=ONE)
    running = occupy(dispatcher)
    now = 0.0
    for priority in classes * 5:
        now += 3.0
        dispatcher.submit(ticket(priority, now), now)
        dispatcher.expire(now)
        if int(now) % 9 == 0:
            dispatcher.finish(running.ticket, running.backend, RequestOutcome.OK, now)
            for running in dispatcher.start_waiting(now):
                waited = now - running.ticket.arrived
                assert waited <= policy.longest_wait_seconds[running.ticket.priority]
            if running.ticket.state is not TicketState.STARTED:
                running = occupy(dispatcher, now=now)


def test_a_deadline_is_not_refused_for_those_it_goes_before() -> None:
    dispatcher = make(m=ONE)
    running = occupy(dispatcher, "medium")
    now = 0.0
    for step in range(1, 12):  # one is served a second, and some wait
        now = float(step)
        dispatcher.submit(ticket("medium", now), now)
        dispatcher.submit(ticket("medium", now), now)
        dispatcher.finish(running.ticket, running.backend, RequestOutcome.OK, now)
        [running] = dispatcher.start_waiting(now)
    last = dispatcher.submit(ticket("medium", now), now)
    assert isinstance(last, Queued)
    assert (last.expected_wait_seconds or 0.0) > 5
    urgent = ticket("medium", now, deadline=3.0)
    answer = dispatcher.submit(urgent, now)
    assert isinstance(answer, Queued)
    assert answer.expected_wait_seconds is not None
    assert 0.5 < answer.expected_wait_seconds < 2  # the next slot is its
    dispatcher.finish(running.ticket, running.backend, RequestOutcome.OK, now + 1)
    assert [started.ticket for started in dispatcher.start_waiting(now + 1)] == [urgent]
