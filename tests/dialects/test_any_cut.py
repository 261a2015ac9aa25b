"""However an engine cuts its answer, every dialect's caller reads the same message from it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects import conversations
from tests.dialects.conversations import CUTTERS, DONE, STREAMS, WHOLES, Cutter, Said, ToolCall
from tests.examples import examples
from tests.gateway.memory import MemoryEngine, json_reads, make_world, run, stream_reads
from tests.http_answer import HttpAnswer

SIZES = st.lists(st.integers(1, 80), min_size=1, max_size=5)


def ask(path: str, fields: dict[str, Any], reads: list[bytes]) -> HttpAnswer:
    async def main() -> HttpAnswer:
        world = make_world(MemoryEngine(lambda _path, _body: reads))
        return await world.ask(path, {"model": "chat", **fields})

    answer = run(main())
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_stream_reads_the_same_however_its_bytes_are_cut(dialect: str) -> None:
    path, fields, read = STREAMS[dialect]

    @settings(max_examples=examples(10))
    @given(conversations.answers(), CUTTERS, SIZES)
    def check(said: Said, cutter: Cutter, sizes: list[int]) -> None:
        reads = conversations.recut(conversations.to_stream(said, cutter), sizes)
        assert read(ask(path, fields, reads)) == said

    check()


@pytest.mark.parametrize("dialect", STREAMS)
def test_deltas_that_say_nothing_change_nothing(dialect: str) -> None:
    path, fields, read = STREAMS[dialect]

    @settings(max_examples=examples(8))
    @given(conversations.answers(), CUTTERS)
    def check(said: Said, cutter: Cutter) -> None:
        assert read(ask(path, fields, conversations.to_stream(said, cutter, empties=True))) == said

    check()


@pytest.mark.parametrize("dialect", WHOLES)
def test_a_caller_that_wants_one_answer_gets_what_a_stream_would_have_said(dialect: str) -> None:
    path, fields, read = WHOLES[dialect]

    @settings(max_examples=examples(10))
    @given(conversations.answers(), CUTTERS)
    def check(said: Said, cutter: Cutter) -> None:
        asked_as_stream = path.startswith("/api/")  # the gateway asks for a stream there, to time its parts
        reads = conversations.to_stream(said, cutter) if asked_as_stream else conversations.to_whole(said)
        assert read(ask(path, fields, reads)) == said

    check()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("dialect", ["anthropic", "responses", "ollama", "ollama generate"])
def test_thoughts_are_found_under_either_name_that_engines_use(dialect: str, name: str) -> None:
    path, fields, read = STREAMS[dialect]
    said = Said(thinking="Let me see.", text="Yes.")
    assert read(ask(path, fields, conversations.to_stream(said, Cutter([3]), thinking_name=name))) == said


@pytest.mark.parametrize("dialect", ["anthropic", "responses", "ollama", "ollama generate"])
def test_a_stream_without_its_last_event_is_complete_where_the_engine_ended_it(dialect: str) -> None:
    path, fields, read = STREAMS[dialect]
    said = Said(text="Hello", calls=(ToolCall("c", "go", {"x": 1}),), reason="tool_calls")
    events = conversations.to_events(conversations.to_chunks(said, Cutter([2])))
    assert read(ask(path, fields, stream_reads(events))) == said


@pytest.mark.parametrize("dialect", ["anthropic", "responses", "ollama", "ollama generate"])
def test_a_stream_asked_for_and_answered_in_one_piece_is_understood(dialect: str) -> None:
    """Some engines do not stream some requests: a tool call, say."""
    path, fields, _ = STREAMS[dialect]
    _, _, read = WHOLES[dialect]
    said = Said(text="Hello", reason="length")
    assert read(ask(path, fields, conversations.to_whole(said))) == said


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_stream_with_no_word_in_it_still_begins_and_ends(dialect: str) -> None:
    path, fields, read = STREAMS[dialect]
    said = Said(reason="length")
    assert read(ask(path, fields, conversations.to_stream(said, Cutter([1])))) == said


def test_events_that_are_no_data_are_left_out() -> None:
    """Comments keep a connection alive; some proxies of engines add them."""
    said = Said(text="Hello")
    events = conversations.to_events(conversations.to_chunks(said, Cutter([2])))
    noisy = [part for event in events for part in (b": ping\n\n", b"event: message\n" + event)]
    for dialect in ("anthropic", "responses", "ollama"):
        path, fields, read = STREAMS[dialect]
        assert read(ask(path, fields, stream_reads([*noisy, DONE]))) == said


@settings(max_examples=examples(12))
@given(st.lists(conversations.answers(tools=False, thinking=False), min_size=2, max_size=4), CUTTERS)
def test_choices_asked_for_one_by_one_are_joined_in_order(said: list[Said], cutter: Cutter) -> None:
    async def main(*, stream: bool) -> HttpAnswer:
        left = iter(said)

        def answer(_path: str, fields: Any) -> list[bytes]:
            one = next(left)
            return conversations.to_stream(one, cutter) if fields.get("stream") else conversations.to_whole(one)

        world = make_world(MemoryEngine(answer))
        fields = {"model": "chat", "messages": [{"role": "user", "content": "?"}], "n": len(said), "stream": stream}
        return await world.ask("/v1/chat/completions", fields)

    whole, streamed = run(main(stream=False)), run(main(stream=True))
    assert [choice["message"]["content"] or "" for choice in whole.json["choices"]] == [one.text for one in said]
    assert [choice["finish_reason"] for choice in whole.json["choices"]] == [one.reason for one in said]
    texts = dict.fromkeys(range(len(said)), "")
    for event in streamed.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert list(texts.values()) == [one.text for one in said]
    assert streamed.body.count(DONE) == 1
    output = sum(one.output_tokens for one in said)
    expected = {"prompt_tokens": said[0].prompt_tokens, "completion_tokens": output}
    for usage in (whole.json["usage"], streamed.events[-1]["usage"]):
        assert usage == expected | {"total_tokens": said[0].prompt_tokens + output}


def test_the_largest_seed_gives_each_choice_one_of_its_own() -> None:
    async def main() -> list[int]:
        world = make_world(MemoryEngine(lambda _path, _body: conversations.to_whole(Said(text="x"))))
        fields = {"model": "chat", "messages": [{"role": "user", "content": "?"}], "n": 3, "seed": (1 << 63) - 1}
        assert (await world.ask("/v1/chat/completions", fields)).status == 200
        return [body["seed"] for _, body in world.engine.asked]

    seeds = run(main())
    assert len(set(seeds)) == 3
    assert all(abs(seed) < 1 << 63 for seed in seeds)


@pytest.mark.parametrize("dialect", ["anthropic", "responses", "ollama"])
def test_tokens_are_counted_in_the_record_of_every_dialect(dialect: str) -> None:
    path, fields, _ = STREAMS[dialect]

    async def main() -> tuple[int | None, bool]:
        said = Said(text="Hello", output_tokens=17)
        world = make_world(MemoryEngine(lambda _path, _body: conversations.to_stream(said, Cutter([1]))))
        await world.ask(path, {"model": "chat", **fields})
        [record] = world.records.found
        return record.output_tokens, record.streamed

    assert run(main()) == (17, True)


def test_arguments_that_were_cut_short_are_shown_as_far_as_they_came() -> None:
    cut = [{"index": 0, "id": "c", "function": {"name": "go", "arguments": '{"x": [1, 2'}}]
    chunk = {"choices": [{"index": 0, "delta": {"tool_calls": cut}, "finish_reason": "length"}]}
    reads = stream_reads([*conversations.to_events([chunk]), DONE])
    path, fields, _ = STREAMS["ollama"]
    lines = [json.loads(line) for line in ask(path, fields, reads).body.splitlines()]
    assert lines[0]["message"]["tool_calls"][0]["function"]["arguments"] == {"_incomplete": '{"x": [1, 2'}
    assert lines[-1]["done_reason"] == "length"


def test_an_answer_nested_too_deep_is_the_engines_failure() -> None:
    """A model may write any JSON as arguments, also what cannot be written again."""
    deep = "[" * 400 + "]" * 400
    call = {"id": "c", "type": "function", "function": {"name": "go", "arguments": f'{{"x": {deep}}}'}}
    answer = {"choices": [{"index": 0, "finish_reason": "tool_calls", "message": {"content": None, "tool_calls": [call]}}]}

    async def main(path: str, fields: dict[str, Any]) -> HttpAnswer:
        world = make_world(MemoryEngine(lambda _path, _body: json_reads(answer)))
        return await world.ask(path, {"model": "chat", **fields})

    for dialect in ("anthropic", "ollama"):
        path, fields, _ = WHOLES[dialect]
        assert run(main(path, fields)).status == 502
    path, fields, _ = WHOLES["responses"]  # passes arguments on as text
    found = run(main(path, fields))
    assert json.loads(found.json["output"][0]["arguments"]) == {"x": json.loads(deep)}
