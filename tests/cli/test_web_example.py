"""The web example answers in words whatever its gateway does."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "web_chat" / "server.py"


class Gateway(http.server.BaseHTTPRequestHandler):
    """Lists one model."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "chat"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""


@contextmanager
def running(gateway_port: int) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--port", "0"],
        env={**os.environ, "AIMGPU_URL": f"http://127.0.0.1:{gateway_port}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close() if process.stdout else None


def read(url: str, body: bytes | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_without_its_gateway_the_page_gets_an_answer_in_words() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with running(port) as url:
            for path, body in (("/v1/models", None), ("/v1/chat/completions", b"{}")):
                status, answer = read(url + path, body)
                assert status == 502
                assert f"http://127.0.0.1:{port} does not answer" in answer["error"]["message"]
            status, answer = read(url + "/health")
            assert (status, answer["status"]) == (503, "gateway unreachable")


def test_health_lists_the_models() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with running(server.server_address[1]) as url:
            assert read(url + "/health")[1]["models"] == ["chat"]
            assert read(url + "/v1/models") == (200, {"data": [{"id": "chat"}]})
    finally:
        server.shutdown()
        server.server_close()


def test_an_empty_question_is_refused_and_no_model_answers_it() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with running(closed.getsockname()[1]) as url:
            body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "  "}]}).encode()
            assert read(url + "/v1/chat/completions", body) == (400, {"error": {"message": "the last message is empty"}})
