"""Probes that are answered by a thread of their own, also while the event loop is busy.

Alive: the loop has turned within half a minute, so a kubelet ends a process that is wedged and not one that is busy. Ready:
within two seconds, so callers are sent elsewhere meanwhile.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic

ALIVE_SECONDS, READY_SECONDS = 30.0, 2.0
_TURN_SECONDS = 0.5
_PATIENCE_SECONDS = 5.0  # with a prober that sends nothing


class LoopWatch:
    """When the event loop turned last."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._turned = now()

    async def run(self) -> None:
        """For ever, on the loop that is watched."""
        while True:
            self.turned()
            await asyncio.sleep(_TURN_SECONDS)

    def turned(self) -> None:
        """It turns now."""
        self._turned = self._now()

    def has_turned(self, within_seconds: float) -> bool:
        """In any thread."""
        return self._now() - self._turned <= within_seconds


class ProbeServer:
    """Answers /healthz and /readyz until `close`. `is_ready`: what else readiness needs; it is called in other threads."""

    def __init__(self, watch: LoopWatch, is_ready: Callable[[], bool], address: tuple[str, int]) -> None:
        handler = type("Handler", (_Handler,), {"watch": watch, "is_ready": staticmethod(is_ready)})
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        server_class = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        self._server: ThreadingHTTPServer = server_class(address, handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_SECONDS
    watch: LoopWatch
    is_ready: Callable[[], bool]

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._answer(self.watch.has_turned(ALIVE_SECONDS))
        elif self.path == "/readyz":
            self._answer(self.watch.has_turned(READY_SECONDS) and self.is_ready())
        else:
            self.send_error(404)

    def _answer(self, good: bool) -> None:  # noqa: FBT001 -- what is answered
        body = b"ok\n" if good else b"not now\n"
        self.send_response(200 if good else 503)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the library's name
        """A line for every probe would fill the log."""
