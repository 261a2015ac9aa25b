"""Each was found by attack: one caller hurting others, or learning about them, through the gateway."""

import asyncio
import json
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import CHAT, Got, call, chat, eventually, open_chat, raw_exchange
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import Asked, ScriptedEngine

from aimgpu.domain import ServiceObjective
from aimgpu.errors import InvalidInput
from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.gateway.body import BodyLimits
from aimgpu.gateway.cors import parse_origins
from aimgpu.gateway.engine_faults import StuckLimits
from aimgpu.gateway.grammar_cost import GrammarPolicy
from aimgpu.gateway.http import server as http_server
from aimgpu.keyfile import generate_key, hash_key

Serve = Callable[..., Served]
JSON_HEADERS = {"content-type": "application/json"}


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


COSTLY: dict[str, dict[str, Any]] = {
    "enum": schema({"enum": [f"value-{number}" for number in range(20_000)]}),
    "enums together": schema({"properties": {str(n): {"enum": [f"{n}-{k}" for k in range(300)]} for n in range(4)}}),
    "enum in repeated items": schema({"type": "array", "maxItems": 200, "items": {"enum": ["a", "b", "c"]}}),
    "length": schema({"type": "string", "maxLength": 100_000}),
    "nested repeats": schema({"type": "array", "maxItems": 900, "items": {"type": "array", "maxItems": 900, "items": {}}}),
    "pattern": schema({"type": "string", "pattern": "(a{1,900}){1,900}"}),
    "tool": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x"] * 4000}}}]},
    "large grammar": {"grammar": 'root ::= "a" ' + '| "b" ' * 4000},
    "small grammar": {"grammar": "root ::= (([a-z]{0,1000}){0,1000}){0,1000}"},
    "ambiguous grammar": {"grammar": 'root ::= ("a"?){300}'},
    "recursive, ambiguous grammar": {"grammar": 'root ::= "a" root x | "a" root y | "a"\nx ::= "x"\ny ::= "y"'},
    "ambiguous pattern": schema({"type": "string", "pattern": "^(a?){300}$"}),
    "vLLM regex": {"guided_regex": "(a|a)*"},
    "vLLM grammar": {"structured_outputs": {"grammar": 'root ::= ("a" | "a")*'}},
    "vLLM choice": {"guided_choice": [str(number) for number in range(5000)]},
    "vLLM structured": {"structured_outputs": {"choice": [str(number) for number in range(5000)]}},
}


@pytest.mark.parametrize("fields", COSTLY.values(), ids=COSTLY)
def test_a_schema_that_would_block_an_engine_never_reaches_it(
    serve: Serve, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port, **fields)
    assert (got.status, got.error["code"]) == (400, "invalid_request")
    assert got.error["param"] in fields
    assert not engine.asked


def test_schemas_that_people_write_pass(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 100},
            "country": {"enum": [f"C{number}" for number in range(249)]},
            "tags": {"type": "array", "maxItems": 20, "items": {"type": "string", "pattern": "^[a-z]{1,20}$"}},
        },
    }
    people = {"type": "array", "items": person}
    assert chat(served.port, **schema({"type": "object", "properties": {"people": people}})).status == 200
    assert chat(served.port, grammar='root ::= ("yes" | "no") [a-z]{0,20}').status == 200


def test_an_operator_decides_whether_grammars_are_checked_or_taken_at_all(serve: Serve, engine: ScriptedEngine) -> None:
    grammars = {"cheap": 'root ::= "yes" | "no"', "costly": 'root ::= ("a"?){300}'}
    answered: dict[GrammarPolicy, list[str]] = {}
    for policy in GrammarPolicy:
        served = serve(settings=GatewaySettings(grammars=policy))
        served.routes.serve("chat", engine)
        answered[policy] = [name for name, text in grammars.items() if chat(served.port, grammar=text).status == 200]
        assert chat(served.port, **schema({"type": "string", "pattern": "^[a-z]+$"})).status == 200
    assert answered == {GrammarPolicy.CHECKED: ["cheap"], GrammarPolicy.ANY: ["cheap", "costly"], GrammarPolicy.NONE: []}


async def never_ends(this: ScriptedEngine, asked: Asked) -> None:
    """As one that compiles a grammar: it does not notice that its caller has left, and serves nobody meanwhile."""
    this.streaming.set()
    while not this.released.is_set():  # noqa: ASYNC110 - set by another thread
        await asyncio.sleep(0.01)


def test_an_engine_that_an_abandoned_request_keeps_busy_is_replaced(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = never_ends
    served = serve(settings=GatewaySettings(stuck=StuckLimits(look_seconds=0.05, longest_seconds=0.5)))
    served.routes.serve("chat", engine)
    with open_chat(served.port):
        assert engine.streaming.wait(30)
    found: dict[str, str] = {}
    assert eventually(lambda: bool(found.update(served.gateway.slots.engine_faults.take()) or found))
    assert "no progress" in found["chat-0"]


def test_an_engine_that_goes_on_after_an_abandoned_request_is_kept(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.silent_until_gone
    served = serve(settings=GatewaySettings(stuck=StuckLimits(look_seconds=0.05, longest_seconds=60.0)))
    served.routes.serve("chat", engine)
    with open_chat(served.port):
        assert engine.streaming.wait(30)
        engine.script = scripts.polite
    assert eventually(lambda: len(engine.asked) == 2), "it is asked for a token"
    assert json.loads(engine.asked[1].body)["max_tokens"] == 1
    assert eventually(lambda: not served.gateway._proxy.stuck_engines._suspects), "its answer clears it"
    assert served.gateway.slots.engine_faults.take() == {}
    assert chat(served.port).status == 200


USAGE = {"completion_tokens": 1, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
TELLING: dict[str, object] = {
    "id": "x",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": '"cached_tokens": 8'}}],
    "usage": USAGE,
    "timings": {"prompt_n": 1, "prompt_ms": 0.1},
}


async def tell_of_the_cache(this: ScriptedEngine, asked: Asked) -> None:
    if not json.loads(asked.body).get("stream"):
        await scripts.answer_json(asked, TELLING)
        return
    await scripts.begin_stream(asked)
    await scripts.write_chunk(asked, scripts.event("Hello"))
    await scripts.write_chunk(asked, b"data: " + json.dumps({**TELLING, "choices": []}).encode() + b"\n\ndata: [DONE]\n\n")
    await scripts.end_stream(asked)


def test_what_an_engine_had_in_its_cache_is_not_shown_to_the_holders_of_keys(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = tell_of_the_cache
    key = generate_key()
    served = serve(keys=KeyTable({hash_key(key): Caller(name="ann")}))
    served.routes.serve("chat", engine)
    bearer = {"authorization": f"Bearer {key}"}
    whole = chat(served.port, bearer).json
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert whole["usage"]["prompt_tokens"] == 9
    assert "timings" not in whole
    assert whole["choices"][0]["message"]["content"] == '"cached_tokens": 8', "what the model said is left alone"
    streamed = chat(served.port, bearer, stream=True).body
    assert b"Hello" in streamed
    assert b'"timings"' not in streamed
    assert b'"cached_tokens":0' in streamed
    [*_, record] = served.observer.wait_for(2)
    assert record.output_tokens == 1


def test_without_keys_there_is_nobody_to_hide_it_from(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = tell_of_the_cache
    served = serve()
    served.routes.serve("chat", engine)
    assert chat(served.port).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


@pytest.mark.parametrize("field", ["cache_salt", "cache_prompt"])
def test_prefix_caches_can_be_kept_apart_by_key(serve: Serve, engine: ScriptedEngine, field: str) -> None:
    ann, bob = generate_key(), generate_key()
    keys = KeyTable({hash_key(ann): Caller(name="ann"), hash_key(bob): Caller(name="bob")})
    served = serve(keys=keys, settings=GatewaySettings(separate_caches=True))
    served.routes.serve("chat", engine, cache_field=field)
    for key in (ann, ann, bob):
        assert (
            chat(served.port, {"authorization": f"Bearer {key}"}, cache_salt="ann's, guessed", cache_prompt=True).status == 200
        )
    first, second, third = (asked.fields[field] for asked in engine.asked)
    if field == "cache_prompt":
        assert (first, second, third) == (False, False, False)
    else:
        assert first == second != third
        assert "guessed" not in {first, third}


def send_part_of_a_body(port: int, key: str, size: int = 15 << 20, sent: int = 1 << 20) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {size}\r\n\r\n"
    caller.sendall(head.encode() + b"x" * sent)
    return caller


def test_a_keys_limit_counts_before_its_bodies_are_read(serve: Serve, engine: ScriptedEngine) -> None:
    key = generate_key()
    served = serve(keys=KeyTable({hash_key(key): Caller(name="ann", concurrency=1)}))
    served.routes.serve("chat", engine)
    with send_part_of_a_body(served.port, key) as first:
        assert eventually(lambda: chat(served.port, {"authorization": f"Bearer {key}"}).status == 429)
        first.close()
    assert eventually(lambda: chat(served.port, {"authorization": f"Bearer {key}"}).status == 200)


def test_the_bytes_of_all_bodies_together_are_bounded(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve(settings=GatewaySettings(body=BodyLimits(max_held_bytes=3 << 20)))
    served.routes.serve("chat", engine)
    held: list[socket.socket] = []
    big = CHAT | {"user": "y" * (1 << 20)}

    def big_is_refused() -> bool:
        """Whichever body comes last finds no room; a part that was refused because a big one was faster is sent again."""
        for refused in select.select(held, [], [], 0)[0]:
            held.remove(refused)
            refused.close()
        held.extend(send_part_of_a_body(served.port, "", sent=(1 << 20) - 4096) for _ in range(3 - len(held)))
        return call(served.port, "POST", "/v1/chat/completions", big).status == 503

    try:
        assert eventually(big_is_refused)
        assert chat(served.port).status == 200, "small ones find room"
    finally:
        for caller in held:
            caller.close()
    assert eventually(lambda: call(served.port, "POST", "/v1/chat/completions", big).status == 200)


def test_a_head_that_trickles_in_is_cut_off_however_often_a_byte_comes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(http_server, "_TICK_SECONDS", 0.05)
    served = serve()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(b"GET /v1/models HTTP/1.1\r\n")
        caller.settimeout(0.02)
        deadline = time.monotonic() + 60
        received = b""
        while not received and time.monotonic() < deadline:
            caller.sendall(b"x: y\r\n")
            try:
                received = caller.recv(65536)
            except TimeoutError:
                continue
    assert received.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_an_engine_that_refuses_our_key_is_replaced_and_no_caller_sees_that(
    serve: Serve, engine: ScriptedEngine, status: str
) -> None:
    async def refuse(this: ScriptedEngine, asked: Asked) -> None:
        await scripts.answer_json(asked, {"error": {"message": "Invalid API Key"}}, status)

    engine.script = refuse
    served = serve()
    served.routes.serve("chat", engine)
    with ScriptedEngine() as replacement, ThreadPoolExecutor(2) as pool:
        held = [pool.submit(chat, served.port) for _ in range(2)]
        assert eventually(lambda: served.gateway.slots.queued("chat") == 2), "callers wait for the replacement"
        assert "key" in served.gateway.slots.engine_faults.take()["chat-0"]
        served.routes.serve("chat", replacement, instance="chat-new")
        assert [call.result().status for call in held] == [200, 200]
    assert len(engine.asked) <= 2


PARSE_ERRORS = [
    "failed to parse grammar",
    "[json.exception.type_error.302] type must be string, but is array",
    "Failed to initialize samplers: failed to parse grammar",
    "Unable to parse the tool schema",
    "Unsupported JSON schema: $dynamicRef",
]


@pytest.mark.parametrize("message", PARSE_ERRORS)
def test_a_bad_request_that_an_engine_answers_with_500_is_the_callers(
    serve: Serve, engine: ScriptedEngine, message: str
) -> None:
    async def fail(this: ScriptedEngine, asked: Asked) -> None:
        await scripts.answer_json(asked, {"error": {"message": message, "code": 500}}, "500 Internal Server Error")

    engine.script = fail
    served = serve()
    served.routes.serve("chat", engine, objective=ServiceObjective(availability_ppm=995_000))
    answers = [chat(served.port) for _ in range(12)]
    assert {(got.status, got.error["code"]) for got in answers} == {(400, "invalid_request")}
    served.observer.wait_for(12)
    [target] = served.in_loop(served.gateway.slo_monitor.report)["models"]["chat"]["targets"]
    assert target["attainment"] is None, "no promise is judged by it"


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n"], ids=["none", "two"])
def test_a_request_needs_one_host(serve: Serve, hosts: bytes) -> None:
    answer = raw_exchange(serve().port, b"GET /v1/models HTTP/1.1\r\n" + hosts + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"Host header" in answer


def test_a_request_without_a_host_is_fine_in_http_1_0(serve: Serve) -> None:
    assert b"200 OK" in raw_exchange(serve().port, b"GET /v1/models HTTP/1.0\r\n\r\n")


def test_every_answer_has_an_id_and_the_callers_own_is_kept_where_it_is_harmless(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    answers = [
        chat(served.port),
        chat(served.port, stream=True),
        chat(served.port, model="unknown"),
        call(served.port, "GET", "/v1/models"),
        call(served.port, "GET", "/nowhere"),
        call(served.port, "GET", "/health"),
    ]
    ids = [got.headers["x-request-id"] for got in answers]
    assert len(set(ids)) == len(ids)
    assert chat(served.port, {"x-request-id": "trace-17"}).headers["x-request-id"] == "trace-17"
    assert chat(served.port, {"x-request-id": "a b\t<c>"}).headers["x-request-id"].startswith("req-")
    assert b"x-request-id: req-" in raw_exchange(served.port, b"nonsense\r\n\r\n")


def test_a_failure_is_logged_with_the_id_that_its_caller_got_and_without_its_text(
    serve: Serve, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = scripts.fail_inside
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port)
    assert got.status == 502
    assert eventually(lambda: any(record.message == "request.failed" for record in caplog.records))
    [record] = [record for record in caplog.records if record.message == "request.failed"]
    data = record.__dict__["data"]
    assert (data["request_id"], data["model"], data["status"]) == (got.headers["x-request-id"], "chat", 502)
    assert "a secret prompt" not in str(data)


IMPOSSIBLE = {"max_tokens": 0, "max_completion_tokens": -1, "temperature": -5, "top_p": 1.5, "n": 0, "presence_penalty": 9}


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE.items())
def test_numbers_that_mean_nothing_are_refused(serve: Serve, engine: ScriptedEngine, name: str, value: float) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    got = call(served.port, "POST", "/v1/chat/completions", CHAT | {name: value})
    assert (got.status, got.error["param"], got.error["code"]) == (400, name, "invalid_request")
    assert not engine.asked


def preflight(served: Served, origin: str) -> Got:
    headers = {"origin": origin, "access-control-request-method": "POST"}
    return call(served.port, "OPTIONS", "/v1/chat/completions", headers=headers)


def test_web_pages_of_other_origins_may_call_only_when_they_are_listed(serve: Serve, engine: ScriptedEngine) -> None:
    closed = serve()
    assert "access-control-allow-origin" not in preflight(closed, "https://chat.example.org").headers
    served = serve(settings=GatewaySettings(origins=parse_origins("https://chat.example.org, http://localhost:3000/")))
    served.routes.serve("chat", engine)
    assert preflight(served, "https://chat.example.org").headers["access-control-allow-origin"] == "https://chat.example.org"
    assert preflight(served, "http://localhost:3000").status == 204
    assert "access-control-allow-origin" not in preflight(served, "https://evil.example.org").headers
    got = chat(served.port, {"origin": "https://chat.example.org"})
    assert (got.status, got.headers["access-control-allow-origin"]) == (200, "https://chat.example.org")
    assert got.headers["vary"] == "origin"
    assert "access-control-allow-origin" not in chat(served.port, {"origin": "https://evil.example.org"}).headers


@pytest.mark.parametrize("text", ["*", "chat.example.org", "https://a/b", "https://"])
def test_an_origin_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not an origin"):
        parse_origins(text)


def test_health_and_readiness_need_no_key(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve(keys=KeyTable({hash_key(generate_key()): Caller(name="ann")}))
    assert [call(served.port, "GET", path).status for path in ("/health", "/healthz", "/readyz")] == [200, 200, 503]
    served.routes.serve("chat", engine)
    assert call(served.port, "GET", "/readyz").status == 200
    assert call(served.port, "GET", "/openapi.json").status == 401


def test_a_page_shows_the_api_with_no_script_but_its_own(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    page = call(served.port, "GET", "/docs")
    assert page.status == 200
    assert b"/openapi.json" in page.body
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert b"src=" not in page.body
    assert "/v1/chat/completions" in call(served.port, "GET", "/openapi.json").json["paths"]
