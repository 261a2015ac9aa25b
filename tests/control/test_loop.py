"""One thread decides: what comes is decided in its order, what is to be placed waits for what it needs and for nothing else."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.control.side_threads import BOUND_SECONDS, in_thread, wait_for
from tests.control.world import deployment

from aimgpu.control.effects import REAL
from aimgpu.control.loop import Loop, NotYet, Placing, Restart
from aimgpu.control.snapshots import Reading
from aimgpu.domain import Priority
from aimgpu.errors import Conflict, HardwareFailed


@dataclass
class Gpus:
    """Readings that a test lets through one by one; numbered in the order in which they began."""

    readings: list[Reading] = field(default_factory=list)
    may_end: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1000))
    error: Exception | None = None

    def read(self) -> Reading:
        found = Reading(states=())
        self.readings.append(found)
        assert self.may_end.acquire(timeout=BOUND_SECONDS)
        if self.error is not None:
            raise self.error
        return found


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


@pytest.fixture
def loop(gpus: Gpus) -> Iterator[Loop]:
    loop = Loop(REAL, gpus.read)
    yield loop
    loop.close()


class Later:
    """What a call in a thread of its own came to."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.found: list[Any] = []
        self.error: BaseException | None = None
        self._call = call
        self.thread = in_thread(self._work)

    def _work(self) -> None:
        try:
            self.found.append(self._call())
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def result(self) -> Any:
        self.thread.join(BOUND_SECONDS)
        if self.error is not None:
            raise self.error
        return self.found[0]


def test_decisions_of_many_threads_are_made_on_one_and_one_at_a_time(loop: Loop) -> None:
    inside, threads, results = 0, set(), []

    def decide(number: int) -> int:
        nonlocal inside
        inside += 1
        assert inside == 1
        threads.add(threading.get_ident())
        loop.require()
        inside -= 1
        return number

    callers = [Later(lambda number=number: loop.decide(lambda: decide(number))) for number in range(20)]  # type: ignore[misc]
    results = [one.result() for one in callers]
    assert results == list(range(20))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_an_error_is_raised_in_the_thread_that_asked_and_the_loop_goes_on(loop: Loop) -> None:
    def fail(*_: object) -> None:
        raise Conflict("no")

    with pytest.raises(Conflict, match="no"):
        loop.decide(fail)
    with pytest.raises(Conflict, match="no"):
        loop.place(fail)
    assert loop.decide(lambda: 7) == 7


def test_the_loop_neither_waits_for_itself_nor_lets_others_change_its_state(loop: Loop) -> None:
    with pytest.raises(RuntimeError, match="cannot wait for itself"):
        loop.decide(lambda: loop.decide(lambda: 1))
    with pytest.raises(RuntimeError, match="outside the loop"):
        loop.require()


def test_what_comes_while_the_gpus_are_read_is_placed_on_the_next_reading(loop: Loop, gpus: Gpus) -> None:
    gpus.may_end = threading.Semaphore(0)
    first = Later(lambda: loop.place(lambda reading: reading))
    wait_for(lambda: len(gpus.readings) == 1)
    others = [Later(lambda: loop.place(lambda reading: reading)) for _ in range(5)]
    wait_for(lambda: len(loop._placings) == 6)
    assert loop.decide(lambda: "released") == "released", "no release waits for a reading"
    gpus.may_end.release(2)
    assert first.result() is gpus.readings[0]
    assert {id(one.result()) for one in others} == {id(gpus.readings[1])}
    assert len(gpus.readings) == 2


def test_a_reading_that_fails_is_the_answer_and_the_next_one_counts(loop: Loop, gpus: Gpus) -> None:
    gpus.error = HardwareFailed("the driver does not answer")
    with pytest.raises(HardwareFailed):
        loop.place(lambda reading: reading)
    gpus.error = None
    assert loop.place(lambda reading: reading) is gpus.readings[1]


def test_a_reading_under_other_layouts_is_read_again(loop: Loop, gpus: Gpus) -> None:
    gpus.may_end = threading.Semaphore(0)
    placing = Later(lambda: loop.place(lambda reading: reading))
    wait_for(lambda: len(gpus.readings) == 1)

    def change() -> None:
        loop.layouts_version += 1

    loop.decide(change)
    gpus.may_end.release(2)
    assert placing.result() is gpus.readings[1]


def test_what_waits_is_tried_again_on_a_new_reading_once_its_wait_is_over(loop: Loop, gpus: Gpus) -> None:
    ended, tries = threading.Event(), []

    def attempt(reading: Reading) -> Reading | NotYet:
        tries.append(reading)
        return reading if ended.is_set() else NotYet(ended.is_set)

    placing = Later(lambda: loop.place(attempt))
    wait_for(lambda: len(tries) == 1)
    other = loop.place(lambda reading: reading)
    assert len(tries) == 1, "another is not held up, and it is not tried for it"
    loop.decide(ended.set)
    assert placing.result() is gpus.readings[-1] is not other
    assert len(tries) == 2


def test_one_that_looks_at_the_world_itself_gets_its_turn_back(loop: Loop) -> None:
    ended = threading.Event()
    placing = Later(lambda: loop.place(lambda _: NotYet(ended.is_set, then_none=True)))
    wait_for(lambda: any(one.waits for one in loop._placings))
    loop.decide(ended.set)
    assert placing.result() is None


def restart(name: str, priority: Priority) -> Restart:
    item = deployment(name)
    return Restart(deployment=replace(item, ask=replace(item.ask, priority=priority)), ready={})


def test_restarts_come_after_the_rest_the_most_urgent_first_and_together_where_that_works(loop: Loop, gpus: Gpus) -> None:
    gpus.may_end = threading.Semaphore(0)
    placed: list[str] = []
    together: list[list[str]] = []

    def place_together(placings: Any, _: Reading) -> None:
        together.append([one.restart.deployment.name for one in placings])
        raise Conflict("they do not fit together")

    loop.place_together = place_together
    first = Later(lambda: loop.place(lambda _: placed.append("first")))
    wait_for(lambda: len(gpus.readings) == 1)
    callers = [
        Later(lambda: loop.place(lambda _: placed.append("low"), restart("low", Priority.LOW))),
        Later(lambda: loop.place(lambda _: placed.append("high"), restart("high", Priority.HIGH))),
        Later(lambda: loop.place(lambda _: placed.append("asked"))),
    ]
    wait_for(lambda: len(loop._placings) == 4)
    gpus.may_end.release(2)
    for one in [first, *callers]:
        one.result()
    assert placed == ["first", "asked", "high", "low"]
    assert together == [["high", "low"]]


def test_an_error_of_ours_in_planning_together_reaches_those_that_wait(loop: Loop, gpus: Gpus) -> None:
    gpus.may_end = threading.Semaphore(0)

    def fail(_: list[Placing], __: Reading) -> None:
        raise RuntimeError("a fault of ours")

    loop.place_together = fail  # type: ignore[assignment]
    first = Later(lambda: loop.place(lambda _: 1))  # what comes while the GPUs are read for it is placed on the next reading
    wait_for(lambda: len(gpus.readings) == 1)
    callers = [Later(lambda: loop.place(lambda _: 1, restart("chat", Priority.LOW))) for _ in range(2)]
    wait_for(lambda: len(loop._placings) == 3)
    gpus.may_end.release(2)
    assert first.result() == 1
    for one in callers:
        with pytest.raises(RuntimeError, match="a fault of ours"):
            one.result()
    assert loop.decide(lambda: 7) == 7


def test_nothing_is_placed_while_repairs_are_under_way(loop: Loop) -> None:
    with loop.placing_nothing():
        placing = Later(lambda: loop.place(lambda _: "placed"))
        wait_for(lambda: len(loop._placings) == 1)
        assert loop.decide(lambda: "released") == "released"
        assert placing.thread.is_alive()
    assert placing.result() == "placed"


def test_once_the_daemon_stops_nothing_waits(loop: Loop, gpus: Gpus) -> None:
    gpus.may_end = threading.Semaphore(0)
    reading = Later(lambda: loop.place(lambda _: 1))
    wait_for(lambda: len(loop._placings) == 1)
    loop.decide(loop.end)
    with pytest.raises(Conflict, match="stopping"):
        reading.result()
    with pytest.raises(Conflict, match="stopping"):
        loop.place(lambda _: 1)
    assert loop.decide(lambda: "released") == "released"
    gpus.may_end.release(1000)
    loop.decide(loop.go_on)
    assert loop.place(lambda _: "placed") == "placed"


def test_what_waits_when_it_is_closed_is_refused(gpus: Gpus) -> None:
    loop = Loop(REAL, gpus.read)
    waiting = Later(lambda: loop.place(lambda _: NotYet(lambda: False)))
    wait_for(lambda: any(one.waits for one in loop._placings))
    loop.close()
    loop.close()
    for call in (waiting.result, lambda: loop.decide(lambda: 1)):
        with pytest.raises(Conflict, match="stopping"):
            call()
