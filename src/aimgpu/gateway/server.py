"""The HTTP/1.1 side towards callers, for uvicorn's `http=`: bounded heads, one write an answer, word when a caller leaves.

uvicorn's own protocol takes heads of any size and any age, and spends about as much on a request as this gateway does. This
one serves any ASGI application. Beyond ASGI it offers `scope["extensions"]["aimgpu.on_disconnect"]`: a function that takes a
callback to run when the caller leaves before the answer is complete, so that nobody needs a task to wait for it.
"""

import asyncio
import http
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
import orjson
import uvicorn
from uvicorn.server import ServerState

from aimgpu.gateway.asgi import Header, Message, Scope

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
HEAD_SECONDS = 20.0  # a head that takes longer to arrive is not one
_TICK_SECONDS = 2.5
_BODY_HIGH = 64 * 1024
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_NO_BODY = frozenset({204, 304})
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ABOUT_UPGRADES = frozenset({b"connection", b"upgrade", b"http2-settings"})
_PROBE_SECONDS = 0.1
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)  # Linux
_CLOSE_WAIT = 8  # the peer has closed its side, ours is open (linux/include/net/tcp_states.h)

Disconnect = Callable[[], None]


class CallerProtocol(asyncio.Protocol):
    """One connection. The `on_...` methods are httptools' callbacks."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.loop = _loop or asyncio.get_event_loop()
        self.state = server_state
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)  # set before anything else is called
        self.writable: asyncio.Future[None] | None = None  # while the caller reads too slowly
        self._application = config.loaded_app
        self._app_state = app_state
        self._keep_alive_seconds = config.timeout_keep_alive
        self._root_path = config.root_path
        self._parser = httptools.HttpRequestParser(self)
        self._exchange: _Exchange | None = None
        self._waiting: deque[_Exchange] = deque()
        self._in_head = False
        self._head_bytes = 0
        self._url = b""
        self._headers: list[Header] = []
        self._last_active = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._lingering = False
        self._at_end = False  # the caller has said that it sends no more
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.state.connections.add(cast("Any", self))
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        self._timer = self.loop.call_later(_TICK_SECONDS, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio names it
        self.state.connections.discard(cast("Any", self))
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        for exchange in (self._exchange, *self._waiting):
            if exchange is not None:
                exchange.caller_left()
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        self._last_active = self.loop.time()
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "invalid_request", "This is not a valid HTTP/1.1 request.")
        else:
            if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "head_too_large", f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")

    def eof_received(self) -> bool:
        """The caller sends no more. It may still read, or be gone: only an answer to something that is sent to it tells.

        Whoever closes in the middle of an answer has left; one who closes before it may have asked all it wanted.
        """
        exchange = self._exchange
        if exchange is None or exchange.started or not (self._waiting or [exchange])[-1].body_complete or _TCP_INFO is None:
            return False  # closes
        self._at_end = True
        if exchange.scope["http_version"] != "1.0":
            self.transport.write(_CONTINUE)  # any caller of HTTP/1.1 must take it; one that is gone answers with a reset
        self.loop.call_later(_PROBE_SECONDS, self._look_for_caller)
        return True

    def pause_writing(self) -> None:
        if self.writable is None:
            self.writable = self.loop.create_future()

    def resume_writing(self) -> None:
        writable, self.writable = self.writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def shutdown(self) -> None:
        """uvicorn: finish what runs, take nothing new."""
        if self._exchange is None:
            self.transport.close()
        else:
            self._exchange.keep_alive = False

    def on_message_begin(self) -> None:
        self._in_head = True
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if len(self._headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # stops the parser; answered in data_received
        parser = self._parser
        if parser.should_upgrade():
            return  # the parser stops here; without those headers it will go on
        self._in_head = False
        version = parser.get_http_version()
        exchange = _Exchange(self, self._make_scope(version), keep_alive=version != "1.0" and parser.should_keep_alive())
        if self._exchange is None:
            self._start(exchange)
        else:
            self._waiting.append(exchange)
            self.transport.pause_reading()

    def on_body(self, body: bytes) -> None:
        exchange = self._waiting[-1] if self._waiting else self._exchange
        if exchange is not None:
            exchange.add_body(body)

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # it asked for an upgrade, and has not been parsed as what it is yet
        self._head_bytes = 0
        exchange = self._waiting[-1] if self._waiting else self._exchange
        if exchange is not None:
            exchange.end_body()

    def finished(self, exchange: "_Exchange") -> None:
        """The answer is out; the next request of this connection may begin."""
        self.state.total_requests += 1
        self._exchange = None
        self._last_active = self.loop.time()
        if not exchange.body_complete:
            self._linger()
        elif not exchange.keep_alive or (self._at_end and not self._waiting):
            self.transport.close()
        elif self._waiting:
            self._start(self._waiting.popleft())
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.transport.is_closing() and not self._waiting:
            self.transport.resume_reading()

    def _linger(self) -> None:
        """Answered before the whole body came: closing now would reset the connection before the caller has read the answer."""
        self._lingering = True
        self._waiting.clear()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def _start(self, exchange: "_Exchange") -> None:
        self._exchange = exchange
        exchange.task = self.loop.create_task(exchange.run(cast("Any", self._application)))
        self.state.tasks.add(exchange.task)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """No other protocol is offered, so a wish for one is ignored (RFC 9110, 7.8) and the request read as HTTP/1.1."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(405, "method_not_allowed", "This is no proxy.")
            return
        head = [method, b" ", self._url, b" HTTP/1.1\r\n"]
        for name, value in self._headers:
            if name == b"connection" and b"close" in value.lower():
                head.append(b"connection: close\r\n")
            elif name not in _ABOUT_UPGRADES:
                head += (name, b": ", value, b"\r\n")
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self.data_received(b"".join((*head, b"\r\n", rest)))

    def _look_for_caller(self) -> None:
        """Whether a caller that sends no more is still there: its reset, where it is not, has ended the connection."""
        found = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or found is None or _TCP_INFO is None:
            return
        if found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] != _CLOSE_WAIT:
            self.transport.abort()
        elif self._exchange is not None:
            self.loop.call_later(_PROBE_SECONDS * 10, self._look_for_caller)

    def _make_scope(self, version: str) -> Scope:
        raw_path, query = _split_target(self._url)
        path = raw_path.decode("ascii", "replace")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": self._root_path + (unquote(path) if "%" in path else path),
            "raw_path": raw_path,
            "query_string": query,
            "root_path": self._root_path,
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
            "state": self._app_state.copy(),
        }

    def _tick(self) -> None:
        """One timer a connection for both: a head that does not end, and a kept connection that nobody uses."""
        idle = self.loop.time() - self._last_active
        if self._in_head and idle + _TICK_SECONDS > HEAD_SECONDS:
            self._refuse(408, "request_timed_out", "The request's head did not arrive in time.")
        elif self._exchange is None and not self._in_head and idle > self._keep_alive_seconds:
            self.transport.close()  # lingering included: it does not count as activity
        elif not self.transport.is_closing():
            self._timer = self.loop.call_later(_TICK_SECONDS, self._tick)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answers what never became a request, and closes: where the next one would begin is not known."""
        if self._exchange is None and not self.transport.is_closing():
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = orjson.dumps({"error": error})
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(_STATUS_LINES[status] + head + body)
        self.transport.close()


class _Exchange:
    """One request and its answer: ASGI's `receive` and `send`."""

    __slots__ = (
        "_body",
        "_chunked",
        "_flush",
        "_head",
        "_invited",
        "_on_disconnect",
        "_protocol",
        "_received",
        "_waiter",
        "body_complete",
        "complete",
        "gone",
        "keep_alive",
        "scope",
        "started",
        "task",
    )

    def __init__(self, protocol: CallerProtocol, scope: Scope, *, keep_alive: bool) -> None:
        self._protocol = protocol
        self.scope = scope
        self.keep_alive = keep_alive
        self._body: list[bytes] = []
        self._received = False
        self.body_complete = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_disconnect: Disconnect | None = None
        self._head: bytes | None = None  # not yet written
        self._flush: asyncio.Handle | None = None
        self._chunked = False
        self._invited = False
        self.started = False
        self.complete = False
        self.gone = False
        self.task: asyncio.Task[None] | None = None
        scope["extensions"] = {"aimgpu.on_disconnect": self.on_disconnect}

    async def run(self, application: Callable[..., Any]) -> None:
        try:
            await application(self.scope, self.receive, self.send)
        except Exception:  # the last edge: whatever it was, this connection ends and the server goes on
            log.exception("request.crashed path=%s", self.scope["path"])
            if not self.started:
                await self.send({"type": "http.response.start", "status": 500, "headers": [(b"connection", b"close")]})
                await self.send({"type": "http.response.body", "body": b""})
        finally:
            if not self.complete and not self.gone:
                self._protocol.transport.close()
            self._forget()
            if self.task is not None:  # here and not in a callback, which costs a turn of the loop for every request
                self._protocol.state.tasks.discard(self.task)
                self.task = None

    def _forget(self) -> None:
        """Let go of everything that points back here: what is freed at once need not be looked for by the collector."""
        self._on_disconnect = None
        self.scope.pop("extensions", None)

    def on_disconnect(self, callback: Disconnect) -> None:
        self._on_disconnect = callback

    def add_body(self, body: bytes) -> None:
        self._body.append(body)
        if len(self._body) > 1 and sum(map(len, self._body)) > _BODY_HIGH:
            self._protocol.transport.pause_reading()
        self._wake()

    def end_body(self) -> None:
        self.body_complete = True
        self._wake()

    def caller_left(self) -> None:
        self.gone = True
        self._wake()
        if self._on_disconnect is not None and not self.complete:
            self._on_disconnect()

    async def receive(self) -> Message:
        while not self.gone and not self.complete:
            if self._body or (self.body_complete and not self._received):
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
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
        protocol = self._protocol
        if self.gone or self.complete:
            return
        if message["type"] == "http.response.start":
            self.started = True
            self._head = self._encode_head(message["status"], message.get("headers", ()))
            if self._chunked:  # where the length is known, the body follows
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

    def _write(self, body: bytes) -> None:
        if self._head is not None:
            body, self._head = self._head + body, None
            if self._flush is not None:
                self._flush.cancel()
        if body and not self.gone:
            self._protocol.transport.write(body)

    def _write_head(self) -> None:
        """The application took its time after the head: do not hold it back."""
        self._write(b"")

    def _encode_head(self, status: int, headers: list[Header]) -> bytes:
        parts: list[bytes] = []
        sized = False
        for name, value in (*self._protocol.state.default_headers, *headers):
            if name == b"content-length":
                sized = True
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                continue
            parts += (name, b": ", value, b"\r\n")
        lines = b"".join(parts)
        breaks = len(parts) // 4
        if lines.count(b"\n") != breaks or lines.count(b"\r") != breaks:
            raise ValueError("a header holds a line break")
        lines = (_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status) + lines
        if not sized and status not in _NO_BODY and self.scope["method"] != "HEAD":
            if self.scope["http_version"] == "1.0":
                self.keep_alive = False  # the end of the connection is the end of the body
            else:
                self._chunked = True
                lines += b"transfer-encoding: chunked\r\n"
        return lines + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")

    def _invite(self) -> None:
        """The application wants the body: let more of it in, and tell a caller who waits for leave."""
        self._protocol.resume_reading()
        headers: list[Header] = self.scope["headers"]
        if not self._invited and (b"expect", b"100-continue") in headers:
            self._invited = True
            self._protocol.transport.write(_CONTINUE)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    """The path and the query of a request's target; only another form than the usual "/path?query" needs a parser."""
    if target.startswith(b"/") and b"#" not in target:
        path, _, query = target.partition(b"?")
        return path, query
    url = httptools.parse_url(target)
    return url.path or b"/", url.query or b""


def _address(info: Any) -> tuple[str, int] | None:  # noqa: ANN401  # asyncio does not say what a socket's address is
    return (str(info[0]), int(info[1])) if isinstance(info, tuple) else None
