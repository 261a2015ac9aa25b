"""Taking slots back for requests that would else break their promise: who makes way, and what it may cost."""

from hypothesis import given
from hypothesis import strategies as st
from tests.qos.worlds import Engine, ticket

from aimgpu.domain import Priority
from aimgpu.qos.queueing.dispatcher import Dispatcher, Queued, RequestOutcome, Started
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.recalls import HoldBudget, RecallPolicy, WasteBudget
from aimgpu.qos.queueing.ticket import Ticket

ENGINE = Engine(instance_id="e", slots=2, device_id="gpu0")


def make(recall: RecallPolicy | None = None) -> Dispatcher[Engine]:
    policy = QueuePolicy(reserve_part=0.0, recall=recall or RecallPolicy())
    return Dispatcher(policy, lambda _: (ENGINE,))


def promised(arrived: float, seconds: float = 1.0) -> Ticket:
    found = ticket("high", arrived)
    found.promised_seconds = seconds
    return found


def fill(dispatcher: Dispatcher[Engine], priority: str = "low", now: float = 0.0) -> list[Ticket]:
    running = [ticket(priority, now), ticket(priority, now)]
    for index, one in enumerate(running):
        assert isinstance(dispatcher.submit(one, now + index), Started)
    return running


def test_the_last_of_the_lowest_makes_way_and_keeps_its_place() -> None:
    dispatcher = make()
    older, newer = fill(dispatcher)
    behind = ticket("low", 2.0)
    urgent = promised(3.0)
    assert isinstance(dispatcher.submit(behind, 2.0), Queued)
    assert isinstance(dispatcher.submit(urgent, 3.0), Queued)
    assert dispatcher.choose_recalls(3.0) == []  # it has only just come
    [chosen] = dispatcher.choose_recalls(3.3)
    assert (chosen.ticket, chosen.backend) == (newer, ENGINE)
    dispatcher.take_back(newer, ENGINE)
    dispatcher.queue_again(newer)
    assert [one.ticket for one in dispatcher.start_waiting(3.3)] == [urgent]
    dispatcher.note_first_byte(urgent, ENGINE, 3.5)
    dispatcher.finish(older, ENGINE, RequestOutcome.OK, 4.0)
    assert [one.ticket for one in dispatcher.start_waiting(4.0)] == [newer]  # before `behind`, which came later
    assert dispatcher.recalls.counts == {"m": 1}
    assert dispatcher.in_flight("e") == 2


def test_nobody_makes_way_for_what_nothing_was_promised_to() -> None:
    dispatcher = make()
    fill(dispatcher)
    assert isinstance(dispatcher.submit(ticket("high", 3.0), 3.0), Queued)
    assert isinstance(dispatcher.submit(ticket("medium", 3.0), 3.0), Queued)
    assert dispatcher.choose_recalls(20.0) == []


def test_what_its_caller_has_seen_of_is_never_recalled() -> None:
    dispatcher = make()
    older, newer = fill(dispatcher)
    dispatcher.note_first_byte(newer, ENGINE, 2.0)
    dispatcher.submit(promised(3.0), 3.0)
    assert [one.ticket for one in dispatcher.choose_recalls(4.0)] == [older]
    assert dispatcher.choose_recalls(4.0) == []  # chosen once, it is on its way


def test_high_work_makes_way_for_nobody() -> None:
    dispatcher = make()
    fill(dispatcher, "high")
    dispatcher.submit(promised(3.0), 3.0)
    assert dispatcher.choose_recalls(10.0) == []


def test_one_request_is_recalled_so_often_and_no_more() -> None:
    dispatcher = make(RecallPolicy(most=1))
    fill(dispatcher)
    for moment in (3.0, 5.0):
        urgent = [promised(moment), promised(moment)]
        for one in urgent:
            dispatcher.submit(one, moment)
        for chosen in dispatcher.choose_recalls(moment + 0.5):
            dispatcher.take_back(chosen.ticket, chosen.backend)
            dispatcher.queue_again(chosen.ticket)
        started = dispatcher.start_waiting(moment + 0.5)
        for one in urgent:
            if one in [each.ticket for each in started]:
                dispatcher.finish(one, ENGINE, RequestOutcome.OK, moment + 0.6)
        dispatcher.start_waiting(moment + 0.6)
    assert dispatcher.recalls.counts == {"m": 2}  # each of the two once


def test_who_is_near_its_own_due_stays() -> None:
    dispatcher = make()
    old = [ticket("low", 0.0), ticket("low", 0.0)]
    for one in old:
        dispatcher.submit(one, 80.0)  # it waited two thirds of its longest already
    dispatcher.submit(promised(81.0), 81.0)
    assert dispatcher.choose_recalls(82.0) == []


def test_nothing_new_of_the_lowest_starts_beside_a_promised_request_that_is_late() -> None:
    dispatcher = make()
    urgent = promised(0.0)
    assert isinstance(dispatcher.submit(urgent, 0.0), Started)
    assert isinstance(dispatcher.submit(ticket("low", 0.5), 0.5), Queued)  # a slot is free, but the promise is at risk
    assert isinstance(dispatcher.submit(ticket("medium", 0.5), 0.5), Started)
    dispatcher.note_first_byte(urgent, ENGINE, 0.6)
    dispatcher.finish(urgent, ENGINE, RequestOutcome.OK, 0.7)
    assert [one.ticket.priority for one in dispatcher.start_waiting(0.7)] == [Priority.LOW]


def test_a_promise_that_is_broken_holds_nobody_back() -> None:
    dispatcher = make()
    assert isinstance(dispatcher.submit(promised(0.0), 0.0), Started)  # and it runs for minutes
    assert isinstance(dispatcher.submit(ticket("low", 1.5), 1.5), Started)


def test_low_work_is_held_back_for_a_burst_and_not_for_good() -> None:
    hold = HoldBudget()
    moments = [step * 0.05 for step in range(12_000)]  # ten minutes in which something is always late
    held = [hold.may_hold(moment, wanted=True) for moment in moments]
    assert all(held[:400])  # twenty seconds
    assert sum(held[2000:]) / len(held[2000:]) < 0.25


def test_nobody_makes_way_in_vain() -> None:
    dispatcher = make()
    fill(dispatcher)
    dispatcher.submit(promised(3.0), 3.0)
    assert dispatcher.choose_recalls(4.5) == []  # its promise is broken whatever is done now


@given(st.lists(st.tuples(st.booleans(), st.floats(min_value=0, max_value=100)), max_size=60))
def test_no_more_is_lost_than_was_earned(events: list[tuple[bool, float]]) -> None:
    budget = WasteBudget(0.1)
    earned, spent = budget.left_seconds, 0.0
    for earns, seconds in events:
        if earns:
            budget.earn(seconds)
            earned += 0.1 * seconds
        elif budget.spend(seconds):
            spent += seconds
        assert spent <= earned + 1e-6
        assert 0 <= budget.left_seconds <= budget.most_seconds


def test_where_the_tightest_promise_is_lost_the_next_one_is_defended() -> None:
    dispatcher = make()
    fill(dispatcher)
    both = promised(3.0, 0.3)
    both.looser_promises = (2.0, 5.0)
    dispatcher.submit(both, 3.0)
    assert [both.promise_to_keep(seconds) for seconds in (0.1, 0.3, 0.4, 3.0, 6.0)] == [0.3, 0.3, 2.0, 5.0, None]
    assert dispatcher.choose_recalls(3.4) == []  # 300 ms are over, and a quarter of 2 s is not
    assert len(dispatcher.choose_recalls(3.6)) == 1


def two_models(limit: int, *, slots: int = 2) -> Dispatcher[Engine]:
    engines = {name: (Engine(instance_id=name, slots=slots, device_id="gpu0"),) for name in ("a", "b")}
    elsewhere = {"c": (Engine(instance_id="c", slots=slots, device_id="gpu1"),)}
    policy = QueuePolicy(reserve_part=0.0, device_limits={"gpu0": limit})
    return Dispatcher(policy, lambda model: (engines | elsewhere)[model])


def start(dispatcher: Dispatcher[Engine], model: str, priority: str, now: float) -> Ticket:
    one = ticket(priority, now, model=model)
    assert isinstance(dispatcher.submit(one, now), Started)
    return one


def wait(dispatcher: Dispatcher[Engine], model: str, now: float) -> Ticket:
    one = promised(now)
    one.model = model
    assert isinstance(dispatcher.submit(one, now), Queued)
    return one


def test_low_work_of_another_model_makes_way_where_the_device_is_full() -> None:
    dispatcher = two_models(limit=2)
    start(dispatcher, "c", "low", 2.9)  # on another Device: it is in nobody's way
    start(dispatcher, "b", "medium", 2.0)
    low = start(dispatcher, "b", "low", 1.0)
    urgent = wait(dispatcher, "a", 3.0)
    [chosen] = dispatcher.choose_recalls(3.5)
    assert (chosen.ticket, chosen.backend.instance_id) == (low, "b")
    dispatcher.take_back(chosen.ticket, chosen.backend)
    dispatcher.queue_again(chosen.ticket)
    assert [one.ticket for one in dispatcher.start_waiting(3.5)] == [urgent]
    assert dispatcher.recalls.counts == {"b": 1}
    assert dispatcher.on_device("gpu0") == 2
    dispatcher.note_first_byte(urgent, Engine(instance_id="a", slots=2, device_id="gpu0"), 3.6)
    dispatcher.finish(urgent, Engine(instance_id="a", slots=2, device_id="gpu0"), RequestOutcome.OK, 4.0)
    assert [one.ticket for one in dispatcher.start_waiting(4.0)] == [low]


def test_nobody_of_another_model_makes_way_where_the_engine_itself_is_full() -> None:
    dispatcher = two_models(limit=3, slots=1)
    start(dispatcher, "a", "high", 0.0)
    start(dispatcher, "b", "low", 1.0)
    wait(dispatcher, "a", 3.0)
    assert dispatcher.choose_recalls(3.5) == []


def test_no_more_of_others_makes_way_than_the_engine_can_take_up() -> None:
    dispatcher = two_models(limit=2, slots=2)
    for _ in range(2):
        start(dispatcher, "b", "low", 1.0)
    for _ in range(5):
        wait(dispatcher, "a", 3.0)
    dispatcher.change_policy(QueuePolicy(reserve_part=0.0, device_limits={"gpu0": 1}))
    assert len(dispatcher.choose_recalls(3.5)) == 2
