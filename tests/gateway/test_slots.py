"""Slots as tasks see them: taken, given back, cancelled and expired in any order, none is lost or held twice."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.gateway.conftest import TestRoutes

from aimgpu.domain import Priority
from aimgpu.errors import DeadlinePassed, LoadShed, ModelNotReady, QueueFull, RequestRefused
from aimgpu.gateway.routes import Arrival, Backend, ServedModel
from aimgpu.gateway.slots import Lease, Slots
from aimgpu.qos.queueing.dispatcher import RequestOutcome
from aimgpu.qos.queueing.policy import QueuePolicy


@dataclass
class Signal:
    """What others on the GPU see of an instance's requests."""

    open: int = 0

    def begin(self) -> None:
        self.open += 1

    def end(self) -> None:
        self.open -= 1
        assert self.open >= 0


@dataclass
class Request:
    model: ServedModel
    priority: Priority = Priority.MEDIUM
    arrived: float = 0.0
    deadline_seconds: float | None = None


@dataclass
class House:
    """A model with engines, and its slots."""

    slots_of: dict[str, int]
    policy: QueuePolicy = field(default_factory=lambda: QueuePolicy(reserve_part=0.0))
    signals: dict[str, Signal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.routes = TestRoutes()
        self.list_engines(self.slots_of)
        self.slots = Slots(self.routes, self.policy)

    def list_engines(self, slots_of: dict[str, int]) -> None:
        backends = [
            Backend(
                instance_id=name,
                url="http://127.0.0.1:9",
                api_key="",
                slots=count,
                device_id="gpu",
                signals=(self.signals.setdefault(name, Signal()),),
            )
            for name, count in slots_of.items()
        ]
        self.routes.put("chat", "ready", backends=tuple(backends))

    @property
    def model(self) -> ServedModel:
        found = self.routes.find("chat")
        assert found is not None
        return found

    def check_empty(self) -> None:
        """Nothing runs, nothing waits, and others on the GPU see nothing."""
        assert {self.slots.in_flight(name) for name in self.slots_of} == {0}
        assert {signal.open for signal in self.signals.values()} == {0}
        assert self.slots.queued("chat") == 0

    async def take(self, priority: Priority = Priority.MEDIUM, deadline: float | None = None) -> Lease:
        now = asyncio.get_running_loop().time()
        taken = self.slots.take(Request(self.model, priority, now, deadline), now)
        return taken if isinstance(taken, Lease) else await taken


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "release", "cancel", "wait"]), st.integers(0, 2), st.integers(0, 50)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=examples(35))
@given(ACTIONS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 1000))
def test_every_slot_is_held_by_one_and_given_back_once(actions: Any, first: int, second: int, seed: int) -> None:
    async def main() -> None:
        house = House({"a": first, "b": second})
        chance = random.Random(seed)
        tasks: list[asyncio.Task[Lease]] = []
        held: list[Lease] = []

        def collect() -> None:
            for task in [one for one in tasks if one.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    held.append(task.result())

        for action, rank, pick in actions:
            if action == "take":
                tasks.append(asyncio.ensure_future(house.take(list(Priority)[rank])))
            elif action == "release" and held:
                lease = held.pop(pick % len(held))
                lease.release(chance.choice([RequestOutcome.OK, RequestOutcome.UNKNOWN, RequestOutcome.SLOW]))
                lease.release(RequestOutcome.OK)  # twice does nothing
            elif action == "cancel" and tasks:
                tasks[pick % len(tasks)].cancel()
            await asyncio.sleep(0)
            collect()
            by_engine = Counter(lease.backend.instance_id for lease in held)
            for name, most in house.slots_of.items():
                assert by_engine[name] <= most
        while tasks or held:
            await asyncio.sleep(0)
            collect()
            while held:
                held.pop().release(RequestOutcome.OK)
        house.check_empty()

    asyncio.run(main())


def test_a_waiter_that_is_cancelled_in_the_moment_of_its_grant_gives_the_slot_on() -> None:
    async def main() -> None:
        house = House({"a": 1})
        first = await house.take()
        second, third = asyncio.ensure_future(house.take()), asyncio.ensure_future(house.take())
        await asyncio.sleep(0)
        first.release(RequestOutcome.OK)  # grants the second
        second.cancel()
        lease = await asyncio.wait_for(third, 30)
        assert house.slots.in_flight("a") == 1
        lease.release(RequestOutcome.OK)
        assert (house.slots.in_flight("a"), house.signals["a"].open) == (0, 0)

    asyncio.run(main())


def test_a_deadline_ends_a_wait_with_its_own_error_and_a_long_wait_with_another() -> None:
    async def main() -> list[type[RequestRefused]]:
        house = House({"a": 1}, QueuePolicy(reserve_part=0.0, longest_wait_seconds=dict.fromkeys(Priority, 0.05)))
        held = await house.take()
        results = await asyncio.gather(house.take(deadline=0.01), house.take(), return_exceptions=True)
        assert house.slots.queued("chat") == 0
        held.release(RequestOutcome.OK)
        return [type(result) for result in results]  # type: ignore[misc]

    assert asyncio.run(main()) == [DeadlinePassed, LoadShed]


def test_a_full_line_refuses_at_once() -> None:
    async def main() -> None:
        house = House({"a": 1}, QueuePolicy(reserve_part=0.0, most_queued=dict.fromkeys(Priority, 2)))
        held = await house.take()
        waiting = [asyncio.ensure_future(house.take()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 requests wait"):
            await house.take()
        for task in waiting:
            task.cancel()
        held.release(RequestOutcome.OK)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert house.slots.queued("chat") == 0

    asyncio.run(main())


def test_new_engines_take_those_that_wait_at_once_and_gone_ones_are_forgotten() -> None:
    async def main() -> None:
        house = House({"a": 1})
        held = await house.take()
        waiting = [asyncio.ensure_future(house.take()) for _ in range(3)]
        await asyncio.sleep(0)
        house.list_engines({"b": 2})
        house.slots.routes_changed()
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result().backend.instance_id for task in done} == {"b"}
        assert house.slots.in_flight("a") == 1, "what runs on an engine that is gone is still counted"
        held.release(RequestOutcome.OK)
        house.slots.routes_changed()
        assert house.slots.dispatcher.allowed("a") is None
        for task in done:
            task.result().release(RequestOutcome.OK)
        for task in pending:
            (await task).release(RequestOutcome.OK)

    asyncio.run(main())


def test_a_model_that_is_removed_refuses_all_that_wait_for_it() -> None:
    async def main() -> list[str]:
        house = House({"a": 1})
        held = await house.take()
        waiting = [asyncio.ensure_future(house.take()) for _ in range(3)]
        await asyncio.sleep(0)
        house.routes.remove("chat")
        house.slots.routes_changed()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        held.release(RequestOutcome.OK)
        assert all(isinstance(result, ModelNotReady) for result in results)
        return [str(result) for result in results]

    assert all("removed" in text for text in asyncio.run(main()))


def test_a_request_that_is_refused_because_a_start_takes_too_long_starts_the_model_all_the_same() -> None:
    async def main() -> None:
        house = House({"a": 1})
        house.routes.put("chat", "asleep", arrival=Arrival(slots=1, seconds=10_000.0))
        with pytest.raises(ModelNotReady) as refused:
            await house.take()
        assert (refused.value.retry_after_seconds or 0) > 300
        assert [one.model for one in house.slots.wake_requests.read()] == ["chat"]
        while house.slots.wake_requests.read():  # noqa: ASYNC110 - nobody waits: in a moment it is not wanted any more
            await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arrival", "holds"),
    [
        (None, False),
        (Arrival(slots=1, seconds=None), True),
        (Arrival(slots=1, seconds=1.0), True),
        (Arrival(slots=1, seconds=1.0, problem="out of memory", problem_since=0.0, retry_at=1e12), False),
        (Arrival(slots=1, seconds=1.0, problem="GPU 0 is full", problem_since=1e12, retry_at=1.0, no_room=True), False),
        (Arrival(slots=1, seconds=1.0, problem="out of memory"), True),
    ],
    ids=["never", "unknown", "soon", "keeps failing", "no room", "failed once"],
)
def test_who_asks_for_a_model_that_is_not_up_waits_only_where_it_comes(arrival: Arrival | None, *, holds: bool) -> None:
    async def main() -> None:
        house = House({"a": 1})
        house.routes.put("chat", "asleep", arrival=arrival, reason="it sleeps")
        task = asyncio.ensure_future(house.take())
        await asyncio.sleep(0)
        if not holds:
            with pytest.raises(ModelNotReady):
                await task
            wanted = [one.model for one in house.slots.wake_requests.read()]
            assert wanted == ([] if arrival is None else ["chat"]), "it is tried again, or the next caller hears the same"
            return
        assert [one.model for one in house.slots.wake_requests.read()] == ["chat"]
        house.list_engines({"a": 1})
        house.slots.routes_changed()
        (await asyncio.wait_for(task, 30)).release(RequestOutcome.OK)
        await asyncio.sleep(0.06)  # until they look again: nobody waits any more
        assert house.slots.queued("chat") == 0

    asyncio.run(main())


def test_callers_of_a_model_whose_room_busy_models_hold_hear_the_reason_when_their_class_has_waited_its_longest() -> None:
    async def main() -> None:
        waits = {Priority.HIGH: 0.1, Priority.MEDIUM: 1000.0, Priority.LOW: 1000.0}
        house = House({"a": 1}, QueuePolicy(reserve_part=0.0, longest_wait_seconds=waits))
        now = asyncio.get_running_loop().time()
        full = Arrival(slots=1, seconds=None, problem="busy holds GPU 0", retry_at=now + 4.0, room_may_come=True)
        house.routes.put("chat", "sleeping", arrival=full)
        patient = asyncio.ensure_future(house.take(Priority.LOW))
        with pytest.raises(ModelNotReady, match="busy holds GPU 0") as refused:
            await house.take(Priority.HIGH)
        assert 1 <= (refused.value.retry_after_seconds or 0) <= 4
        assert not patient.done()
        assert [one.model for one in house.slots.wake_requests.read()] == ["chat"]
        patient.cancel()

    asyncio.run(main())


def test_callers_are_held_while_a_try_is_about_to_begin() -> None:
    async def main() -> None:
        house = House({"a": 1})
        house.routes.put(
            "chat", "sleeping", arrival=Arrival(slots=1, seconds=1.0, problem="full", problem_since=0.0, retry_at=1.0)
        )
        task = asyncio.ensure_future(house.take())
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    asyncio.run(main())


def test_an_excluded_engine_is_reported_once_and_gets_nothing_more() -> None:
    async def main() -> None:
        house = House({"a": 1, "b": 1})
        held = [await house.take(), await house.take()]
        house.slots.exclude("a", "its key is refused")
        house.slots.exclude("a", "another reason")
        for lease in held:
            lease.release(RequestOutcome.OK)
        names = []
        for _ in range(4):
            lease = await house.take()
            names.append(lease.backend.instance_id)
            lease.release(RequestOutcome.OK)
        assert names == ["b"] * 4
        assert house.slots.engine_faults.take() == {"a": "its key is refused"}
        assert house.slots.engine_faults.take() == {}

    asyncio.run(main())


@pytest.mark.parametrize("priority", [Priority.MEDIUM, Priority.LOW])
def test_nothing_is_remembered_of_a_request_that_ended_before_its_first_byte(priority: Priority) -> None:
    async def main() -> None:
        house = House({"a": 1})
        (await house.take(priority)).release(RequestOutcome.BROKEN)
        assert house.slots._recallable == {}
        assert [state.recallable for state in house.slots.dispatcher._states.values()] == [{}]
        house.check_empty()

    asyncio.run(main())
