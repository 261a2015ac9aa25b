"""A daemon of canned answers in this process: commands are run against it in-process, and what they asked for is kept."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from aimgpu.home import DaemonRecord, Home
from aimgpu.procfs import read_boot_id, read_start_ticks

TOKEN = "canned-token"


@dataclass(frozen=True)
class Answer:
    """What is sent; `cut`: the connection ends before all that was announced."""

    body: bytes
    status: int = 200
    cut: bool = False


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: str
    body: Any
    token: str | None


@dataclass
class CannedDaemon:
    """Answers by "METHOD /path" under /api/v1; anything else is 404."""

    url: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def answer(self, route: str, value: object, *, status: int = 200) -> None:
        self.answers[route] = Answer(json.dumps(value).encode(), status)

    def stream(self, route: str, *events: object, cut: bool = False) -> None:
        self.answers[route] = Answer(b"".join(json.dumps(event).encode() + b"\n" for event in events), cut=cut)

    def error(self, route: str, code: str, message: str, *, status: int, hint: str | None = None) -> None:
        self.answer(route, {"error": {"code": code, "message": message, "hint": hint}}, status=status)


class _Handler(BaseHTTPRequestHandler):
    daemon: CannedDaemon

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        return

    def do_GET(self) -> None:
        self._respond("GET")

    def do_POST(self) -> None:
        self._respond("POST")

    def _respond(self, method: str) -> None:
        url = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = url.path.removeprefix("/api/v1")
        header = self.headers.get("Authorization", "")
        self.daemon.asked.append(
            Asked(
                method=method,
                path=path,
                query=url.query,
                body=json.loads(text) if text else None,
                token=header.removeprefix("Bearer ") or None,
            )
        )
        answer = self.daemon.answers.get(f"{method} {path}", Answer(b"<html>no such page</html>", 404))
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(answer.body) + (10 if answer.cut else 0)))
        self.end_headers()
        self.wfile.write(answer.body)


@contextmanager
def canned_daemon(home: Home) -> Iterator[CannedDaemon]:
    """Runs in this process, so that its record names a process that runs."""
    daemon = CannedDaemon()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"daemon": daemon}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    daemon.url = f"http://127.0.0.1:{server.server_port}"
    home.create()
    home.token_file.write_text(TOKEN)
    home.write_daemon(
        DaemonRecord(
            pid=os.getpid(),
            start_ticks=read_start_ticks(os.getpid()) or 0,
            boot_id=read_boot_id(),
            host="127.0.0.1",
            port=server.server_port,
            url=daemon.url,
        )
    )
    try:
        yield daemon
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
