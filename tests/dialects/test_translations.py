"""Dialects over scripted engines: what reaches the engine, what comes back, and how things fail."""

import hashlib
import json
from typing import Any

import pytest
from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import CHAT, call
from tests.gateway.conftest import Serve
from tests.gateway.scripted_engine import Asked, ScriptedEngine, answer_json

from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.gateway.forms import read_form
from aimgpu.gateway.routes import ModelCard

MESSAGE = {"model": "chat", "max_tokens": 10, "messages": [{"role": "user", "content": "Hello."}]}
OPEN, BOUND = "open-key-" + "x" * 32, "bound-key-" + "x" * 32


def _keys() -> KeyTable:
    callers = {OPEN: Caller(name="open"), BOUND: Caller(name="bound", models=frozenset({"chat"}))}
    return KeyTable({hashlib.sha256(key.encode()).hexdigest(): caller for key, caller in callers.items()})


def _events(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]


def test_anthropics_messages_become_a_chat_and_its_answer_a_message(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    used = {"type": "tool_use", "id": "t1", "name": "go", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "gone"}], "is_error": True}
    turns = [*MESSAGE["messages"], {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]  # type: ignore[misc]
    got = call(
        served.port, "POST", "/v1/messages", MESSAGE | {"messages": turns, "system": "Be brief.", "stop_sequences": ["z"]}
    )
    assert got.json["content"] == [{"type": "text", "text": "Hello"}]
    assert got.json["usage"] == {"input_tokens": 3, "output_tokens": 5}
    asked: Any = engine.asked[0].fields
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "assistant", "tool"]
    assert asked["messages"][2]["tool_calls"][0]["function"] == {"name": "go", "arguments": '{"x":1}'}
    assert asked["messages"][3] == {"role": "tool", "tool_call_id": "t1", "content": "Error: gone"}
    assert asked["stop"] == ["z"]


def test_anthropics_stream_opens_and_closes_its_blocks(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    events = _events(call(served.port, "POST", "/v1/messages", MESSAGE | {"stream": True}).body)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == "Hello!"


def test_an_engine_that_dies_ends_every_stream_with_an_error(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.die_mid_event
    served = serve()
    served.routes.serve("chat", engine)
    messages = _events(call(served.port, "POST", "/v1/messages", MESSAGE | {"stream": True}).body)
    assert messages[-1]["type"] == "error"
    responses = _events(call(served.port, "POST", "/v1/responses", {"model": "chat", "input": "Hello.", "stream": True}).body)
    assert responses[-1]["type"] == "response.failed"
    whole = call(served.port, "POST", "/api/chat", CHAT | {"stream": False})
    assert whole.status == 502
    assert isinstance(whole.json["error"], str)


def test_errors_have_the_shape_of_their_dialect(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve(keys=_keys())
    served.routes.serve("chat", engine)
    anthropic = call(served.port, "POST", "/v1/messages", MESSAGE, {"x-api-key": "wrong"})
    assert (anthropic.status, anthropic.json["type"], anthropic.error["type"]) == (401, "error", "authentication_error")
    ollama = call(served.port, "POST", "/api/chat", CHAT)
    assert (ollama.status, type(ollama.json["error"])) == (401, str)
    openai = call(served.port, "POST", "/v1/responses", {"model": "chat"})
    assert (openai.status, openai.error["code"]) == (401, "invalid_api_key")


def test_anthropics_key_header_is_accepted(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve(keys=_keys())
    served.routes.serve("chat", engine)
    headers = {"x-api-key": OPEN, "anthropic-version": "2023-06-01"}
    assert call(served.port, "POST", "/v1/messages", MESSAGE, headers).status == 200


def test_a_restricted_key_unloads_and_fetches_nothing(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve(keys=_keys())
    served.routes.serve("chat", engine)
    bound = {"authorization": f"Bearer {BOUND}"}
    assert call(served.port, "POST", "/api/generate", {"model": "chat", "keep_alive": 0}, bound).status == 403
    assert call(served.port, "POST", "/api/pull", {"model": "smollm2"}, bound).status == 403
    assert served.gateway.slots.wake_requests.take_sleeps() == ()
    unbound = {"authorization": f"Bearer {OPEN}"}
    assert (
        call(served.port, "POST", "/api/generate", {"model": "chat", "keep_alive": 0}, unbound).json["done_reason"] == "unload"
    )
    assert served.gateway.slots.wake_requests.take_sleeps() == ("chat",)


def test_responses_of_one_key_are_hidden_from_another(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve(keys=_keys())
    served.routes.serve("chat", engine)
    hers, his = {"authorization": f"Bearer {OPEN}"}, {"authorization": f"Bearer {BOUND}"}
    made = call(served.port, "POST", "/v1/responses", {"model": "chat", "input": "Hello."}, hers).json
    assert call(served.port, "GET", f"/v1/responses/{made['id']}", headers=hers).status == 200
    assert call(served.port, "GET", f"/v1/responses/{made['id']}", headers=his).status == 404
    going_on = {"model": "chat", "input": "More.", "previous_response_id": made["id"]}
    assert call(served.port, "POST", "/v1/responses", going_on, his).status == 404
    assert call(served.port, "POST", "/v1/responses", going_on, hers).status == 200
    asked: Any = engine.asked[-1].fields
    assert [message["content"] for message in asked["messages"]] == ["Hello.", "Hello", "More."]


def test_vllm_gets_responses_as_they_are_with_earlier_turns_written_out(serve: Serve, engine: ScriptedEngine) -> None:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
        await answer_json(
            asked, {"id": f"resp_{len(engine.asked)}", "object": "response", "output": [said], "usage": {"output_tokens": 2}}
        )

    engine.script = script
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine="vllm"))
    first = call(served.port, "POST", "/v1/responses", {"model": "chat", "input": "One."}).json
    second = call(
        served.port, "POST", "/v1/responses", {"model": "chat", "input": "Two.", "previous_response_id": first["id"]}
    ).json
    assert engine.asked[0].line.startswith("POST /v1/responses ")
    assert second["previous_response_id"] == first["id"]
    asked: Any = engine.asked[1].fields
    assert "previous_response_id" not in asked
    assert [item["role"] for item in asked["input"]] == ["user", "assistant", "user"]
    assert served.observer.wait_for(2)[1].output_tokens == 2


def test_vllms_streamed_response_is_kept_too(serve: Serve, engine: ScriptedEngine) -> None:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        await scripts.begin_stream(asked)
        for kind in ("response.created", "response.completed"):
            data: dict[str, Any] = {"type": kind, "response": {"id": "resp_1", "output": [], "previous_response_id": None}}
            await scripts.write_chunk(asked, f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode())
        await scripts.end_stream(asked)

    engine.script = script
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine="vllm"))
    events = _events(call(served.port, "POST", "/v1/responses", {"model": "chat", "input": "One.", "stream": True}).body)
    assert [event["type"] for event in events] == ["response.created", "response.completed"]
    assert call(served.port, "GET", "/v1/responses/resp_1").json["id"] == "resp_1"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": 3},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": "x", "background": True},
        {"input": "x", "conversation": "c"},
        {"input": "x", "previous_response_id": 7},
        {"input": "x", "text": {"format": {"type": "xml"}}},
    ],
)
def test_what_responses_cannot_do_is_refused(serve: Serve, engine: ScriptedEngine, fields: dict[str, Any]) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    got = call(served.port, "POST", "/v1/responses", {"model": "chat", **fields})
    assert got.status == 400
    assert got.error["message"]
    assert engine.asked == []


def test_a_form_goes_on_as_it_came(serve: Serve, engine: ScriptedEngine) -> None:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        await answer_json(asked, {"text": "hello"})

    engine.script = script
    served = serve()
    served.routes.serve("chat", engine)
    parts = [b'name="model"\r\n\r\nchat', b'name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\nRIFF\x00\xff']
    form = b"".join(b"--B\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts) + b"--B--\r\n"
    kind = {"content-type": "multipart/form-data; boundary=B"}
    got = call(served.port, "POST", "/v1/audio/transcriptions", form, kind)
    assert got.json == {"text": "hello"}
    assert engine.asked[0].body == form
    assert engine.asked[0].headers["content-type"] == kind["content-type"]
    assert read_form(b"multipart/form-data; boundary=B", form) == {"model": "chat"}
    assert call(served.port, "POST", "/v1/audio/transcriptions", {"model": "chat"}).status == 400


@pytest.mark.parametrize(("status", "path"), [("404 Not Found", "/v1/rerank"), ("501 Not Implemented", "/v1/rerank")])
def test_what_an_engine_does_not_have_is_refused_in_words(serve: Serve, engine: ScriptedEngine, status: str, path: str) -> None:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        await answer_json(asked, {"error": "no such page"}, status)

    engine.script = script
    served = serve()
    served.routes.serve("chat", engine)
    got = call(served.port, "POST", path, {"model": "chat", "query": "q", "documents": ["d"]})
    assert got.status == 400
    assert "does not offer /v1/rerank" in got.error["message"]


@pytest.mark.parametrize(
    ("engine_name", "path", "answer"),
    [
        ("llamacpp", "/v1/chat/completions/input_tokens", {"input_tokens": 7}),
        ("vllm", "/tokenize", {"count": 7, "tokens": []}),
        ("ollama", "/v1/chat/completions", {"choices": [], "usage": {"prompt_tokens": 7}}),
    ],
)
def test_tokens_are_counted_by_every_engine(
    serve: Serve, engine: ScriptedEngine, engine_name: str, path: str, answer: dict[str, Any]
) -> None:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        await answer_json(asked, answer)

    engine.script = script
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine=engine_name))
    got = call(served.port, "POST", "/v1/messages/count_tokens", {"model": "chat", "messages": MESSAGE["messages"]})
    assert got.json == {"input_tokens": 7}
    assert engine.asked[0].line.split()[1] == path


def test_ollamas_tool_results_get_the_id_of_their_call(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("go", "stay")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("stay", "go")]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}, *results]
    call(served.port, "POST", "/api/chat", {"model": "chat", "messages": turns, "stream": False})
    asked: Any = engine.asked[0].fields["messages"]
    by_name = {one["function"]["name"]: one["id"] for one in asked[1]["tool_calls"]}
    assert [message["tool_call_id"] for message in asked[2:]] == [by_name["stay"], by_name["go"]]


@pytest.mark.parametrize("path", ["/api/copy", "/api/create", "/api/push"])
def test_models_are_not_changed_over_ollamas_api(serve: Serve, engine: ScriptedEngine, path: str) -> None:
    got = call(serve().port, "POST", path, {"model": "chat"})
    assert got.status == 403
    assert "stack file" in got.json["error"]


def test_another_method_is_refused_with_those_that_are_allowed(serve: Serve, engine: ScriptedEngine) -> None:
    got = call(serve().port, "PUT", "/v1/responses/resp_1")
    assert (got.status, got.headers["allow"]) == (405, "GET, DELETE")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_transcription_is_streamed_where_its_form_asks_for_it(
    serve: Serve, engine: ScriptedEngine, *, streamed: bool
) -> None:
    engine.script = _stream_words if streamed else _answer_words
    served = serve()
    served.routes.serve("chat", engine)
    parts = [b'name="model"\r\n\r\nchat', b'name="stream"\r\n\r\n' + (b"true" if streamed else b"false")]
    form = b"".join(b"--B\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts) + b"--B--\r\n"
    got = call(served.port, "POST", "/v1/audio/transcriptions", form, {"content-type": "multipart/form-data; boundary=B"})
    assert got.status == 200
    (record,) = served.observer.wait_for(1)
    assert record.streamed is streamed


async def _answer_words(engine: ScriptedEngine, asked: Asked) -> None:
    await answer_json(asked, {"text": "one"})


async def _stream_words(engine: ScriptedEngine, asked: Asked) -> None:
    await scripts.begin_stream(asked)
    await scripts.write_chunk(asked, scripts.event("one") + b"data: [DONE]\n\n")
    await scripts.end_stream(asked)


def test_a_response_that_was_kept_can_be_deleted_once(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    identity = call(served.port, "POST", "/v1/responses", {"model": "chat", "input": "Hello."}).json["id"]
    path = f"/v1/responses/{identity}"
    assert call(served.port, "GET", path).status == 200
    assert call(served.port, "DELETE", path).json == {"id": identity, "object": "response", "deleted": True}
    assert call(served.port, "GET", path).status == 404
