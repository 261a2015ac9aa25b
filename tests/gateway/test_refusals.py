import json
from collections.abc import Callable

import pytest
from tests.gateway.calling import CHAT, call, chat, open_chat, raw_exchange
from tests.gateway.conftest import Served as Running
from tests.gateway.loop_time import Served, serve_once
from tests.gateway.scripted_engine import ScriptedEngine

from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.gateway.body import BodyLimits
from aimgpu.keyfile import generate_key, hash_key

Serve = Callable[..., Running]

WRONG_BODIES: list[bytes] = [
    b"",
    b"not json",
    b"[]",
    b"null",
    b'"text"',
    b"{",
    b'{"model": "chat"}',
    b'{"model": 7, "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "", "messages": [{"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "chat", "messages": "hi"}',
    b'{"model": "chat", "messages": []}',
    b'{"model": "chat", "messages": [1]}',
    b'{"model": "chat", "messages": [{"content": "x"}]}',
    b'{"model": "chat", "messages": [{"role": "user", "content": 5}]}',
    b'{"model": "chat", "messages": [{"role": "user", "content": ["x"]}]}',
    b'{"model": "chat", "messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
    b'{"model": "chat", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"model": "chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": true}',
    b'{"model": "chat", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "chat", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
]


@pytest.mark.parametrize("body", WRONG_BODIES)
def test_a_wrong_body_is_the_callers_fault(serve: Serve, engine: ScriptedEngine, body: bytes) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    got = call(served.port, "POST", "/v1/chat/completions", body)
    assert got.status == 400
    assert got.error["type"] == "invalid_request_error"
    assert got.error["message"]
    assert engine.asked == []


MULTIPLIED = [
    {"n": 129},
    {"n": 10**9},
    {"best_of": 129},
    {"n_probs": 101},
    {"n_probs": 1e6},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": -1},
    {"logprobs": 101},
    {"top_logprobs": 101},
    {"stop": ["a"] * 65},
]
PROMPTS = [{"prompt": ["a"] * 2049}, {"prompt": [[1]] * 1025, "n": 2}]


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "ollama"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *(("/v1/chat/completions", fields) for fields in MULTIPLIED),
        *(("/v1/completions", fields) for fields in MULTIPLIED + PROMPTS),
    ],
)
def test_no_field_multiplies_an_answer_beyond_its_bound(path: str, fields: dict[str, object], engine: str) -> None:
    body = {"model": "chat", "prompt": "?", "messages": [{"role": "user", "content": "?"}], **fields}
    spent = serve_once(Served(path=path, body=json.dumps(body).encode(), engine=engine))
    assert (spent.status, spent.asked) == (400, 0)


def test_as_many_choices_and_sequences_as_may_be_are_passed_on() -> None:
    tokens = {"model": "chat", "prompt": [1] * 5000, "n": 2, "stop": ["a"] * 64}
    for fields in (tokens, {"model": "chat", "prompt": ["a"] * 1024, "n": 2}):
        body = json.dumps(fields).encode()
        assert serve_once(Served(path="/v1/completions", body=body, engine="vllm")).asked == 1


def test_a_refusal_does_not_quote_the_prompt(serve: Serve) -> None:
    served = serve()
    got = call(served.port, "POST", "/v1/chat/completions", b'{"messages": "a secret prompt" oops')
    assert b"secret" not in got.body


def test_a_body_over_the_limit_is_refused_before_it_is_read(serve: Serve) -> None:
    served = serve(settings=GatewaySettings(body=BodyLimits(max_bytes=1000)))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
    assert raw_exchange(served.port, head).startswith(b"HTTP/1.1 413")


def test_a_chunked_body_over_the_limit_is_refused(serve: Serve) -> None:
    served = serve(settings=GatewaySettings(body=BodyLimits(max_bytes=1000)))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert raw_exchange(served.port, head + b"800\r\n" + b"x" * 2048 + b"\r\n0\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_a_body_that_never_comes_times_out(serve: Serve) -> None:
    served = serve(settings=GatewaySettings(body=BodyLimits(receive_seconds=0.2)))
    caller = open_chat(served.port)  # a whole one first, to prove that the next differs only in its body
    caller.close()
    with open_chat(served.port) as slow:
        slow.recv(10_000)
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        assert slow.recv(10_000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: -5\r\n",
        b"content-length: 5x\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        b"bad header\r\n",
        b"x: a\x00b\r\n",
    ],
)
def test_smuggled_and_malformed_heads_get_a_4xx(serve: Serve, engine: ScriptedEngine, head: bytes) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    data = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n0\r\n\r\n"
    assert raw_exchange(served.port, data).startswith(b"HTTP/1.1 4")
    assert engine.asked == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions/../../x", 404),
    ],
)
def test_wrong_paths_and_methods(serve: Serve, method: str, path: str, status: int) -> None:
    served = serve()
    got = call(served.port, method, path)
    assert got.status == status
    assert got.error["code"]


def test_another_origins_page_cannot_send_without_asking_the_browser(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    hostile = {"origin": "http://evil.example", "content-type": "text/plain"}
    assert call(served.port, "POST", "/v1/chat/completions", CHAT, hostile).status == 415
    assert call(served.port, "POST", "/v1/chat/completions", CHAT, {"content-type": "text/plain"}).status == 200
    assert call(served.port, "POST", "/v1/chat/completions", CHAT, {"content-encoding": "gzip"}).status == 415


def test_keys_open_the_door_and_only_for_their_models(serve: Serve, engine: ScriptedEngine) -> None:
    key, narrow = generate_key(), generate_key()
    keys = KeyTable({hash_key(key): Caller(name="ann"), hash_key(narrow): Caller(name="bob", models=frozenset({"other"}))})
    served = serve(keys=keys)
    served.routes.serve("chat", engine)
    served.routes.serve("other", engine)
    assert chat(served.port).status == 401
    assert chat(served.port, {"authorization": "Bearer nonsense"}).status == 401
    assert chat(served.port, {"authorization": f"Basic {key}"}).status == 401
    assert chat(served.port, {"authorization": f"Bearer {key}"}).status == 200
    assert chat(served.port, {"authorization": f"Bearer {narrow}"}).status == 403
    listed = call(served.port, "GET", "/v1/models", headers={"authorization": f"Bearer {narrow}"})
    assert [model["id"] for model in listed.json["data"]] == ["other"]
    assert key not in json.dumps([asked.headers for asked in engine.asked])


def test_a_key_is_kept_as_a_hash_only() -> None:
    key = generate_key()
    keys = KeyTable({hash_key(key): Caller(name="ann")})
    kept = repr(vars(keys)).encode()
    assert key.encode() not in kept
    assert keys.find(key.encode()) == Caller(name="ann")
    assert keys.find(key.encode()[:-1]) is None
    assert keys.find(b"") is None
