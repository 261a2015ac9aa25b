"""Work side by side, in the background, and questions that can be given up: nothing is lost, and no error is swallowed."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.control.changes import ChangeCounter
from aimgpu.control.instance.cancellable import Cancelled, call_cancellable
from aimgpu.control.instance.liveness import Liveness
from aimgpu.control.statistics import Statistics
from aimgpu.control.threads import Background, side_by_side
from aimgpu.control.waiting import PlanningTurn
from aimgpu.domain import DeviceReason, Refusal


class Broken(Exception):
    """As told."""


def failing(number: int) -> Callable[[], int]:
    def call() -> int:
        raise Broken(number)

    return call


def nothing() -> None:
    return None


@settings(max_examples=examples(20))
@given(st.lists(st.integers(), max_size=5))
def test_results_come_in_the_order_of_the_calls(values: list[int]) -> None:
    assert side_by_side([lambda value=value: value for value in values], "test") == values  # type: ignore[misc]


def test_all_run_at_once_and_one_alone_runs_here() -> None:
    barrier = threading.Barrier(3)
    assert len(side_by_side([lambda: barrier.wait(300) for _ in range(3)], "test")) == 3
    assert side_by_side([threading.get_ident], "test") == [threading.get_ident()]


def test_the_first_error_is_raised_once_all_have_ended() -> None:
    ended = threading.Event()

    def slow() -> int:
        ended.set()
        return 1

    with pytest.raises(Broken) as caught:
        side_by_side([failing(1), slow, failing(2)], "test")
    assert caught.value.args == (1,)
    assert ended.is_set()


def test_even_what_is_no_exception_is_raised_where_it_is_waited_for() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        side_by_side([leave, nothing], "test")


def test_the_background_is_waited_for_at_the_end_and_takes_nothing_more() -> None:
    background, go_on, done = Background(), threading.Event(), []

    def work() -> None:
        assert go_on.wait(300)
        done.append(1)

    background.run(work, "work")
    assert not background.close(0.0), "it has not ended yet"
    go_on.set()
    assert background.close(60.0)
    background.run(lambda: done.append(2), "late")
    assert background.close(60.0)
    assert done == [1]


def test_an_error_in_the_background_ends_only_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda found: seen.append(found.exc_type))
    background = Background()
    background.run(failing(1), "fails")
    background.run(nothing, "works")
    assert background.close(60.0)
    assert seen == [Broken]


def test_what_closes_the_background_from_inside_does_not_wait_for_itself() -> None:
    background, ended = Background(), threading.Event()

    def close() -> None:
        background.close(60.0)
        ended.set()

    background.run(close, "closes")
    assert ended.wait(300)


def break_off() -> None:
    raise Broken


def ask(call: Callable[[], None], give_up: Callable[[], None] = nothing, *, bound: float = 60.0) -> None:
    call_cancellable(call, give_up, poll_seconds=0.001, bound_seconds=bound)


def test_a_question_is_answered_or_raises_what_it_raised() -> None:
    asked: list[int] = []
    ask(lambda: asked.append(1))
    assert asked == [1]
    with pytest.raises(Broken):
        ask(break_off)


def test_a_question_is_given_up_when_waiting_has_become_pointless() -> None:
    release = threading.Event()

    def wait() -> None:
        release.wait(300)

    def give_up() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        ask(wait, give_up)
    with pytest.raises(TimeoutError):
        ask(wait, bound=0.0)
    release.set()


def test_a_change_between_two_looks_is_not_missed() -> None:
    counter = ChangeCounter()
    seen = counter.version
    counter.notify()
    assert counter.wait(seen, 60.0) == seen + 1, "at once: it changed since"
    assert counter.wait(seen + 1, 0.0) == seen + 1


def test_a_change_wakes_all_who_wait() -> None:
    counter, woken = ChangeCounter(), []
    threads = [threading.Thread(target=lambda: woken.append(counter.wait(0, 60.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        counter.notify()
        threads[0].join(0.01)
    assert len(woken) == 3
    assert all(version > 0 for version in woken)


def test_a_turn_that_ended_is_not_waited_for() -> None:
    turn = PlanningTurn(rank=2)
    turn.end()
    turn.end()
    turn.wait()
    assert turn.rank == 2


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.floats(0.1, 50), st.booleans()), min_size=1, max_size=10))
def test_silence_is_counted_from_the_last_answer(looks: list[tuple[float, bool]]) -> None:
    liveness, now, heard = Liveness(), 0.0, None
    assert liveness.is_due("a", now, 5.0)
    for pause, answered in looks:
        now += pause
        heard = now if answered or heard is None else heard
        assert liveness.note("a", now, answered=answered) == now - heard
        assert not liveness.is_due("a", now, 5.0)
        assert liveness.is_due("a", now + 5.5, 5.0)
    liveness.forget("a")
    liveness.forget("a")
    assert liveness.is_due("a", now, 5.0)
    assert liveness.note("a", now, answered=False) == 0.0, "met again, with a clean record"


def test_statistics_are_copies_and_preemptions_are_counted_since_a_moment() -> None:
    statistics = Statistics()
    statistics.count("apply", "ok")
    statistics.count("apply", "ok")
    statistics.count_restart("chat")
    reasons = tuple(DeviceReason(node="n", device_id=str(number), code="memory", text="t") for number in range(2))
    statistics.count_refusals([Refusal(ask="a", summary="s", reasons=reasons)])
    for moment in (1.0, 5.0, 9.0):
        statistics.note_preemption(moment)
    assert statistics.preemptions_since(5.0) == 2
    assert statistics.operations() == {("apply", "ok"): 2, ("preempt", "ok"): 3}
    assert (statistics.refusals(), statistics.restarts()) == ({"memory": 2}, {"chat": 1})
    shown = statistics.restarts()
    statistics.count_restart("chat")
    assert shown == {"chat": 1}
