"""Whatever a caller sends in a dialect, it gets an answer or a refusal in that dialect, and the gateway goes on."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.gateway.calling import call
from tests.gateway.conftest import Serve
from tests.gateway.scripted_engine import Asked, ScriptedEngine, answer_json, begin_stream, end_stream, write_chunk

from aimgpu.gateway.dialects.table import BEYOND_ENGINES, OPERATIONS
from aimgpu.gateway.routes import ModelCard

POSTS = sorted(
    {
        one.path
        for one in (*OPERATIONS, *(one for one, _ in BEYOND_ENGINES.values()))
        if one.method == "POST" and one.path != "/api/pull"
    }
)
WORDS = ["user", "assistant", "system", "tool", "auto", "required", "any", "function", "text", "message", "chat", "json_schema"]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 200), st.floats(-2, 2), st.text(max_size=4), st.sampled_from(WORDS)
)
KEYS = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "name",
        "function",
        "arguments",
        "id",
        "tool_calls",
        "tool_call_id",
        "source",
        "format",
        "schema",
        "input",
        "output",
        "call_id",
        "parameters",
        "input_schema",
        "image_url",
        "url",
        "images",
        "tool_use_id",
        "num_predict",
        "$ref",
    ]
)
VALUES = st.recursive(SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)))
FIELDS = st.sampled_from(
    [
        "messages",
        "input",
        "prompt",
        "system",
        "tools",
        "tool_choice",
        "stream",
        "options",
        "format",
        "max_tokens",
        "n",
        "keep_alive",
        "previous_response_id",
        "instructions",
        "text",
        "reasoning",
        "thinking",
        "query",
        "documents",
        "tokens",
        "think",
        "name",
        "raw",
    ]
)
BODIES = st.dictionaries(FIELDS, VALUES, max_size=5)


ANSWER_KEYS = st.sampled_from(
    ["choices", "usage", "message", "delta", "content", "tool_calls", "data", "tokens", "embedding", "error", "index"]
)
ANSWERS = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ANSWER_KEYS, inner, max_size=4))
)
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}], "n": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "?"}]}),
    ("/v1/responses", {"input": "?"}),
    ("/v1/tokenize", {"prompt": "?"}),
    ("/v1/detokenize", {"tokens": [1]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "?"}], "stream": False}),
    ("/api/generate", {"prompt": "?"}),
    ("/api/embed", {"input": "?"}),
]


@pytest.mark.parametrize(("path", "fields"), ASKS)
@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_an_engine_that_answers_nonsense_is_reported_as_such(
    serve: Serve, engine: ScriptedEngine, path: str, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine="llamacpp"))

    @settings(max_examples=examples(20))
    @given(ANSWERS)
    def send(answer: Any) -> None:
        async def script(engine: ScriptedEngine, asked: Asked) -> None:
            if asked.fields.get("stream"):
                await begin_stream(asked)
                await write_chunk(asked, b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")
                await end_stream(asked)
            else:
                await answer_json(asked, answer)

        engine.script = script
        got = call(served.port, "POST", path, {"model": "chat", **fields, **more})
        assert got.status in {200, 400, 502}, (got.status, got.body)
        assert got.body

    send()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("engine_name", ["llamacpp", "vllm", "ollama"])
def test_any_body_is_answered_or_refused(serve: Serve, engine: ScriptedEngine, path: str, engine_name: str) -> None:
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine=engine_name, context_tokens=100))

    @settings(max_examples=examples(25))
    @given(BODIES)
    def send(body: dict[str, Any]) -> None:
        got = call(served.port, "POST", path.replace("{id}", "x"), {"model": "chat", **body})
        assert got.status < 500 or got.status == 502, (got.status, got.body)
        assert got.body

    send()
    assert call(served.port, "GET", "/v1/models").status == 200
