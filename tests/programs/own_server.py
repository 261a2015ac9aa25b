"""A server of a user's own, for `engine: command`: OpenAI's paths, as little of them as such servers have.

    own_server.py --port PORT [--key KEY] [--models a,b] [--no-list] [--takes BYTES] [--loads-until FILE] [--health PATH]

--takes: takes GPU memory of the driver that it finds, in units of so many bytes, until it is refused. --loads-until: its health
path answers 503 until the file is there. Every chat is answered with what it knows of itself, as JSON; "die" ends it.
"""

import argparse
import ctypes
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

FRUGAL = 64  # units, at most


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    given: ClassVar[argparse.Namespace]
    taken: ClassVar[int] = 0

    def do_GET(self) -> None:
        if self.path == self.given.health:
            waits = self.given.loads_until and not Path(self.given.loads_until).exists()
            self._send(503 if waits else 200, {})
        elif self.path == "/v1/models" and not self.given.no_list:
            self._send(200, {"object": "list", "data": [{"id": name} for name in self.given.models.split(",")]})
        else:
            self._send(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked: dict[str, Any] = json.loads(body)
        if self.given.key and self.headers.get("Authorization") != f"Bearer {self.given.key}":
            self._send(401, {"error": {"message": "wrong key"}})
        elif self.path == "/v1/chat/completions":
            if asked["messages"][0]["content"] == "die":
                os._exit(3)
            seen = {"model": asked["model"], "folder": str(Path.cwd()), "taken": self.taken, "pid": os.getpid()}
            self._send(200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": json.dumps(seen)}}]})
        elif self.path in ("/v1/embeddings", "/v1/rerank", "/v1/images/generations"):
            self._send(200, {"path": self.path, "model": asked["model"], "data": []})
        elif self.path == "/v1/audio/speech":
            self._send_bytes(200, b"RIFF" + bytes(range(256)), "audio/wav")
        else:
            self._send(404, {"error": {"message": "no such path"}})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        pass

    def _send(self, status: int, content: object) -> None:
        self._send_bytes(status, json.dumps(content).encode(), "application/json")

    def _send_bytes(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def take_memory(unit: int) -> int:
    """Bytes that the driver gave before it refused more."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    taken = 0
    while taken < FRUGAL * unit and driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(unit)) == 0:
        taken += unit
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    for name in ("--key", "--loads-until"):
        parser.add_argument(name)
    parser.add_argument("--models", default="one")
    parser.add_argument("--health", default="/health")
    parser.add_argument("--no-list", action="store_true")
    parser.add_argument("--takes", type=int, default=0)
    Handler.given = parser.parse_args()
    Handler.taken = take_memory(Handler.given.takes) if Handler.given.takes else 0
    print("listening", flush=True)  # noqa: T201 - its log
    ThreadingHTTPServer(("127.0.0.1", Handler.given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
