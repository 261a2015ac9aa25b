"""Who was served when, counted and bounded: requests as they end, turns of instances, prompts, and histograms of latencies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import Priority
from aimgpu.errors import InvalidInput
from aimgpu.qos.slo import activity
from aimgpu.qos.slo.activity import ActivityLog, Signal, Turn, parse_kept_prompts
from aimgpu.qos.slo.request_counts import FIRST_TOKEN_BOUNDS, LATENCY_BOUNDS, OUTPUT_TOKEN_BOUNDS, Histogram, RequestCounts


@dataclass
class Record:
    model: str = "chat"
    instance_id: str | None = "chat-0"
    caller: str = "me"
    priority: Any = Priority.LOW
    status: int = 200
    code: str | None = None
    streamed: bool = False
    queued_seconds: float = 0.0
    first_byte_seconds: float | None = None
    seconds: float = 1.0
    output_tokens: int | None = 5
    recalls: int = 0
    prompt: str | None = None


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def find_none(instance_ids: Iterable[str]) -> Mapping[str, Sequence[Signal]]:
    return {}


def test_requests_are_numbered_in_the_order_in_which_they_end_and_read_from_any_number_on() -> None:
    log = ActivityLog(Clock())
    for number in range(10):
        log.add(Record(model=f"m{number}"), float(number))
    assert [entry.number for entry in log.requests()] == list(range(1, 11))
    assert [entry.record.model for entry in log.requests(after=7)] == ["m7", "m8", "m9"]
    assert log.requests(after=10) == ()
    assert log.last_used() == {f"m{number}": float(number) for number in range(10)}


@settings(max_examples=examples(35))
@given(st.integers(0, 30), st.integers(1, 20), st.integers(0, 5))
def test_memory_does_not_grow_with_what_is_served(count: int, most: int, prompts: int) -> None:
    before, activity.MOST_REQUESTS = activity.MOST_REQUESTS, most
    try:
        log = ActivityLog(Clock(), prompts=prompts)
    finally:
        activity.MOST_REQUESTS = before
    for number in range(count):
        log.finished(Record(prompt=f"prompt {number}" if prompts else None))
    kept = log.requests()
    assert len(kept) == min(count, most)
    assert log.prompts_kept == prompts
    texts = [log.prompt(number + 1) for number in range(count)]
    assert [text for text in texts if text is not None] == [
        f"prompt {number}" for number in range(max(0, count - prompts), count)
    ] * bool(prompts)
    assert all(entry.record.prompt is None for entry in kept), "a prompt is in the short list only"
    assert all("prompt" not in entry.to_json() for entry in kept)


def test_an_entry_says_when_it_came_and_when_its_engine_got_it() -> None:
    log = ActivityLog(Clock())
    log.add(Record(seconds=3.0, queued_seconds=1.0), 10.0)
    log.add(Record(seconds=3.0, queued_seconds=3.0, instance_id=None, status=503, code="queue_full"), 11.0)
    served, refused = log.requests()
    assert (served.arrived, served.sent, served.ended) == (7.0, 8.0, 10.0)
    assert (refused.arrived, refused.sent) == (8.0, None)
    assert refused.to_json() | {"number": 2, "status": 503, "code": "queue_full", "instance": None} == refused.to_json()


def test_who_waited_is_found_and_who_hardly_did_is_not() -> None:
    log = ActivityLog(Clock())
    for waited, ended in ((0.001, 50.0), (0.5, 50.0), (0.5, 10.0)):
        log.add(Record(queued_seconds=waited), ended)
    assert [entry.number for entry in log.waits(since=20.0)] == [2]


SPANS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), st.floats(0.1, 5)), max_size=40)


@settings(max_examples=examples(35))
@given(SPANS)
def test_a_turn_lasts_from_the_first_request_to_the_last_of_an_instance(steps: list[tuple[str, bool, float]]) -> None:
    clock = Clock(0.0)
    log = ActivityLog(clock)
    signals = log.add_signals(find_none)(["a", "b"])
    running = {"a": 0, "b": 0}
    since: dict[str, float] = {}
    expected: list[Turn] = []
    for name, begins, passed in steps:
        clock.now += passed
        [signal] = signals[name]
        if begins:
            if not running[name]:
                since[name] = clock.now
            running[name] += 1
            signal.begin()
        elif running[name]:
            running[name] -= 1
            signal.end()
            if not running[name]:
                expected.append(Turn(name, since[name], clock.now))
    open_now = [Turn(name, since[name], clock.now) for name in ("a", "b") if running[name]]
    assert list(log.turns(0.0)) == expected + open_now
    later = [turn for turn in expected if turn.ended >= clock.now / 2]
    assert list(log.turns(clock.now / 2)) == later + open_now


def test_signals_are_added_to_those_that_are_there_and_kept_while_the_instance_lives() -> None:
    @dataclass
    class Counting:
        begun: int = 0

        def begin(self) -> None:
            self.begun += 1

        def end(self) -> None: ...

    gate = Counting()
    log = ActivityLog(Clock())
    find = log.add_signals(lambda ids: {"a": (gate,)} if "a" in ids else {})
    first = find(["a", "b"])
    assert (len(first["a"]), len(first["b"])) == (2, 1)
    for signal in first["a"]:
        signal.begin()
    assert gate.begun == 1
    again = find(["a"])
    assert again["a"][1] is first["a"][1], "a request that runs is ended where it began"
    assert [turn.instance_id for turn in log.turns(0.0)] == ["a"]


@pytest.mark.parametrize(("text", "count"), [("0", 0), ("50", 50), ("200", 200)])
def test_how_many_prompts_are_kept(text: str, count: int) -> None:
    assert parse_kept_prompts(text) == count


@pytest.mark.parametrize("text", ["", "-1", "201", "many", "1.5", "٣", " 5", "9" * 5000])
def test_a_number_of_prompts_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="AIMGPU_KEEP_PROMPTS"):
        parse_kept_prompts(text)


@settings(max_examples=examples(35))
@given(st.lists(st.floats(0, 500), max_size=100), st.sampled_from([LATENCY_BOUNDS, FIRST_TOKEN_BOUNDS, OUTPUT_TOKEN_BOUNDS]))
def test_a_histogram_counts_each_value_below_the_first_bound_that_holds_it(
    values: list[float], bounds: tuple[float, ...]
) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    for index, bound in enumerate(bounds):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values), "as Prometheus reads `le`"
    assert sum(histogram.counts) == len(values)
    assert histogram.total == pytest.approx(sum(values))
    assert list(bounds) == sorted(set(bounds))


@settings(max_examples=examples(35))
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([200, 400, 503]), st.booleans()), max_size=60))
def test_requests_are_counted_by_model_and_status_and_times_where_they_are_known(seen: list[tuple[str, int, bool]]) -> None:
    counts = RequestCounts()
    for model, status, streamed in seen:
        counts.observe(model, status, 1.0, 0.1 if streamed else None, 0.01 if streamed else None)
    found = dict(counts.read())
    assert set(found) == {model for model, _, _ in seen}
    for model, one in found.items():
        mine = [(status, streamed) for name, status, streamed in seen if name == model]
        assert one.by_status == {status: sum(each == status for each, _ in mine) for status, _ in mine}
        assert sum(one.latency.counts) == len(mine)
        assert sum(one.first_token.counts) == sum(one.output_token.counts) == sum(streamed for _, streamed in mine)
