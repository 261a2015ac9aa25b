"""Engines that fail in the middle of an answer: every dialect's caller sees one error, nothing after it, and no half event."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects import conversations
from tests.dialects.conversations import DONE, STREAMS, WHOLES, Cutter, Said, ToolCall
from tests.examples import examples
from tests.gateway.memory import MemoryEngine, World, json_reads, make_world, run, stream_reads
from tests.http_answer import HttpAnswer

SAID = Said(thinking="Hm…", text="Grüße 👋", calls=(ToolCall("c", "go", {"x": "ß"}),), reason="tool_calls")
CHUNKS = conversations.to_chunks(SAID, Cutter([2, 3]))
EVENTS = conversations.to_events(CHUNKS)
TRANSLATED = ["anthropic", "responses", "ollama", "ollama generate"]


def ask(dialect: str, reads: list[bytes], *, breaks_off: bool = False) -> tuple[HttpAnswer, World]:
    path, fields, _ = STREAMS[dialect]

    async def main() -> tuple[HttpAnswer, World]:
        world = make_world(MemoryEngine(lambda _path, _body: reads, breaks_off=breaks_off))
        return await world.ask(path, {"model": "chat", **fields}), world

    return run(main())


def errors_in(dialect: str, answer: HttpAnswer) -> list[str]:
    """The messages of the errors that a caller of this dialect would see, in order."""
    if dialect.startswith("ollama"):
        return [line["error"] for line in map(json.loads, answer.body.splitlines()) if "error" in line]
    events = answer.events
    if dialect == "anthropic":
        return [event["error"]["message"] for event in events if event["type"] == "error"]
    if dialect == "responses":
        return [event["response"]["error"]["message"] for event in events if event["type"] == "response.failed"]
    return [event["error"]["message"] for event in events if "error" in event]


def ends_well(dialect: str, answer: HttpAnswer) -> bool:
    """Whether a caller of this dialect would take the answer for a complete one."""
    last: dict[str, Any]
    if dialect.startswith("ollama"):
        last = json.loads(answer.body.splitlines()[-1])
        return last.get("done") is True
    if dialect == "openai":
        return answer.body.endswith(DONE)
    last = answer.events[-1]
    return last["type"] in {"message_stop", "response.completed", "response.incomplete"}


def text_in(dialect: str, answer: HttpAnswer) -> str:
    if dialect.startswith("ollama"):
        lines = [json.loads(line) for line in answer.body.splitlines()]
        return "".join((line.get("message") or {}).get("content") or line.get("response") or "" for line in lines)
    if dialect == "anthropic":
        return "".join(event["delta"].get("text", "") for event in answer.events if event["type"] == "content_block_delta")
    if dialect == "responses":
        return "".join(event["delta"] for event in answer.events if event["type"] == "response.output_text.delta")
    choices = [choice for event in answer.events for choice in event.get("choices") or ()]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("dialect", TRANSLATED)
@pytest.mark.parametrize("then_done", [True, False], ids=["then the end", "no end"])
@pytest.mark.parametrize("place", range(0, len(EVENTS), 3))
def test_an_error_within_a_stream_is_its_end(dialect: str, place: int, *, then_done: bool) -> None:
    """As vLLM sends it: an event with an error, and then the end of a stream as if it were complete."""
    error = b'data: {"error": {"message": "out of KV cache", "type": "x", "param": null, "code": 500}}\n\n'
    events = [*EVENTS[:place], error, *EVENTS[place:], *([DONE] if then_done else [])]
    answer, _ = ask(dialect, stream_reads(events))
    assert errors_in(dialect, answer) == ["out of KV cache"]
    assert not ends_well(dialect, answer)
    assert SAID.text.startswith(text_in(dialect, answer))


@pytest.mark.parametrize("dialect", TRANSLATED)
def test_an_error_that_is_a_text_is_an_error_too(dialect: str) -> None:
    answer, _ = ask(dialect, stream_reads([EVENTS[0], b'data: {"error": "model runner crashed"}\n\n', DONE]))
    assert errors_in(dialect, answer) == ["model runner crashed"]
    assert not ends_well(dialect, answer)


@pytest.mark.parametrize("dialect", TRANSLATED)
@pytest.mark.parametrize(
    "event",
    [
        b"data: not json\n\n",
        b"data: [1, 2]\n\n",
        b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": ["a"]}}]}\n\n',
        b'data: {"choices": [7]}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": [{"index": [], "function": {}}]}}]}\n\n',
        b'data: {"choices": [{"delta": {"reasoning": {"a": 1}}}]}\n\n',
    ],
    ids=["no JSON", "no object", "number", "list", "no choice", "index", "thoughts"],
)
def test_an_event_that_makes_no_sense_ends_the_answer_as_a_failure(dialect: str, event: bytes) -> None:
    answer, world = ask(dialect, stream_reads([*EVENTS[:4], event, *EVENTS[4:], DONE]))
    if b'"index": []' in event and dialect in {"anthropic", "responses"}:
        return  # these pass an index on as they find it
    assert len(errors_in(dialect, answer)) == 1
    assert not ends_well(dialect, answer)
    assert len(world.records.found) == 1


@pytest.mark.parametrize("dialect", ["openai", *TRANSLATED])
def test_a_stream_cut_at_any_byte_is_an_error_or_complete_and_never_half_an_event(dialect: str) -> None:
    path, fields, read = STREAMS[dialect]
    reads = stream_reads([*EVENTS, DONE])
    data = b"".join(reads)
    body_ends = len(data) - len(b"0\r\n\r\n")  # from here on all was said

    @settings(max_examples=examples(25))
    @given(st.integers(0, len(data)))
    def check(cut: int) -> None:
        async def main() -> tuple[HttpAnswer, World]:
            world = make_world(MemoryEngine(lambda _path, _body: [data[:cut]], breaks_off=True))
            return await world.ask(path, {"model": "chat", **fields}), world

        answer, world = run(main())
        [record] = world.records.found
        if answer.status != 200:
            assert (answer.status, record.status) == (502, 502)
            return
        assert SAID.text.startswith(text_in(dialect, answer))
        if cut >= body_ends and dialect != "openai":
            assert read(answer) == SAID
        if cut == len(data):
            assert (record.status, errors_in(dialect, answer)) == (200, [])
        else:
            assert record.status == 502
            assert len(errors_in(dialect, answer)) == 1 or (cut >= body_ends and ends_well(dialect, answer))

    check()


@pytest.mark.parametrize("dialect", WHOLES)
def test_a_whole_answer_cut_at_any_byte_is_a_bad_gateway(dialect: str) -> None:
    path, fields, read = WHOLES[dialect]
    stream = path.startswith("/api/")
    data = b"".join(conversations.to_stream(SAID, Cutter([4])) if stream else conversations.to_whole(SAID))

    @settings(max_examples=examples(12))
    @given(st.integers(0, len(data) - (5 if stream else 1)))
    def check(cut: int) -> None:
        async def main() -> tuple[HttpAnswer, World]:
            world = make_world(MemoryEngine(lambda _path, _body: [data[:cut]], breaks_off=True))
            return await world.ask(path, {"model": "chat", **fields}), world

        answer, world = run(main())
        if answer.status == 200:  # all but the end of the engine's framing had come
            assert read(answer) == SAID
            assert cut > len(data) - 30
        else:
            assert answer.status == 502
            assert answer.json["error"]
        assert world.records.found[0].status == 502

    check()


def test_what_was_completed_is_not_undone_by_an_engine_that_breaks_off_after_it() -> None:
    data = b"".join(stream_reads([*EVENTS, DONE])[:-1])
    for dialect in TRANSLATED:
        answer, _ = ask(dialect, [data], breaks_off=True)
        assert ends_well(dialect, answer), dialect
        assert errors_in(dialect, answer) == []


def test_a_response_that_failed_is_not_kept() -> None:
    async def main() -> tuple[int, int]:
        error = b'data: {"error": {"message": "no"}}\n\n'
        engine = MemoryEngine(lambda _path, _body: stream_reads([EVENTS[0], error, DONE]))
        world = make_world(engine)
        failed = await world.ask("/v1/responses", {"model": "chat", "input": "?", "stream": True})
        identity = failed.events[0]["response"]["id"]
        following = {"model": "chat", "input": "?", "previous_response_id": identity}
        refused = await world.ask("/v1/responses", following)
        engine.answer = lambda _path, _body: stream_reads([*EVENTS, DONE])
        made = await world.ask("/v1/responses", {"model": "chat", "input": "?", "stream": True})
        following = {"model": "chat", "input": "?", "previous_response_id": made.events[0]["response"]["id"], "stream": True}
        return refused.status, (await world.ask("/v1/responses", following)).status

    assert run(main()) == (404, 200)


@pytest.mark.parametrize("answer", [b"", b"[]", b"null", b"not json", b'{"choices": 5}', b'{"choices": [{"message": 5}]}'])
@pytest.mark.parametrize("dialect", ["anthropic", "responses", "ollama"])
def test_a_whole_answer_that_makes_no_sense_is_a_failure_of_the_engine(dialect: str, answer: bytes) -> None:
    path, fields, _ = WHOLES[dialect]

    async def main() -> HttpAnswer:
        world = make_world(MemoryEngine(lambda _path, _body: json_reads(answer)))
        return await world.ask(path, {"model": "chat", **fields})

    found = run(main())
    assert found.status == 502 or (answer == b"" and found.status == 200)
    assert found.json


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity", "500 Internal Server Error"])
@pytest.mark.parametrize("dialect", TRANSLATED)
def test_a_refusal_of_the_engine_has_the_dialects_shape(dialect: str, status: str) -> None:
    path, fields, _ = STREAMS[dialect]

    async def main() -> HttpAnswer:
        said = {"error": {"message": "the prompt is too long", "type": "invalid_request_error", "code": 400}}
        world = make_world(MemoryEngine(lambda _path, _body: json_reads(said, status)))
        return await world.ask(path, {"model": "chat", **fields})

    found = run(main())
    assert found.status == (502 if status.startswith("500") else int(status[:3]))
    error = found.json["error"]
    assert "the prompt is too long" in (error if dialect.startswith("ollama") else error["message"])
    if dialect == "anthropic":
        assert (found.json["type"], error["type"]) == ("error", "api_error" if found.status == 502 else "invalid_request_error")
