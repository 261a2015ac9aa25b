"""The HTTP side towards callers: what uvicorn's own protocol would let pass."""

import http.client
import json
import socket
from collections.abc import Callable

import pytest
from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import CHAT, call, eventually, raw_exchange
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import ScriptedEngine

Serve = Callable[..., Served]
BODY = json.dumps(CHAT).encode()
ASK = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


def read_answer(connection: socket.socket) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer


def test_a_head_without_end_is_refused(serve: Serve) -> None:
    served = serve()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 70_000)
        answer = read_answer(caller)
        assert answer.status == 431
        assert json.loads(answer.read())["error"]["code"] == "head_too_large"


def test_too_many_headers_are_refused(serve: Serve) -> None:
    served = serve()
    data = b"GET /v1/models HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % index for index in range(200)) + b"\r\n"
    answer = raw_exchange(served.port, data)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"more than 100 headers" in answer


@pytest.mark.parametrize(
    "head",
    [b"GET /v1/models HTTP/1.1\r\nx: %b\r\n\r\n" % (b"y" * 70_000), b"GET /%b HTTP/1.1\r\n\r\n" % (b"y" * 70_000)],
    ids=["header", "path"],
)
def test_a_head_that_comes_whole_is_bounded_too(serve: Serve, head: bytes) -> None:
    answer = raw_exchange(serve().port, head)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"head_too_large" in answer


def test_a_large_body_that_comes_with_its_head_is_no_large_head(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    body = json.dumps(CHAT | {"user": "y" * 100_000}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert b"HTTP/1.1 200 OK" in raw_exchange(served.port, head + body)


@pytest.mark.parametrize("framed", [b"chunked\r\n\r\nZZ\r\n\r\n", b"xchunked\r\n\r\n0\r\n\r\n"], ids=["chunk", "coding"])
def test_a_body_whose_frame_is_broken_is_answered(serve: Serve, framed: bytes) -> None:
    answer = raw_exchange(serve().port, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: " + framed)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 4") == 1


def test_nonsense_behind_a_request_is_not_its_answer(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.silent_until_gone
    served = serve()
    served.routes.serve("chat", engine)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(ASK)
        assert engine.streaming.wait(60)
        caller.sendall(b"\x00\x01nonsense\r\n\r\n")
        assert caller.recv(65536) == b""
    assert engine.saw_leave.wait(60)


def test_a_head_that_does_not_come_is_not_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimgpu.gateway.http.server.HEAD_SECONDS", 0.3)
    monkeypatch.setattr("aimgpu.gateway.http.server._TICK_SECONDS", 0.1)
    served = serve()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(b"GET /v1/models HTT")
        assert read_answer(caller).status == 408


def test_a_kept_connection_that_nobody_uses_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimgpu.gateway.http.server._TICK_SECONDS", 0.1)
    served = serve()
    served.server.config.timeout_keep_alive = 0
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_answer(caller).read()
        assert caller.recv(10) == b""


def test_requests_on_one_connection_are_answered_in_order(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(ASK + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + ASK)
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 3 or not received.endswith(b"}"):
            received += caller.recv(65536)
    first, second, third = received.split(b"HTTP/1.1 200 OK")[1:]
    assert b"chat.completion" in first
    assert b'"object":"list"' in second
    assert b"chat.completion" in third


def test_a_refusal_reaches_a_caller_who_is_still_sending(serve: Serve) -> None:
    served = serve()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        for _ in range(50):
            caller.sendall(b"x" * 100_000)
        assert read_answer(caller).status == 413


def test_a_caller_who_asks_leave_to_send_gets_it(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    head, body = ASK.split(b"\r\n\r\n", 1)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert caller.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        caller.sendall(body)
        assert read_answer(caller).status == 200


def test_old_http_gets_a_stream_that_ends_with_the_connection(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    body = json.dumps(CHAT | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        received = b""
        while part := caller.recv(65536):
            received += part
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert rest.startswith(b"data: ")
    assert rest.endswith(b"data: [DONE]\n\n")


def test_a_body_that_comes_in_pieces_is_put_together(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    big = json.dumps(CHAT | {"user": "u" * 500_000}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(big))
        for start in range(0, len(big), 10_000):
            caller.sendall(big[start : start + 10_000])
        assert read_answer(caller).status == 200
    assert engine.asked[0].body == big


def test_the_head_does_not_wait_for_a_slow_first_event(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.stream_until_gone
    served = serve()
    served.routes.serve("chat", engine)
    body = json.dumps(CHAT | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = read_answer(caller)
        assert answer.status == 200
        assert b"first" in answer.readline()
        answer.close()
    assert eventually(engine.saw_leave.is_set)


def test_a_caller_who_sends_no_more_still_gets_its_answer(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    served = serve()
    served.routes.serve("chat", engine)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(ASK)
        caller.shutdown(socket.SHUT_WR)
        assert eventually(lambda: engine.active == 1)
        assert caller.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # are you there?
        engine.released.set()
        answer = read_answer(caller)
        assert answer.status == 200
        assert b"chat.completion" in answer.read()
        assert caller.recv(10) == b""  # nothing more can come, so the connection ends


def test_a_caller_who_is_gone_before_its_answer_is_found_out(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.silent_until_gone
    served = serve()
    served.routes.serve("chat", engine)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(ASK)
        assert engine.streaming.wait(30)
    assert engine.saw_leave.wait(30)
    assert served.observer.wait_for(1)[0].status == 499


def test_a_wish_for_another_protocol_is_ignored(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    head, body = ASK.split(b"\r\n\r\n", 1)
    wish = b"\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as caller:
        caller.sendall(head + wish + body[:10])
        caller.sendall(body[10:])
        answer = read_answer(caller)
        assert answer.status == 200
        answer.read()
        caller.sendall(ASK)  # the connection goes on as it was
        assert read_answer(caller).status == 200
    assert [asked.body for asked in engine.asked] == [BODY, BODY]


def test_nobody_tunnels_through_this_server(serve: Serve) -> None:
    served = serve()
    data = b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n\r\n"
    assert raw_exchange(served.port, data).startswith(b"HTTP/1.1 405")


def test_head_is_answered_where_get_is_without_a_body(serve: Serve) -> None:
    served = serve()
    served.routes.put("chat", "ready")
    got, asked = (call(served.port, method, "/v1/models") for method in ("GET", "HEAD"))
    assert (asked.status, asked.body) == (200, b"")
    assert asked.headers["content-length"] == str(len(got.body))
    for method, path, allowed in (("POST", "/v1/models", "GET, HEAD"), ("GET", "/v1/chat/completions", "POST")):
        refused = call(served.port, method, path)
        assert (refused.status, refused.headers["allow"]) == (405, allowed)
