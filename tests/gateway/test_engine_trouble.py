"""Requests that kill engines, engines that make no progress, their errors in our words, and models that are waited for."""

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import Priority
from aimgpu.errors import AimGpuError, EngineDisconnected, EngineFailed, EngineUnavailable, InvalidRequest, RequestQuarantined
from aimgpu.gateway import engine_faults
from aimgpu.gateway.engine_errors import refuse_failure, to_openai
from aimgpu.gateway.engine_faults import StuckEngines, StuckLimits
from aimgpu.gateway.killers import KillerRequests
from aimgpu.gateway.records import RequestRecord, excerpt_prompt
from aimgpu.gateway.routes import Arrival, Backend
from aimgpu.gateway.wake_requests import WakeRequests

BODY = b'{"messages": []}'


def test_a_request_alone_with_two_dying_engines_is_refused_until_it_is_forgotten() -> None:
    killers = KillerRequests()
    for number, moment in enumerate((0.0, 10.0)):
        killers.check("chat", BODY, moment)
        killers.note_death("chat", BODY, f"chat-{number}", 1, moment)
    with pytest.raises(RequestQuarantined, match="10 more minutes"):
        killers.check("chat", BODY, 11.0)
    killers.check("chat", BODY + b" ", 11.0)
    killers.check("other", BODY, 11.0)
    killers.check("chat", BODY, 611.0)
    killers.check("chat", BODY, 12.0)


@settings(max_examples=examples(35))
@given(st.integers(1, 40), st.integers(1, 10))
def test_many_that_were_there_share_the_blame(together: int, deaths: int) -> None:
    killers = KillerRequests()
    for death in range(deaths):
        for one in range(together):
            killers.note_death("chat", b"%d" % one, f"e-{death}", together - one, death * 10.0 + one * 0.01)
    refused = 0
    for one in range(together):
        try:
            killers.check("chat", b"%d" % one, deaths * 10.0)
        except RequestQuarantined:
            refused += 1
    assert refused == (together if deaths / together >= 1.9 else 0)


def test_an_answer_clears_a_request_and_marks_it_as_safe() -> None:
    killers = KillerRequests()
    killers.note_death("chat", BODY, "a", 1, 0.0)
    assert not killers.is_safe("chat", BODY)
    killers.note_safe("chat", BODY)
    assert killers.is_safe("chat", BODY)
    assert killers.suspicions == {}
    killers.note_death("chat", BODY, "b", 1, 5.0)
    killers.check("chat", BODY, 6.0)


def test_what_is_known_of_requests_is_bounded() -> None:
    killers = KillerRequests()
    for number in range(12_000):
        killers.note_safe("chat", b"%d" % number)
        killers.note_death("chat", b"x%d" % number, f"e-{number}", 1, float(number))
    assert len(killers._safe) <= 10_000
    assert len(killers.suspicions) <= 1000
    assert len(killers._deaths) <= 1000


@dataclass
class Answer:
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class QuietUpstream:
    """An engine that is heard when the test says so."""

    heard: float = 0.0
    asked: list[bytes] = field(default_factory=list)
    gone: bool = False
    waiting: int = 0  # questions without an answer
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    given: list[Answer] = field(default_factory=list)

    async def send(self, _target: Any, body: bytes, _first: Any = None) -> Any:
        self.asked.append(body)
        if self.gone:
            raise EngineDisconnected("gone")
        self.waiting += 1
        try:
            await self.answers.wait()
        finally:
            self.waiting -= 1
        self.given.append(Answer())
        return self.given[-1]

    def last_heard(self, _url: str) -> float:
        return self.heard

    async def close(self) -> None: ...


@dataclass
class Watch:
    """Engines that are watched, with a clock that the test moves."""

    monkeypatch: pytest.MonkeyPatch
    in_flight: int = 0
    now: float = 100.0

    def __post_init__(self) -> None:
        self.upstream = QuietUpstream()
        self.reported: list[tuple[str, str]] = []
        limits = StuckLimits(look_seconds=1e6, longest_seconds=60.0)
        upstream: Any = self.upstream
        self.stuck = StuckEngines(upstream, lambda _: self.in_flight, lambda *one: self.reported.append(one), limits)
        self.monkeypatch.setattr(engine_faults, "monotonic", lambda: self.now)
        self.backend = Backend(instance_id="chat-0", url="http://127.0.0.1:9", api_key="k", slots=1)

    async def look(self, seconds: float) -> None:
        self.now += seconds
        self.stuck._look()
        for _ in range(5):
            await asyncio.sleep(0)


def test_an_engine_that_makes_no_progress_is_asked_and_then_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        watch = Watch(monkeypatch)
        watch.stuck.abandoned(watch.backend, "chat")
        await watch.look(2.0)
        assert len(watch.upstream.asked) == 1
        assert b'"max_tokens":1' in watch.upstream.asked[0]
        await watch.look(50.0)
        assert (len(watch.upstream.asked), watch.reported) == (1, [])
        await watch.look(20.0)
        assert [name for name, _ in watch.reported] == ["chat-0"]
        await watch.look(100.0)
        assert len(watch.reported) == 1
        watch.stuck.close()

    asyncio.run(main())


def test_an_engine_at_work_for_others_is_not_asked_and_one_that_is_heard_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        watch = Watch(monkeypatch, in_flight=1)
        watch.stuck.abandoned(watch.backend, "chat")
        await watch.look(30.0)
        assert watch.upstream.asked == []
        watch.upstream.heard = watch.now
        await watch.look(100.0)
        assert (watch.reported, watch.stuck._suspects) == ([], {})
        watch.stuck.close()

    asyncio.run(main())


def test_the_answer_to_the_question_itself_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep its connection."""

    async def main() -> None:
        watch = Watch(monkeypatch)
        watch.stuck.abandoned(watch.backend, "chat")
        watch.upstream.answers.set()
        await watch.look(2.0)
        assert [answer.cancelled for answer in watch.upstream.given] == [True]
        watch.stuck.close()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["heard", "reported", "closed"])
def test_a_question_without_an_answer_ends_with_the_watch(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    async def main() -> None:
        watch = Watch(monkeypatch)
        watch.stuck.abandoned(watch.backend, "chat")
        await watch.look(2.0)
        assert watch.upstream.waiting == 1
        if end == "heard":
            watch.upstream.heard = watch.now
        if end == "closed":
            watch.stuck.close()
        await watch.look(100.0)
        assert watch.upstream.waiting == 0
        watch.stuck.close()

    asyncio.run(main())


def test_an_engine_that_is_gone_is_not_reported_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        watch = Watch(monkeypatch)
        watch.upstream.gone = True
        watch.stuck.abandoned(watch.backend, "chat")
        await watch.look(2.0)
        await watch.look(100.0)
        assert watch.reported == []
        watch.stuck.close()

    asyncio.run(main())


def error(message: Any) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


CALLERS = [
    "failed to parse grammar",
    "Failed to parse messages: Missing 'content'",
    "unable to apply template",
    "failed to load image",
    "Invalid JSON schema",
    "unknown type foo",
    "regex is too large",
    "Unsupported message role",
    "[json.exception.out_of_range.403] key not found",
]
ENGINES = [
    "CUDA error: an illegal memory access",
    "failed to parse grammar: CUDA out of memory",
    "HIP error",
    "GGML_ASSERT failed",
    "no space left in KV cache",
    "internal error",
    "",
]


@pytest.mark.parametrize("message", CALLERS)
def test_an_error_about_the_request_is_its_callers(message: str) -> None:
    with pytest.raises(InvalidRequest):
        refuse_failure(500, error(message), "'chat'", "/v1/chat/completions")


@pytest.mark.parametrize("message", ENGINES)
def test_an_error_about_the_machine_is_the_engines(message: str) -> None:
    with pytest.raises(EngineFailed) as caught:
        refuse_failure(500, error(message), "'chat'", "/v1/chat/completions")
    assert caught.value.http_status == 502


@pytest.mark.parametrize("status", [429, 503])
def test_an_engine_that_is_full_says_when_to_come_back(status: int) -> None:
    with pytest.raises(EngineUnavailable):
        refuse_failure(status, error("no slot"), "'chat'", "/x")


NAMES = st.sampled_from(["error", "message", "detail", "type", "code", "param"])
SAID = st.recursive(
    st.none() | st.text(max_size=9) | st.integers(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
)
BODIES = st.binary(max_size=40) | SAID.map(lambda value: json.dumps(value).encode())


@settings(max_examples=examples(35))
@given(st.integers(400, 599), BODIES)
def test_whatever_an_engine_says_in_an_error_it_becomes_one_of_ours(status: int, body: bytes) -> None:
    try:
        refuse_failure(status, body, "'chat'", "/x")
    except AimGpuError as refused:
        found = (refused.message, refused.code)
    else:
        shaped = json.loads(to_openai(status, body))["error"]
        assert set(shaped) >= {"message", "type", "param", "code"}
        found = (shaped["message"], shaped["code"])
    assert all(isinstance(one, str) and len(one) < 1000 for one in found)
    assert found[1]


def test_the_most_urgent_wake_is_first_and_a_repeated_one_keeps_its_time() -> None:
    wakes = WakeRequests()
    wakes.want("a", Priority.LOW, 1.0)
    wakes.want("b", Priority.HIGH, 2.0)
    wakes.want("a", Priority.MEDIUM, 3.0)
    wakes.want("a", Priority.LOW, 4.0)
    assert [(one.model, one.priority, one.since) for one in wakes.read()] == [
        ("b", Priority.HIGH, 2.0),
        ("a", Priority.MEDIUM, 1.0),
    ]
    wakes.keep_only(frozenset({"a"}))
    assert [one.model for one in wakes.read()] == ["a"]
    wakes.sleep("a")
    wakes.sleep("a")
    assert wakes.take_sleeps() == ("a",)
    assert wakes.take_sleeps() == ()


def test_whoever_waits_for_wakes_sees_each_change() -> None:
    wakes, seen = WakeRequests(), threading.Event()

    def wait() -> None:
        wakes.wait(30)
        seen.set()

    thread = threading.Thread(target=wait)
    thread.start()
    wakes.poke()
    assert seen.wait(30)
    thread.join()
    wakes.want("a", Priority.LOW, 1.0)
    wakes.wait(30)  # returns at once: something changed since


@pytest.mark.parametrize(
    ("arrival", "now", "left"),
    [
        (Arrival(slots=1, seconds=None), 0.0, None),
        (Arrival(slots=1, seconds=10.0), 5.0, 10.0),
        (Arrival(slots=1, seconds=10.0, since=0.0), 4.0, 6.0),
        (Arrival(slots=1, seconds=10.0, since=0.0), 11.0, None),
        (Arrival(slots=1, seconds=10.0, since=0.0, retry_at=20.0), 4.0, 26.0),
        (Arrival(slots=1, seconds=10.0, since=0.0, retry_at=2.0), 4.0, 10.0),
    ],
)
def test_how_long_a_model_still_takes(arrival: Arrival, now: float, left: float | None) -> None:
    assert arrival.seconds_left(now) == left


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": [{"role": "user", "content": "first"}, {"role": "user", "content": "last"}]}, "last"),
        ({"messages": [{"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}]}]}, "a  b"),
        ({"messages": []}, ""),
        ({"messages": "x"}, ""),
        ({"prompt": "p"}, "p"),
        ({"input": ["a", "b"]}, "a b"),
        ({"input": [[1, 2]]}, "[1, 2]"),
        ({"prompt": "x" * 3000}, "x" * 2000 + "…"),
        ({}, ""),
    ],
)
def test_an_excerpt_of_a_prompt_is_its_last_turn_and_short(fields: dict[str, Any], text: str) -> None:
    assert excerpt_prompt(fields) == text


@pytest.mark.parametrize(
    ("streamed", "first", "tokens", "ttft", "tpot"),
    [(True, 0.5, 11, 0.5, 0.05), (True, 0.5, 1, 0.5, None), (True, None, 5, None, None), (False, 0.5, 11, None, None)],
)
def test_times_of_tokens_are_known_of_streams_only(
    first: float | None, tokens: int, ttft: Any, tpot: Any, *, streamed: bool
) -> None:
    record = RequestRecord("chat", "e", "me", Priority.LOW, 200, None, streamed, 0.0, first, 1.0, tokens)
    assert (record.ttft_seconds, record.tpot_seconds) == (ttft, pytest.approx(tpot) if tpot else None)
