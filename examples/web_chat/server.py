"""A web chat to copy: serves one page and passes its questions to the gateway, so that the API key stays on this side.

python examples/web_chat/server.py            # then open http://127.0.0.1:8000
AIMGPU_URL=http://gpubox:8080 AIMGPU_API_KEY=... python examples/web_chat/server.py --port 9000

`GET /health` reports whether the gateway answers and which models it has. Where it does not answer, requests get a 502 that
names it.
"""

import argparse
import json
import os
import signal
import sys
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

GATEWAY = urlsplit(os.environ.get("AIMGPU_URL", "http://127.0.0.1:8080"))
KEY = os.environ.get("AIMGPU_API_KEY")
PAGE = (Path(__file__).parent / "page.html").read_bytes()
PASSED_ON = {"/v1/models", "/v1/chat/completions"}
LARGEST_QUESTION = 1 << 20
SECONDS_TO_ANSWER = 300  # a model that sleeps is loaded first


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/":
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.send_header("content-length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)
        elif self.path == "/health":
            self._report_health()
        else:
            self._pass_on(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        if length > LARGEST_QUESTION or self.headers.get("content-type") != "application/json":
            self.send_error(400)
            return
        body = self.rfile.read(length)
        if self.path == "/v1/chat/completions" and not has_question(body):
            self._send_json(400, {"error": {"message": "the last message is empty"}})
        else:
            self._pass_on(body)

    def _pass_on(self, body: bytes | None) -> None:
        if self.path not in PASSED_ON:
            self.send_error(404)
            return
        gateway = connect(SECONDS_TO_ANSWER)
        try:
            gateway.request(self.command, self.path, body, request_headers())
            answer = gateway.getresponse()
        except (OSError, HTTPException) as error:
            gateway.close()
            self._send_json(502, {"error": {"message": f"the gateway at {GATEWAY.geturl()} does not answer: {error}"}})
            return
        try:
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers.get("content-type", "application/json"))
            self.end_headers()
            while part := answer.read1():
                self.wfile.write(part)
        except (OSError, HTTPException):
            self.close_connection = True  # one of the two went away: closing tells the other
        finally:
            gateway.close()

    def _report_health(self) -> None:
        """200 while the gateway answers, 503 while it does not."""
        try:
            models = list_models()
        except (OSError, HTTPException, ValueError) as error:
            self._send_json(503, {"status": "gateway unreachable", "gateway": GATEWAY.geturl(), "reason": str(error)})
            return
        self._send_json(200, {"status": "ok", "gateway": GATEWAY.geturl(), "models": models})

    def _send_json(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is http.server's
        """Log nothing: questions are private."""


def has_question(body: bytes) -> bool:
    """Whether the last message has a text. What cannot be read is for the gateway to refuse."""
    try:
        content = json.loads(body)["messages"][-1]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return True
    return not isinstance(content, str) or bool(content.strip())


def connect(seconds: float) -> HTTPConnection:
    """To the gateway; bounded, so that a page never waits for ever."""
    return HTTPConnection(GATEWAY.hostname or "127.0.0.1", GATEWAY.port or 80, timeout=seconds)


def request_headers() -> dict[str, str]:
    """With the key, which the browser never sees."""
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {KEY}"} if KEY else {})


def list_models() -> list[str]:
    """The names that the gateway serves now."""
    gateway = connect(10)
    try:
        gateway.request("GET", "/v1/models", headers=request_headers())
        return [model["id"] for model in json.loads(gateway.getresponse().read())["data"]]
    except (KeyError, TypeError) as error:
        raise ValueError("the gateway listed no models; is the API key right?") from error
    finally:
        gateway.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A web chat in front of the gateway.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as process 1 of a container it would be ignored
    server = ThreadingHTTPServer((given.host, given.port), Handler)
    print(f"http://{given.host}:{server.server_address[1]}", flush=True)
    server.serve_forever()
