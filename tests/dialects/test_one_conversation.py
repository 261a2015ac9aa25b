"""One conversation written in each dialect reaches the engine as the same chat."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects.conversations import ARGUMENTS, Cutter, Said, ToolCall, to_stream, to_whole
from tests.examples import examples
from tests.gateway.memory import MemoryEngine, make_world, run

from aimgpu.gateway.routes import ModelCard

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
SCHEMAS = st.dictionaries(TEXTS, st.sampled_from([{"type": "string"}, {"type": "integer"}]), max_size=2)


@dataclass(frozen=True)
class Turn:
    """What a user said, what was answered, and what the tools that were called returned."""

    asked: str
    answered: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Conversation:
    system: str
    turns: tuple[Turn, ...]
    last: str
    tools: tuple[tuple[str, str, dict[str, Any]], ...]  # name, description, parameters


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    turns = []
    for number in range(draw(st.integers(0, 3))):
        given_calls = draw(st.lists(ARGUMENTS, max_size=2))
        calls = tuple(ToolCall(f"call_{number}_{at}", f"tool_{at}", one) for at, one in enumerate(given_calls))
        text = draw(TEXTS if not calls else st.just("") | TEXTS)
        turns.append(Turn(draw(TEXTS), text, calls, tuple(draw(TEXTS) for _ in calls)))
    tools = tuple(
        (f"tool_{at}", draw(TEXTS), {"type": "object", "properties": draw(SCHEMAS)}) for at in range(draw(st.integers(0, 2)))
    )
    return Conversation(draw(st.just("") | TEXTS), tuple(turns), draw(TEXTS), tools)


def to_openai(one: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": one.system}] if one.system else []
    for turn in one.turns:
        calls = [
            {"id": call.identity, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for call in turn.calls
        ]
        answered = {"role": "assistant", "content": turn.answered} | ({"tool_calls": calls} if calls else {})
        messages += [{"role": "user", "content": turn.asked}, answered]
        messages += [
            {"role": "tool", "tool_call_id": call.identity, "content": result}
            for call, result in zip(turn.calls, turn.results, strict=True)
        ]
    messages.append({"role": "user", "content": one.last})
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        for name, text, schema in one.tools
    ]
    return {"messages": messages} | ({"tools": tools} if tools else {})


def to_anthropic(one: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for turn in one.turns:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.answered}] if turn.answered else []
        blocks += [{"type": "tool_use", "id": call.identity, "name": call.name, "input": call.arguments} for call in turn.calls]
        results = [
            {"type": "tool_result", "tool_use_id": call.identity, "content": [{"type": "text", "text": result}]}
            for call, result in zip(turn.calls, turn.results, strict=True)
        ]
        messages += [{"role": "user", "content": turn.asked}, {"role": "assistant", "content": blocks}]
        messages += [{"role": "user", "content": results}] if results else []
    messages.append({"role": "user", "content": [{"type": "text", "text": one.last}]})
    tools = [{"name": name, "description": text, "input_schema": schema} for name, text, schema in one.tools]
    return {"messages": messages, "system": one.system, "max_tokens": 50} | ({"tools": tools} if tools else {})


def to_responses(one: Conversation) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for turn in one.turns:
        items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": turn.asked}]})
        if turn.answered:
            items.append({"role": "assistant", "content": [{"type": "output_text", "text": turn.answered, "annotations": []}]})
        for call in turn.calls:
            given_call = {"call_id": call.identity, "name": call.name, "arguments": json.dumps(call.arguments)}
            items.append({"type": "function_call", **given_call})
        for call, result in zip(turn.calls, turn.results, strict=True):
            items.append({"type": "function_call_output", "call_id": call.identity, "output": result})
    items.append({"role": "user", "content": one.last})
    tools = [{"type": "function", "name": name, "description": text, "parameters": schema} for name, text, schema in one.tools]
    return {"input": items, "instructions": one.system, "max_output_tokens": 50} | ({"tools": tools} if tools else {})


def to_ollama(one: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": one.system}] if one.system else []
    for turn in one.turns:
        calls = [{"id": call.identity, "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls]
        messages += [
            {"role": "user", "content": turn.asked},
            {"role": "assistant", "content": turn.answered, "tool_calls": calls},
        ]
        messages += [
            {"role": "tool", "tool_name": call.name, "content": result}
            for call, result in zip(turn.calls, turn.results, strict=True)
        ]
    messages.append({"role": "user", "content": one.last})
    tools = to_openai(one).get("tools")
    return {"messages": messages, "options": {"num_predict": 50}} | ({"tools": tools} if tools else {})


WRITERS = {
    "/v1/chat/completions": to_openai,
    "/v1/messages": to_anthropic,
    "/v1/responses": to_responses,
    "/api/chat": to_ollama,
}


def plain(messages: list[dict[str, Any]]) -> list[Any]:
    """Without what may be written in several ways: the spelling of JSON, an empty list of calls."""
    found = []
    for message in messages:
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        found.append((message["role"], message["content"], calls, message.get("tool_call_id")))
    return found


def engine_gets(path: str, fields: dict[str, Any], *, engine: str = "vllm") -> Any:
    async def main() -> Any:
        world = make_world(MemoryEngine(_answer), card=ModelCard(engine=engine))
        answer = await world.ask(path, {"model": "chat", **fields})
        assert answer.status == 200, answer.body
        return world.engine.asked[-1][1]

    return run(main())


def _answer(path: str, fields: Any) -> list[bytes]:
    if path == "/apply-template":
        return to_whole(Said(text="aimgpu_probe"))
    said = Said(text="Hello")
    return to_stream(said, Cutter([2])) if fields.get("stream") else to_whole(said)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
def test_a_conversation_reaches_the_engine_as_the_chat_that_it_is(path: str) -> None:
    @settings(max_examples=examples(15))
    @given(conversations())
    def check(one: Conversation) -> None:
        expected = to_openai(one)
        asked = engine_gets(path, WRITERS[path](one), engine="llamacpp")
        assert plain(asked["messages"]) == plain(expected["messages"])
        assert asked.get("tools") == expected.get("tools")
        assert asked["max_tokens"] == 50
        assert asked["model"] == "chat"

    check()


@settings(max_examples=examples(10))
@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_a_conversation_that_the_gateway_keeps_reads_like_one_that_is_sent_whole(asked: list[str]) -> None:
    async def main() -> tuple[Any, Any]:
        world = make_world(MemoryEngine(lambda _path, _body: to_whole(Said(text="Hello"))))
        previous: str | None = None
        for text in asked:
            answer = await world.ask("/v1/responses", {"model": "chat", "input": text, "previous_response_id": previous})
            previous = answer.json["id"]
        kept = world.engine.asked[-1][1]["messages"]
        items: list[Any] = []
        for text in asked[:-1]:
            items += [{"role": "user", "content": text}, {"role": "assistant", "content": "Hello"}]
        await world.ask("/v1/responses", {"model": "chat", "input": [*items, {"role": "user", "content": asked[-1]}]})
        return plain(kept), plain(world.engine.asked[-1][1]["messages"])

    kept, sent = run(main())
    assert kept == sent


SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/messages", {"temperature": 0.5, "top_p": 0.9, "top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
    (
        "/v1/messages",
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    (
        "/v1/responses",
        {"temperature": 0.5, "top_p": 0.9, "seed": 3, "user": "me"},
        {"temperature": 0.5, "seed": 3, "user": "me"},
    ),
    ("/v1/responses", {"top_logprobs": 4}, {"logprobs": True, "top_logprobs": 4}),
    ("/v1/responses", {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ("/api/chat", {"options": {"temperature": 0.5, "seed": 3, "stop": ["x"]}}, {"temperature": 0.5, "seed": 3, "stop": ["x"]}),
    ("/api/chat", {"options": {"repeat_penalty": 1.1}}, {"repeat_penalty": 1.1, "repetition_penalty": 1.1}),
    ("/api/chat", {"format": "json"}, {"response_format": {"type": "json_object"}}),
    ("/api/chat", {"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ("/api/chat", {"think": "high"}, {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True}}),
    ("/api/chat", {"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
]
ENOUGH: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5},
    "/v1/responses": {"input": "?"},
    "/api/chat": {"messages": [{"role": "user", "content": "?"}]},
    "/api/generate": {"prompt": "?"},
}


@pytest.mark.parametrize(("path", "given_fields", "expected"), SAME)
def test_settings_have_the_engines_names(path: str, given_fields: dict[str, Any], expected: dict[str, Any]) -> None:
    asked = engine_gets(path, ENOUGH[path] | given_fields, engine="llamacpp")
    assert {name: asked.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": {"type": "object"}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}}),
        ("/api/chat", {"format": {"type": "object"}}),
        ("/api/generate", {"format": {"type": "object"}}),
    ],
)
def test_a_schema_is_found_wherever_a_dialect_has_it(path: str, fields: dict[str, Any]) -> None:
    asked = engine_gets(path, ENOUGH[path] | fields, engine="llamacpp")
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}


PICTURE = "iVBORw0KGgo="
PICTURES: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"messages": [{"role": "user", "content": "What is it?", "images": [PICTURE]}]}),
    ("/api/generate", {"prompt": "What is it?", "images": [PICTURE]}),
    (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is it?"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
                    ],
                }
            ],
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "What is it?"},
                        {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"},
                    ],
                }
            ]
        },
    ),
]


@pytest.mark.parametrize(("path", "fields"), PICTURES)
def test_a_picture_reaches_the_engine_in_openais_form(path: str, fields: dict[str, Any]) -> None:
    [message] = engine_gets(path, fields, engine="llamacpp")["messages"]
    assert message["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
    ]
