"""The pace of tokens while they stream, as the launch gate is steered by it."""

from dataclasses import dataclass
from typing import Any

import pytest

from aimgpu.domain import Priority
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.token_pace import TokenPace

HIGH = {"chat": Priority.HIGH}


@dataclass(eq=False)
class Model:
    name: str


@dataclass(eq=False)
class Stream:
    model: Any
    priority: Priority = Priority.HIGH
    tokens_so_far: int = 0
    last_event: float | None = None


def record(seconds: float, first: float, tokens: int, priority: Priority = Priority.HIGH, status: int = 200) -> RequestRecord:
    return RequestRecord("chat", "chat-0", "me", priority, status, None, True, 0.0, first, seconds, tokens)  # noqa: FBT003


def test_tokens_of_running_streams_are_seen_between_two_looks() -> None:
    one, two = Stream(Model("chat")), Stream(Model("chat"))
    pace = TokenPace(lambda: [one, two])
    assert pace.take(HIGH, 0.0) == {}
    one.tokens_so_far, one.last_event = 10, 1.0
    two.tokens_so_far, two.last_event = 10, 1.0
    assert pace.take(HIGH, 1.0) == {}, "a first token says nothing about the time between tokens"
    one.tokens_so_far, one.last_event = 110, 1.2
    two.tokens_so_far, two.last_event = 60, 1.2
    (found,) = pace.take(HIGH, 1.25)["chat"]["tpot"]
    assert found == pytest.approx(0.4 / 150)


def test_a_stream_that_stalls_counts_as_one_slow_token() -> None:
    stream = Stream(Model("chat"), tokens_so_far=5, last_event=1.0)
    pace = TokenPace(lambda: [stream])
    pace.take(HIGH, 1.0)
    assert pace.take(HIGH, 1.5)["chat"]["tpot"] == [0.5]


def test_only_the_models_own_class_of_models_that_ask_counts() -> None:
    low, other = Stream(Model("chat"), Priority.LOW, 1, 1.0), Stream(Model("batch"), Priority.LOW, 1, 1.0)
    pace = TokenPace(lambda: [low, other])
    pace.take(HIGH, 1.0)
    pace.finished(record(2.0, 0.5, 11, Priority.LOW))
    assert pace.take(HIGH, 2.0) == {}


def test_requests_that_are_over_tell_their_times_and_failures_do_not() -> None:
    pace = TokenPace(list)
    pace.take(HIGH, 0.0)
    pace.finished(record(1.5, 0.5, 11))
    pace.finished(record(1.5, 0.5, 11, status=500))
    assert pace.take(HIGH, 1.0) == {"chat": {"ttft": [0.5], "tpot": [0.1], "latency": [1.5]}}
    assert pace.take(HIGH, 2.0) == {}


def test_a_fast_stream_gives_several_samples_per_take() -> None:
    """A promise is judged over a few tokens; their average over a quarter of a second would hide the late ones."""
    stream = Stream(Model("chat"), tokens_so_far=1, last_event=0.0)
    pace = TokenPace(lambda: [stream])
    pace.take(HIGH, 0.0)
    stream.tokens_so_far, stream.last_event = 25, 0.06
    pace.look(0.0625)
    stream.tokens_so_far, stream.last_event = 31, 0.12
    pace.look(0.125)
    stream.tokens_so_far, stream.last_event = 49, 0.18
    assert pace.take(HIGH, 0.1875)["chat"]["tpot"] == pytest.approx([0.06 / 24, 0.12 / 24])


def test_a_slow_stream_is_not_judged_in_the_middle_of_a_token() -> None:
    stream = Stream(Model("chat"), tokens_so_far=1, last_event=0.0)
    pace = TokenPace(lambda: [stream])
    pace.take(HIGH, 0.0)
    stream.tokens_so_far, stream.last_event = 2, 0.6
    assert pace.take(HIGH, 0.75)["chat"]["tpot"] == [0.6]
    assert pace.take(HIGH, 1.5) == {}, "its next token is not late"
    assert pace.take(HIGH, 2.0)["chat"]["tpot"] == pytest.approx([1.4])


def test_tokens_that_were_seen_while_they_streamed_are_not_counted_again() -> None:
    pace = TokenPace(list)
    pace.take(HIGH, 0.0)
    pace.finished(record(1.5, 0.5, 101))
    assert pace.take(HIGH, 1.0) == {"chat": {"ttft": [0.5], "latency": [1.5]}}
