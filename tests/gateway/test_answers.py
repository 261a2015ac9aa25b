import asyncio
from collections.abc import Callable

import openai
import pytest
from tests.gateway.calling import call, chat
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import Asked, ScriptedEngine, answer_json, event, fail_inside

from aimgpu.gateway.slo_monitor import to_sample

Serve = Callable[..., Served]


def test_models_are_listed_with_owner_and_simulation(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, simulated=True)
    served.routes.put("late", "loading")
    got = call(served.port, "GET", "/v1/models")
    assert got.status == 200
    assert [(m["id"], m["owned_by"], m["simulated"], m["state"]) for m in got.json["data"]] == [
        ("chat", "aimgpu", True, "ready"),
        ("late", "aimgpu", False, "loading"),
    ]
    assert got.headers["x-aimgpu-simulated"] == "true"


def test_one_model_can_be_looked_at(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("org/with-slash", engine)
    assert call(served.port, "GET", "/v1/models/org/with-slash").json["root"] == "org/m"
    assert call(served.port, "GET", "/v1/models/other").status == 404


def test_an_answer_passes_through_and_names_its_instance(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, simulated=True)
    got = chat(served.port)
    assert got.status == 200
    assert got.json["choices"][0]["message"]["content"] == "Hello"
    assert got.headers["x-aimgpu-simulated"] == "true"
    assert got.headers["x-aimgpu-instance"] == "chat-0"
    assert "secret" not in got.headers.get("server", "")
    [record] = served.observer.wait_for(1)
    assert (record.model, record.instance_id, record.status, record.output_tokens) == ("chat", "chat-0", 200, 5)


def test_an_answer_from_a_real_device_does_not_say_simulated(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    assert "x-aimgpu-simulated" not in chat(served.port).headers


def test_a_stream_passes_through_event_by_event(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, simulated=True)
    got = chat(served.port, stream=True)
    assert got.headers["content-type"] == "text/event-stream"
    assert got.headers["x-aimgpu-simulated"] == "true"
    assert got.body.count(b"data: ") == 4
    assert got.body.endswith(b"data: [DONE]\n\n")
    [record] = served.observer.wait_for(1)
    assert record.streamed
    assert record.ttft_seconds is not None


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


FIRST = event("one")
CUTS = {
    "head and first event together": [HEAD + frame(FIRST)],
    "head alone": [HEAD, frame(FIRST)],
    "half an event with the head": [HEAD + frame(FIRST[:20]), frame(FIRST[20:])],
    "an event and a half": [HEAD + frame(FIRST + b"data: {"), frame(event("two")[7:])],
}


@pytest.mark.parametrize("ends_well", [True, False], ids=["ends", "breaks off"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_stream_is_the_same_however_it_is_cut(serve: Serve, engine: ScriptedEngine, cut: str, *, ends_well: bool) -> None:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        for part in CUTS[cut]:
            asked.writer.write(part)
            await asked.writer.drain()
            await asyncio.sleep(0.05)  # a read of its own
        if ends_well:
            asked.writer.write(frame(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await asked.writer.drain()
        else:
            asked.writer.close()

    engine.script = script
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port, stream=True)
    body = got.body
    assert got.status == 200
    assert body.startswith(FIRST)
    assert body.count(FIRST) == 1
    assert body.count(event("two")) == (cut == "an event and a half")
    assert body.endswith(b"data: [DONE]\n\n") is ends_well
    assert (b"engine_disconnected" in body) is not ends_well


def test_the_first_token_of_a_whole_answer_is_not_judged(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    chat(served.port)
    [record] = served.observer.wait_for(1)
    assert record.first_byte_seconds is not None
    sample = to_sample(record)
    assert sample is not None
    assert sample.ttft_seconds is None
    assert sample.latency_seconds is not None


def test_the_openai_package_works(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["chat"]
        whole = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "Hello"
        stream = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "hi"}], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello!"
        with pytest.raises(openai.NotFoundError, match="Known models: chat"):
            client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_the_other_endpoints_pass_through_too(serve: Serve, engine: ScriptedEngine, path: str, field: str) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    assert call(served.port, "POST", path, {"model": "chat", field: "text"}).status == 200
    assert engine.asked[0].line == f"POST {path} HTTP/1.1"


def test_an_unknown_model_is_told_the_nearest_and_the_known_ones(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    assert "Did you mean" not in chat(served.port, model="embeddings").error["message"]
    got = chat(served.port, model="Chatt")
    assert "Did you mean 'chat'? " in got.error["message"]
    assert got.status == 404
    assert got.error["code"] == "model_not_found"
    assert got.error["param"] == "model"
    assert "Known models: chat." in got.error["message"]
    assert engine.asked == []


def test_before_there_is_any_model_callers_are_to_ask_again(serve: Serve) -> None:
    got = chat(serve().port)
    assert (got.status, got.headers["retry-after"], got.error["code"]) == (503, "1", "model_not_ready")
    assert "No model is served here yet" in got.error["message"]


@pytest.mark.parametrize(("state", "reason"), [("loading", None), ("failed", "out of memory at load")])
def test_a_model_that_cannot_answer_yet_says_why_and_when_to_ask_again(serve: Serve, state: str, reason: str | None) -> None:
    served = serve()
    served.routes.put("chat", state, reason=reason, simulated=True)
    got = chat(served.port)
    assert got.status == 503
    assert int(got.headers["retry-after"]) > 0
    assert state in got.error["message"]
    assert reason is None or reason in got.error["message"]
    assert got.headers["x-aimgpu-simulated"] == "true"


def test_nothing_of_the_callers_head_reaches_the_engine(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    chat(served.port, {"authorization": "Bearer callers-own", "cookie": "a=b", "te": "trailers", "x-secret": "1"})
    headers = engine.asked[0].headers
    assert headers["authorization"] == "Bearer engine-key"
    assert set(headers) == {"host", "content-type", "authorization", "content-length"}


def test_an_engines_own_error_is_passed_on_as_a_bad_gateway(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = fail_inside
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port)
    assert got.status == 502
    assert "out of memory" in got.error["message"]


@pytest.mark.parametrize(
    ("said", "message", "code"),
    [
        (
            {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 2048}},
            "too long",
            "context_length_exceeded",
        ),
        (
            {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400},
            "too long",
            "invalid_request",
        ),
        ({"error": "too long"}, "too long", "invalid_request"),
        ({"detail": "too long"}, "too long", "invalid_request"),
        ({"detail": [{"msg": "too long"}]}, '[{"msg":"too long"}]', "invalid_request"),
        (["too long"], "The engine answered 400.", "invalid_request"),
        ({"error": {"message": "no", "code": "bad_tool"}}, "no", "bad_tool"),
    ],
    ids=["llama.cpp", "older vLLM", "Ollama", "FastAPI", "FastAPI about fields", "a list", "OpenAI"],
)
def test_what_an_engine_refuses_is_told_in_openais_shape(
    serve: Serve, engine: ScriptedEngine, said: object, message: str, code: str | None
) -> None:
    async def refuse(_: ScriptedEngine, asked: Asked) -> None:
        await answer_json(asked, said, "400 Bad Request")

    engine.script = refuse
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port)
    assert got.status == 400
    assert (got.error["message"], got.error["code"]) == (message, code)
    assert isinstance(got.error["type"], str)
    assert got.error["param"] is None
    assert got.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize("status", ["204 No Content", "205 Reset Content", "302 Found", "304 Not Modified"])
def test_a_status_that_has_no_body_does_not_reach_a_caller(
    serve: Serve, engine: ScriptedEngine, status: str, path: str
) -> None:
    """A proxy in between would take a body behind it for the next answer."""

    async def reply(_: ScriptedEngine, asked: Asked) -> None:
        asked.writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status.encode())
        await asked.writer.drain()

    engine.script = reply
    served = serve()
    served.routes.serve("chat", engine)
    messages = [{"role": "user", "content": "?"}]
    body = {"model": "chat", "messages": messages, "input": "?", "max_tokens": 5}
    assert call(served.port, "POST", path, body).status == 502


def test_connections_to_an_engine_are_used_again(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    for _ in range(5):
        assert chat(served.port).status == 200
    assert len({id(asked.writer) for asked in engine.asked}) == 1
