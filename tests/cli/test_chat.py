"""`aimgpu chat` with addresses, keys, input and servers that are not what they should be."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from aimgpu.cli.commands.serve.chat import Conversation
from aimgpu.cli.gateway_client import GatewayClient
from aimgpu.errors import AimGpuError, InvalidInput


class CannedServer(ThreadingHTTPServer):
    """Answers every request with these bytes."""

    body = b""
    asked: list[tuple[str, Any]]


class _Handler(BaseHTTPRequestHandler):
    server: CannedServer

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append((self.path, json.loads(sent) if sent else None))
        self.send_response(200)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_POST = do_GET  # noqa: N815 - http.server names its methods so

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with CannedServer(("127.0.0.1", 0), _Handler) as found:
        found.asked = []
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "url", ["http://gpubox:99999", "http://gpubox:port", "http://[", "ftp://gpubox", "http://gpu box", "http://gpubox:0", "x\n"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="not the address of a gateway"):
        GatewayClient(url, None)


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match="API key"):
        GatewayClient("gpubox:8080", key)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"data": 1}', b'{"data": [{}]}', b"\xff"])
def test_a_server_that_is_no_gateway_is_named_as_such(server: CannedServer, body: bytes) -> None:
    server.body = body
    with pytest.raises(AimGpuError) as caught:
        GatewayClient(f"127.0.0.1:{server.server_port}", None).choose_model(None)
    assert caught.value.hint == "Is this an OpenAI endpoint?"


def test_the_path_of_an_address_is_kept(server: CannedServer) -> None:
    server.body = b'{"data": [{"id": "chat"}]}'
    assert GatewayClient(f"http://127.0.0.1:{server.server_port}/llm/v1/", None).choose_model(None) == "chat"
    assert server.asked == [("/llm/v1/models", None)]


def test_bytes_that_are_no_text_are_sent_as_text(server: CannedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.body = b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\ndata: [DONE]\n\n'
    gateway = GatewayClient(f"http://127.0.0.1:{server.server_port}", None)
    typed = b"h\xffi".decode(errors="surrogateescape")
    Conversation(gateway, "chat", system=None, max_tokens=None, as_json=False).say(typed)
    _, (_, asked) = server.asked
    assert asked["messages"] == [{"role": "user", "content": "h\N{REPLACEMENT CHARACTER}i"}]
    assert capsys.readouterr().out == "Hello\n"


def test_a_stream_of_something_else_is_an_error(server: CannedServer) -> None:
    server.body = b"data: soon\n\n"
    gateway = GatewayClient(f"http://127.0.0.1:{server.server_port}", None)
    with pytest.raises(AimGpuError, match="not a JSON object"):
        list(gateway.stream({"model": "chat"}))
