"""One request and its answer on a connection: ASGI's `receive` and `send`, and HTTP/1.1's framing of what is sent."""

import asyncio
import functools
import http
import logging
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.server import ServerState

from aimgpu.gateway.http.asgi import CLOSE, Head, Header, Message, Scope

log = logging.getLogger(__name__)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in http.HTTPStatus}
_BODY_HIGH = 64 * 1024
_NO_BODY = frozenset({204, 304})

Disconnect = Callable[[], None]


class Connection(Protocol):
    """What an exchange needs of the connection it is on."""

    loop: asyncio.AbstractEventLoop
    state: ServerState
    transport: asyncio.Transport
    writable: "asyncio.Future[None] | None"  # while the caller reads too slowly

    def finished(self, exchange: "Exchange") -> None:
        """The answer of this exchange is out."""

    def pause_reading(self) -> None:
        """Enough of the body is held."""

    def resume_reading(self) -> None:
        """Let more of the body in."""


class Exchange:
    """One request and its answer: ASGI's `receive` and `send`.

    Without slots, so that what has not happened yet is read from the class and costs nothing.
    """

    task: "asyncio.Task[None] | None" = None
    request_id = b""
    body_complete = False
    started = False
    complete = False
    gone = False
    _waiter: "asyncio.Future[None] | None" = None
    on_disconnect: Disconnect | None = None  # runs when the caller leaves before its answer is complete
    _head: bytes | None = None  # not yet written
    _flush: asyncio.Handle | None = None
    _chunked = False
    _invited = False
    _received = False
    _body_bytes = 0  # held, and not taken yet

    def __init__(self, protocol: Connection, scope: Scope, head: Head, *, keep_alive: bool) -> None:
        self._protocol = protocol
        self.scope = scope
        self.head = head
        self.keep_alive = keep_alive
        self._body: list[bytes] = []
        scope["extensions"] = {"aimgpu.exchange": self}

    async def run(self, application: Callable[..., Any]) -> None:
        """Run the application for this request; whatever it raises ends the connection, not the server."""
        try:
            await application(self.scope, self.receive, self.send)
        except Exception:  # the last edge: this connection ends, and the server goes on
            log.exception(
                "request.crashed", extra={"data": {"request_id": self.request_id.decode(), "path": self.scope["path"]}}
            )
            if not self.started:
                await self.send({"type": "http.response.start", "status": 500, "headers": [CLOSE]})
                await self.send({"type": "http.response.body", "body": b""})
        finally:
            if not self.complete and not self.gone:
                self._protocol.transport.close()
            # Let go of everything that points back here: what is freed at once need not be looked for by the collector.
            self.on_disconnect = None
            self.scope.pop("extensions", None)
            if self.task is not None:  # here and not in a callback, which costs a turn of the loop for every request
                self._protocol.state.tasks.discard(self.task)
                self.task = None

    def add_body(self, body: bytes) -> None:
        """A part of the body has come."""
        self._body.append(body)
        self._body_bytes += len(body)
        if len(self._body) > 1 and self._body_bytes > _BODY_HIGH:
            self._protocol.pause_reading()
        if self._waiter is not None:
            self._wake()

    def end_body(self) -> None:
        """All of the body has come."""
        self.body_complete = True
        if self._waiter is not None:
            self._wake()

    def caller_left(self) -> None:
        """The connection is closed: the answer is not read."""
        if self.gone:
            return
        self.gone = True
        self._wake()
        if self.on_disconnect is not None and not self.complete:
            self.on_disconnect()

    def take_body(self) -> bytes | None:
        """The whole body where it has come already and was not received yet; else None, and `receive` waits for it."""
        if not self.body_complete or self._received or self.gone:
            return None
        self._received = True
        return self._take_held()

    async def receive(self) -> Message:
        """ASGI's `receive`."""
        while not self.gone and not self.complete:
            if self._body or (self.body_complete and not self._received):
                body = self._take_held()
                self._received = self.body_complete
                return {"type": "http.request", "body": body, "more_body": not self.body_complete}
            if not self.body_complete:
                self._invite()
            self._waiter = self._protocol.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI's `send`."""
        protocol = self._protocol
        if self.gone or self.complete:
            return
        if message["type"] == "http.response.start":
            self.started = True
            self._head = self._encode_head(message["status"], tuple(map(tuple, message.get("headers", ()))))
            if self._chunked and not message.get("aimgpu.body_follows"):  # as it does where the length is known
                self._flush = protocol.loop.call_soon(self._write_head)
            return
        if protocol.writable is not None:
            await protocol.writable
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            body = b""
        if self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        self._write(body)
        if not more:
            self.complete = True
            self._wake()
            protocol.finished(self)

    @property
    def may_start(self) -> bool:
        """Whether `start_parts` may be used now: nothing was begun, and the caller reads fast enough."""
        return not self.started and not self.gone and self._protocol.writable is None

    def start_parts(self, status: int, headers: list[Header]) -> None:
        """The head, which goes out with the first part; see `may_start`."""
        self.started = True
        self._head = self._encode_head(status, tuple(headers))

    @property
    def takes_parts(self) -> bool:
        """Whether `send_part` may be used now: the body goes out in chunks, and the caller reads fast enough."""
        return self._chunked and self._protocol.writable is None

    def send_part(self, body: bytes) -> None:
        """A part of the body, at once; see `takes_parts`."""
        if self._head is not None:
            self._write(b"%x\r\n%b\r\n" % (len(body), body))
        elif not self.complete and not self.gone:
            self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def send_whole(self, status: int, headers: list[Header], body: bytes) -> bool:
        """A whole answer in one write. False, and nothing is sent, while the caller reads too slowly: use `send`."""
        if self._protocol.writable is not None or self.started:
            return False
        if not self.gone:
            self.started = self.complete = True
            head = self._encode_head(status, tuple(headers), len(body))
            self._protocol.transport.write(head if self.scope["method"] == "HEAD" else head + body)
            if self._waiter is not None:
                self._wake()
            self._protocol.finished(self)
        return True

    def when_read(self, done: Callable[[], None]) -> None:
        """Call `done` once nearly all that was sent is read, or the caller has left."""
        writable = self._protocol.writable
        if writable is None:
            done()
        else:
            writable.add_done_callback(lambda _: done())

    def _take_held(self) -> bytes:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._body_bytes = 0
        return body

    def _write(self, body: bytes) -> None:
        if self._head is not None:
            body, self._head = self._head + body, None
            if self._flush is not None:
                self._flush.cancel()
        if body and not self.gone:
            self._protocol.transport.write(body)

    def _write_head(self) -> None:
        """Send the head now, since the application takes time before the body."""
        self._write(b"")

    def _encode_head(self, status: int, headers: tuple[Header, ...], length: int | None = None) -> bytes:
        """`length`: of the body, where the headers do not name it and it is known."""
        lines, names = _encode_lines(headers)
        if b"connection" in names:
            kept = tuple((name, value) for name, value in headers if (name, value.lower()) != CLOSE)
            self.keep_alive = self.keep_alive and len(kept) == len(headers)
            lines, names = _encode_lines(kept)
        beginning = _encode_beginning(status, tuple(self._protocol.state.default_headers))
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        if length is not None:
            return b"%b%b%bcontent-length: %d\r\n%b" % (beginning, self.request_id, lines, length, end)
        if b"content-length" not in names and status not in _NO_BODY and self.scope["method"] != "HEAD":
            if self.scope["http_version"] == "1.0":
                self.keep_alive = False  # the end of the connection is the end of the body
                end = b"connection: close\r\n\r\n"
            else:
                self._chunked = True
                end = b"transfer-encoding: chunked\r\n" + end
        return beginning + self.request_id + lines + end

    def _invite(self) -> None:
        """The application wants the body: let more of it in, and answer a caller that waits for "100 Continue"."""
        self._protocol.resume_reading()
        if not self._invited and self.head.get(b"expect", b"").lower() == b"100-continue":
            self._invited = True
            self._protocol.transport.write(CONTINUE)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@functools.lru_cache(maxsize=128)
def _encode_lines(headers: tuple[Header, ...]) -> tuple[bytes, frozenset[bytes]]:
    """What ends the line before and the headers' own lines, and their names. Answers of one engine begin alike."""
    lines = b"\r\n".join([b"", *map(b": ".join, headers), b""])
    if not lines.count(b"\n") == lines.count(b"\r") == len(headers) + 1:
        raise ValueError("a header holds a line break")
    return lines, frozenset(dict(headers))


@functools.lru_cache(maxsize=64)
def _encode_beginning(status: int, headers: tuple[Header, ...]) -> bytes:
    """The status line and what every answer begins with, up to the value of x-request-id; the date changes once a second."""
    first = STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status
    return b"\r\n".join([first, *map(b": ".join, headers), b"x-request-id: "])
