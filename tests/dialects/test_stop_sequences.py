"""Anthropic's answers name the sequence that ended them, whatever the engine; their streams begin with the prompt's tokens."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects.test_translations import MESSAGE
from tests.gateway.calling import call
from tests.gateway.conftest import Serve
from tests.gateway.scripted_engine import Asked, ScriptedEngine, answer_json, begin_stream, end_stream, event, write_chunk

from aimgpu.gateway.dialects.translate import StopWatch
from aimgpu.gateway.routes import ModelCard

LAST = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def writes(*parts: str) -> Any:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        if not asked.fields.get("stream"):  # how llama.cpp counts a prompt
            await answer_json(asked, {"input_tokens": 7})
            return
        await begin_stream(asked)
        for part in parts:
            await write_chunk(asked, event(part))
        await write_chunk(asked, b"data: " + json.dumps(LAST).encode() + b"\n\ndata: [DONE]\n\n")
        await end_stream(asked)

    return script


def ask(serve: Serve, engine: ScriptedEngine, engine_name: str = "llamacpp", **fields: Any) -> Any:
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine=engine_name))
    return call(served.port, "POST", "/v1/messages", MESSAGE | fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parts", "text", "reason", "sequence"),
    [
        (("one EN", "D two"), "one ", "stop_sequence", "END"),
        (("one E", "Nd two"), "one ENd two", "end_turn", None),
        (("one EN",), "one EN", "end_turn", None),
        (("a STOP END",), "a ", "stop_sequence", "STOP"),
    ],
)
def test_an_answer_names_the_sequence_that_ended_it(  # noqa: PLR0913, PLR0917 - what is varied
    serve: Serve, engine: ScriptedEngine, parts: tuple[str, ...], text: str, reason: str, sequence: str | None, *, stream: bool
) -> None:
    engine.script = writes(*parts)
    got = ask(serve, engine, stop_sequences=["END", "STOP"], stream=stream)
    assert got.status == 200
    if stream:
        events = [json.loads(line[6:]) for line in got.body.decode().splitlines() if line.startswith("data: ")]
        assert "".join(one["delta"].get("text", "") for one in events if one["type"] == "content_block_delta") == text
        (end,) = [one["delta"] for one in events if one["type"] == "message_delta"]
        assert events[0]["message"]["usage"]["input_tokens"] == 7
        assert events[-1]["type"] == "message_stop"
    else:
        end = got.json
        assert "".join(block["text"] for block in got.json["content"]) == text
        assert got.json["usage"]["input_tokens"] == 7
    assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)
    assert "stop" not in engine.asked[-1].fields


def test_vllm_names_the_sequence_itself_and_counts_from_the_first_chunk(serve: Serve, engine: ScriptedEngine) -> None:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        await begin_stream(asked)
        for choices in ([{"index": 0, "delta": {"content": "one"}}], [LAST["choices"][0] | {"stop_reason": "END"}]):
            chunk = {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 1}}
            await write_chunk(asked, b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await write_chunk(asked, b"data: [DONE]\n\n")
        await end_stream(asked)

    engine.script = script
    body = ask(serve, engine, "vllm", stop_sequences=["END"], stream=True).body.decode()
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    assert events[0]["message"]["usage"]["input_tokens"] == 7
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    (asked,) = engine.asked
    assert asked.fields["stop"] == ["END"]
    assert asked.fields["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bash_20250124", "bash"),
        ("text_editor_20250728", "str_replace_based_edit_tool"),
        ("computer_20250124", "computer"),
        ("memory_20250818", "memory"),
    ],
)
def test_tools_that_the_caller_runs_are_offered_to_the_model(
    serve: Serve, engine: ScriptedEngine, kind: str, name: str
) -> None:
    assert ask(serve, engine, "vllm", tools=[{"type": kind, "name": name}]).status == 200
    tools: Any = engine.asked[0].fields["tools"]
    assert tools[0]["function"]["name"] == name
    assert tools[0]["function"]["parameters"]["properties"]


@pytest.mark.parametrize("kind", ["web_search_20250305", "code_execution_20250825", "web_fetch_20250910"])
def test_tools_that_run_at_anthropic_are_refused_in_words(serve: Serve, engine: ScriptedEngine, kind: str) -> None:
    got = ask(serve, engine, "vllm", tools=[{"type": kind, "name": "search"}])
    assert got.status == 400
    assert kind in got.json["error"]["message"]
    assert not engine.asked


def show(parts: Sequence[str], sequences: list[str]) -> tuple[str, str | None]:
    """What a caller sees of these parts, and what ended it."""
    watch = StopWatch(sequences)
    shown: list[Any] = []
    for chunk in [*({"choices": [{"index": 0, "delta": {"content": part}}]} for part in parts), json.loads(json.dumps(LAST))]:
        shown += [chunk] if watch.cut(chunk) else []
        if watch.matched is not None:
            break
    return "".join(one["delta"].get("content") or "" for chunk in shown for one in chunk["choices"]), watch.matched


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_however_an_answer_is_cut_it_ends_before_the_first_sequence_in_it(parts: list[str], sequences: list[str]) -> None:
    whole = "".join(parts)
    text, matched = show(parts, sequences)
    if matched is None:
        assert text == whole
        assert not any(one in whole for one in sequences)
    else:
        assert whole.startswith(text + matched)
        assert not any(one in text for one in sequences)
