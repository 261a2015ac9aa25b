"""A web chat to copy: serves one page and passes its questions to the gateway, so that the API key stays on this side.

python examples/web_chat/server.py            # then open http://127.0.0.1:8000
AIMGPU_URL=http://gpubox:8080 AIMGPU_API_KEY=... python examples/web_chat/server.py --port 9000
"""

import argparse
import os
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

GATEWAY = urlsplit(os.environ.get("AIMGPU_URL", "http://127.0.0.1:8080"))
KEY = os.environ.get("AIMGPU_API_KEY")
PAGE = (Path(__file__).parent / "page.html").read_bytes()
PASSED_ON = {"/v1/models", "/v1/chat/completions"}
LARGEST_QUESTION = 1 << 20


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/":
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.send_header("content-length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)
        else:
            self._pass_on(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        if length > LARGEST_QUESTION or self.headers.get("content-type") != "application/json":
            self.send_error(400)
        else:
            self._pass_on(self.rfile.read(length))

    def _pass_on(self, body: bytes | None) -> None:
        if self.path not in PASSED_ON:
            self.send_error(404)
            return
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {KEY}"} if KEY else {})
        gateway = HTTPConnection(GATEWAY.hostname or "127.0.0.1", GATEWAY.port or 80)
        try:
            gateway.request(self.command, self.path, body, headers)
            answer = gateway.getresponse()
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers.get("content-type", "application/json"))
            self.end_headers()
            while part := answer.read1():
                self.wfile.write(part)
        except (OSError, HTTPException):
            self.close_connection = True  # one of the two went away: closing tells the other
        finally:
            gateway.close()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is http.server's
        """Say nothing: what people ask is their own business."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A web chat in front of the gateway.")
    parser.add_argument("--port", type=int, default=8000)
    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
