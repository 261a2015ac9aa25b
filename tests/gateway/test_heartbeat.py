"""Comments that the caller of a stream gets while its model wakes."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.gateway.calling import CHAT, call, chat, eventually, open_chat
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import ScriptedEngine, too_long

from aimgpu.errors import InvalidInput
from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.heartbeat import parse_wake_heartbeat
from aimgpu.gateway.routes import Arrival, ModelCard
from aimgpu.gateway.slots import HoldingLimits

Serve = Callable[..., Served]
OFTEN = GatewaySettings(wake_heartbeat_seconds=0.05)
ANTHROPIC = CHAT | {"max_tokens": 5}
RESPONSES = {"model": "chat", "input": "hi"}
COMPLETION = {"model": "chat", "prompt": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
BY_PATH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
}
TOOLS_BY_PATH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": TOOL,
    "/v1/responses": {"type": "function", "name": "look", "parameters": SCHEMA},
    "/v1/messages": {"name": "look", "input_schema": SCHEMA},
}


@contextlib.contextmanager
def open_stream(served: Served, path: str, fields: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(fields | {"stream": True}), {"content-type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def fall_asleep(served: Served, seconds: float | None = 30.0, engine: str | None = None) -> None:
    served.routes.put("chat", "sleeping", arrival=Arrival(slots=4, seconds=seconds), card=ModelCard(engine=engine))


def read_comment(answer: http.client.HTTPResponse) -> bytes:
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    line, end = answer.readline(), answer.readline()
    assert (line[:2], end) == (b": ", b"\n")
    return line


def events_in(body: bytes) -> list[tuple[str | None, Any]]:
    """Names and data; comments left out."""
    found: list[tuple[str | None, Any]] = []
    for event in body.split(b"\n\n"):
        fields = dict(line.split(b": ", 1) for line in event.split(b"\n") if line and not line.startswith(b":"))
        if fields:
            data = fields[b"data"]
            found.append((fields.get(b"event", b"").decode() or None, data if data == b"[DONE]" else json.loads(data)))
    return found


@pytest.mark.parametrize("engine_name", [None, "llamacpp", "vllm"])
@pytest.mark.parametrize("path", BY_PATH)
def test_a_stream_gets_comments_until_its_model_is_up_and_then_its_answer(
    serve: Serve, engine: ScriptedEngine, path: str, engine_name: str | None
) -> None:
    served = serve(settings=OFTEN)
    card = ModelCard(engine=engine_name)
    served.routes.serve("chat", engine, card=card)
    plain = call(served.port, "POST", path, BY_PATH[path] | {"stream": True})
    fall_asleep(served, engine=engine_name)
    with open_stream(served, path, BY_PATH[path]) as answer:
        assert read_comment(answer) == b": waking chat, about 30 s\n"
        read_comment(answer)
        served.routes.serve("chat", engine, card=card)
        rest = answer.read()
    assert [name for name, _ in events_in(rest)] == [name for name, _ in events_in(plain.body)]
    assert b"lo" in rest
    last = served.observer.wait_for(2)[-1]
    assert (last.status, last.code) == (200, None)


def test_a_comment_has_no_time_where_none_was_measured(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve(settings=OFTEN)
    served.routes.put("chat", "sleeping", arrival=Arrival(slots=4, seconds=None), simulated=True)
    with open_stream(served, "/v1/chat/completions", CHAT) as answer:
        assert read_comment(answer) == b": waking chat\n"
        assert answer.headers["x-aimgpu-simulated"] == "true"
        served.routes.serve("chat", engine)
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_tools_that_a_template_lacks_wait_with_comments_too(serve: Serve, engine: ScriptedEngine) -> None:
    """The gateway asks llama.cpp for its template before the request goes there: it waits twice."""
    served = serve(settings=OFTEN)
    fall_asleep(served, engine="llamacpp")
    with open_stream(served, "/v1/chat/completions", CHAT | {"tools": [TOOL]}) as answer:
        read_comment(answer)
        served.routes.serve("chat", engine, card=ModelCard(engine="llamacpp"))
        last = events_in(answer.read())[-2:]
    assert last[0][1]["choices"][0]["finish_reason"]
    assert last[1][1] == b"[DONE]"


WAITING: list[tuple[str, dict[str, Any]]] = (
    [(path, {}) for path in BY_PATH]
    + [(path, {"tools": [tool]}) for path, tool in TOOLS_BY_PATH.items()]
    + [(path, {"n": 2}) for path in ("/v1/chat/completions", "/v1/completions")]
)


@pytest.mark.parametrize(("path", "fields"), WAITING)
def test_a_refusal_after_a_comment_is_an_event(serve: Serve, path: str, fields: dict[str, Any]) -> None:
    served = serve(settings=OFTEN)
    fall_asleep(served, engine="llamacpp")
    with open_stream(served, path, BY_PATH[path] | fields) as answer:
        read_comment(answer)
        served.routes.replace([])
        (event,) = events_in(answer.read())
    name, data = event
    said = data["error"]["message"]  # by when the removal is seen
    assert any(text in said for text in ("'chat' was removed", "no model 'chat'", "No model is served here yet"))
    assert (name, data.get("type")) == (("error", "error") if path == "/v1/messages" else (None, None))


@pytest.mark.parametrize("path", BY_PATH)
def test_what_an_engine_refuses_after_a_comment_is_an_event(serve: Serve, path: str) -> None:
    served = serve(settings=OFTEN)
    fall_asleep(served)
    with ScriptedEngine(script=too_long) as engine, open_stream(served, path, BY_PATH[path]) as answer:
        read_comment(answer)
        served.routes.serve("chat", engine)
        (event,) = events_in(answer.read())
    assert "too long" in event[1]["error"]["message"]
    assert event[0] == ("error" if path == "/v1/messages" else None)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages", ANTHROPIC | {"stop_sequences": ["end"]}),  # which the gateway asks an engine for as a stream
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/api/chat", CHAT),  # streams, but no events: JSON lines have no comments
    ],
)
def test_callers_without_a_stream_of_events_keep_their_status(serve: Serve, path: str, fields: dict[str, Any]) -> None:
    holding = HoldingLimits(longest_seconds=0.4)
    served = serve(settings=GatewaySettings(wake_heartbeat_seconds=0.05, holding=holding))
    fall_asleep(served, seconds=None, engine="llamacpp")
    got = call(served.port, "POST", path, fields)
    assert (got.status, got.headers["content-type"]) == (503, "application/json")
    assert "sleeping" in got.body.decode()


def test_without_a_heartbeat_a_stream_keeps_its_status(serve: Serve) -> None:
    served = serve(settings=GatewaySettings(wake_heartbeat_seconds=0, holding=HoldingLimits(longest_seconds=0.2)))
    fall_asleep(served, seconds=None)
    assert chat(served.port, stream=True).error["code"] == "model_not_ready"


def test_a_caller_who_leaves_between_two_comments_waits_no_more(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve(settings=OFTEN)
    fall_asleep(served)
    with open_chat(served.port, stream=True) as caller, caller.makefile("rb") as lines:
        while not lines.readline().startswith(b": "):
            pass
    assert eventually(lambda: served.gateway.slots.queued("chat") == 0)
    assert [record.status for record in served.observer.wait_for(1)] == [499]
    served.routes.serve("chat", engine, slots=1)
    assert chat(served.port).status == 200


def test_who_waited_in_vain_hears_what_a_wake_takes(serve: Serve) -> None:
    """This one takes longer than the last, so nobody is refused at once."""
    served = serve(settings=GatewaySettings(holding=HoldingLimits(longest_seconds=0.2)))
    late = Arrival(slots=4, seconds=33.0, since=time.monotonic() - 40)
    served.routes.put("chat", "loading", arrival=late)
    got = chat(served.port)
    assert (got.status, got.headers["retry-after"]) == (503, "33")
    got = chat(served.port, {"x-aimgpu-deadline-ms": "100"})
    assert (got.status, got.headers["retry-after"]) == (504, "33")
    served.routes.put("chat", "loading", arrival=Arrival(slots=4, seconds=None))
    got = chat(served.port, {"x-aimgpu-deadline-ms": "100"})
    assert got.status == 504
    assert "retry-after" not in got.headers, "nothing was measured"


def test_the_setting_is_a_duration_or_0() -> None:
    assert [parse_wake_heartbeat(text) for text in ("5s", "250ms", "0", "0s")] == [5.0, 0.25, 0.0, 0.0]
    with pytest.raises(InvalidInput, match=r"AIMGPU_WAKE_HEARTBEAT: .*soon"):
        parse_wake_heartbeat("soon")
