"""The HTTP/1.1 side towards callers, for uvicorn's `http=`: bounded heads, one write an answer, word when a caller leaves.

uvicorn's own protocol takes heads of any size and any age, and spends about as much on a request as this gateway does. This
one serves any ASGI application. Beyond ASGI it offers `scope["extensions"]["aimgpu.exchange"]`: the Exchange, which knows the
task that runs the application and calls back when the caller leaves, so that no task is needed to wait for it.
"""

import asyncio
import logging
import re
import resource
import socket
from collections import deque
from functools import lru_cache
from http import HTTPStatus
from itertools import islice
from time import monotonic
from typing import Any, cast
from urllib.parse import unquote

import httptools
import orjson
import uvicorn
from uvicorn.server import ServerState

from aimgpu.gateway.http.asgi import Application, Header, Scope
from aimgpu.gateway.http.exchange import CONTINUE, STATUS_LINES, Exchange
from aimgpu.gateway.http.request_ids import make_request_id

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
_TOO_LARGE = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."
HEAD_SECONDS = 20.0  # from its first byte to its last
_TICK_SECONDS = 2.5
_ASGI = {"version": "3.0", "spec_version": "2.3"}
_ABOUT_UPGRADES = frozenset({b"connection", b"upgrade", b"http2-settings"})
_SHORT_TARGET = 64  # bytes; longer ones are not worth remembering
_PROBE_SECONDS = 0.1
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)  # Linux
SHUTDOWN_SECONDS = 30  # for answers under way
_KEEP_ALIVE_SECONDS = 75  # longer than what callers' connection pools keep, so that it is they who close
_TRAILERS: deque[Header] = deque(maxlen=0)  # keeps nothing: fields after a body are no part of the head
_COMPARED_IDLE = 32  # of the idle connections: the one that is closed for another need not be the oldest of all
_KEPT_FILES = 256  # of those that may be open, for the ledger, engines' logs and /proc
_HEAD_END = b"\r\n\r\n"
_LINE = re.compile(rb"[A-Z]{3,7} /[^ \r\n]{0,2000} HTTP/1\.1\r\n")  # a first line that needs no other look
_LENGTH = re.compile(rb"\r\ncontent-length: ?(\d{1,8})\r\n", re.IGNORECASE)
_MOST_ENDS = 64  # of a body in chunks, looked for in one read; nothing may follow in it where there are more
_WRONG_LINE = "A request begins with one line: METHOD TARGET HTTP/1.1, a space between each."
_NO_METHOD = (b"\r", b"\n", b" ")
_CLOSE_WAIT = 8  # the peer has closed its side, ours is open (linux/include/net/tcp_states.h)


def caller_config(
    application: Application, *, host: str = "127.0.0.1", port: int = 0, shutdown_seconds: int = SHUTDOWN_SECONDS
) -> uvicorn.Config:
    """How every server of ours faces callers: this protocol, nothing believed of proxies, nothing said of the software.

    The event loop is the caller's choice; an address is only used where no socket is handed over.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return uvicorn.Config(
        application,
        host=host,
        port=port,
        loop="none",
        http=CallerProtocol,
        ws="none",
        proxy_headers=False,
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
        limit_concurrency=None if soft == resource.RLIM_INFINITY else most_connections(soft),
    )


def most_connections(open_files: int) -> int:
    """How many callers may connect, by the files that this process may open: a request needs a second one, to its engine."""
    return max(1, (open_files - min(_KEPT_FILES, open_files // 2)) // 2)


class CallerProtocol(asyncio.Protocol):
    """One connection. The `on_...` methods are httptools' callbacks.

    With slots: instances with more than 30 attributes share no table of their names, which costs a tenth of a request.
    """

    __slots__ = (
        "_add_header",
        "_app_state",
        "_application",
        "_at_end",
        "_body_left",
        "_client",
        "_exchange",
        "_head_began",
        "_head_bytes",
        "_head_problem",
        "_headers",
        "_in_head",
        "_keep_alive_seconds",
        "_known_line",
        "_line",
        "_lingering",
        "_may_begin",
        "_most_connections",
        "_parser",
        "_paused",
        "_received",
        "_request_problem",
        "_root_path",
        "_scheme",
        "_server",
        "_tail",
        "_timer",
        "_unsent",
        "_url",
        "_waiting",
        "_whole",
        "last_active",
        "loop",
        "state",
        "transport",
        "writable",
    )

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
        self._application: Any = config.loaded_app
        self._app_state = app_state
        self._keep_alive_seconds = config.timeout_keep_alive
        self._most_connections = config.limit_concurrency
        self._root_path = config.root_path
        self._parser = httptools.HttpRequestParser(self)
        self._exchange: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._in_head = False
        self._head_bytes = 0
        self._head_problem: str | None = None
        self._request_problem: str | None = None
        self._line: bytes | None = b""  # of the next request's first line, what has come; None: it was checked
        self._known_line = b""  # of the last request with one that needs no other look; most connections ask for one path
        self._may_begin = False  # a request may begin in what is parsed now
        self._whole = False  # what is parsed now is one request of HTTP/1.1 for a path, and all of it
        self._body_left = 0  # bytes of the body that have not come; less than 0: it comes in chunks
        self._tail = b""  # of the head or body in chunks that did not end in the last read
        self._url = b""
        self._headers: list[Header] = []
        self._add_header = self._headers.append
        self.last_active = monotonic()  # when it began, or its last answer was out, or more of that was read
        self._received = self._head_began = 0.0
        self._unsent = 0  # bytes of answers that the caller has not read, when they were looked at last
        self._timer: asyncio.TimerHandle | None = None
        self._lingering = False
        self._paused = False  # nothing more is read from the caller
        self._at_end = False  # the caller has said that it sends no more
        self._scheme = "http"
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: a caller has connected."""
        self.transport = cast("asyncio.Transport", transport)
        full = self._most_connections is not None and len(self.state.connections) >= self._most_connections
        self.state.connections.add(cast("Any", self))
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        self._timer = self.loop.call_later(_TICK_SECONDS, self._tick)
        if full and not self._close_idle():
            self._refuse(503, "too_many_connections", "All connections that this server may have are in use.")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio names it
        """asyncio: the connection is closed, by whichever side."""
        self.state.connections.discard(cast("Any", self))
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        for exchange in (self._exchange, *self._waiting):
            if exchange is not None:
                exchange.caller_left()
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        """asyncio: parse what has come, no message together with the next: where each begins is checked here."""
        if self._lingering:
            return
        self._received = monotonic()
        known = self._known_line
        if self._line == b"" and not self._in_head and ((known and data.startswith(known)) or self._is_ordinary(data)):
            end = data.find(_HEAD_END) + len(_HEAD_END)
            length = _LENGTH.search(data, 0, end) if end >= len(_HEAD_END) else None
            if length is not None and end + int(length[1]) == len(data):  # one request, and nothing of the next
                self._line, self._may_begin, self._whole = None, True, True
                self._head_bytes = len(data)
                self._parse(data)
                return
        at, size, ends = 0, len(data), 0
        while at < size:
            ends += self._body_left < 0
            end = self._find_end(data, at) if ends <= _MOST_ENDS else size
            if not self._feed(data[at:end]):
                return
            at = end

    def _is_ordinary(self, data: bytes) -> bool:
        """Whether the data begins with an ordinary first line, which is then kept."""
        line = _LINE.match(data)
        if line is None:
            return False
        self._known_line = line[0]
        return True

    def _find_end(self, data: bytes, at: int) -> int:
        """Where the parser must not read on: at the end of a head or a body, or at what may be the end of one in chunks."""
        if self._body_left > 0:
            return min(at + self._body_left, len(data))
        tail, self._tail = self._tail, b""
        joined = (tail + data[:3]).find(_HEAD_END) if tail else -1
        if joined >= 0:
            return joined + len(_HEAD_END) - len(tail)
        found = data.find(_HEAD_END, at)
        if found >= 0:
            return found + len(_HEAD_END)
        self._tail = (tail + data[max(at, len(data) - 3) :])[-3:]
        return len(data)

    def _feed(self, data: bytes) -> bool:
        """As `_parse`, for what may be a part of a request."""
        self._may_begin, self._whole = not self._body_left and not self._in_head, False
        if self._body_left > 0:
            self._body_left -= len(data)
        elif not self._body_left:
            self._head_bytes += len(data)
            if self._line is not None and not self._check_line(data):
                self._refuse(400, "invalid_request", _WRONG_LINE)
                return False
        return self._parse(data)

    def _parse(self, data: bytes) -> bool:
        """False: what came was refused."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if self._head_problem is None:
                self._refuse(400, "invalid_request", self._request_problem or "This is not a valid HTTP/1.1 request.")
            else:
                self._refuse(431, "head_too_large", self._head_problem)
            return False
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "head_too_large", _TOO_LARGE)
            return False
        return True

    def eof_received(self) -> bool:
        """The caller sends no more. It may still read, or be gone: only an answer to something that is sent to it shows which.

        A caller that closes in the middle of an answer has left; one that closes before it may have asked all it wanted.
        """
        exchange = self._exchange
        if self._scheme == "https":
            return False  # TLS has no half-closed connections
        if exchange is None or exchange.started or not (self._waiting or [exchange])[-1].body_complete or _TCP_INFO is None:
            return False  # closes
        self._at_end = True
        if exchange.scope["http_version"] != "1.0":
            self.transport.write(CONTINUE)  # any caller of HTTP/1.1 must take it; one that is gone answers with a reset
        self.loop.call_later(_PROBE_SECONDS, self._look_for_caller)
        return True

    def pause_writing(self) -> None:
        """asyncio: the caller reads too slowly."""
        if self.writable is None:
            self.writable = self.loop.create_future()

    def resume_writing(self) -> None:
        """asyncio: the caller has read enough of it."""
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
        """httptools: the first byte of a request has come."""
        if not self._may_begin:
            self._request_problem = _WRONG_LINE
            raise ValueError(self._request_problem)
        self._in_head, self._may_begin = True, False
        self._head_began = self._received
        self._url = b""
        self._headers = []
        self._add_header = self._headers.append

    def on_url(self, url: bytes) -> None:
        """httptools: a part of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        self._add_header((name.lower(), value))

    def on_headers_complete(self) -> None:
        """httptools: the head has come; begin the exchange, or queue it behind the one before."""
        if len(self._headers) > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._check_head()
        parser = self._parser
        head = dict(self._headers)
        whole = self._whole
        version = "1.1" if whole else parser.get_http_version()
        if b"host" not in head or len(head) != len(self._headers):
            self._check_hosts(version)
        in_chunks = b"transfer-encoding" in head
        if in_chunks:
            self._check_framing()
        if not whole and not self._url.startswith(b"/"):
            self._check_target(head)
        if parser.should_upgrade():
            return  # the parser stops here; without those headers it will go on
        self._in_head = False
        self._body_left = -1 if in_chunks else int(head.get(b"content-length", 0))
        self._add_header = _TRAILERS.append
        keep_alive = parser.should_keep_alive() if version == "1.1" else self._check_version(version)
        exchange = Exchange(self, self._make_scope(version), head, keep_alive=keep_alive)
        exchange.request_id = make_request_id(head.get(b"x-request-id"))
        if self._exchange is None:
            self._start(exchange)
        else:
            self._waiting.append(exchange)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body."""
        exchange = self._waiting[-1] if self._waiting else self._exchange
        if exchange is not None:
            exchange.add_body(body)

    def on_message_complete(self) -> None:
        """httptools: the request has come whole."""
        if self._in_head:
            return  # it asked for an upgrade, and has not been parsed as what it is yet
        self._head_bytes = 0
        self._line, self._body_left = b"", 0
        exchange = self._waiting[-1] if self._waiting else self._exchange
        if exchange is not None:
            exchange.end_body()

    def finished(self, exchange: Exchange) -> None:
        """The answer is out; the next request of this connection may begin."""
        self.state.total_requests += 1
        self._exchange = None
        self.last_active = monotonic()
        if not exchange.body_complete:
            self._linger()
        elif not exchange.keep_alive or (self._at_end and not self._waiting):
            self.transport.close()
        elif self._waiting:
            self._start(self._waiting.popleft())
        if self._paused:
            self.resume_reading()

    def pause_reading(self) -> None:
        """Let no more in for now."""
        self._paused = True
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless another request of this connection waits."""
        if self._paused and not self._waiting and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, and nothing of one has come."""
        return self._exchange is None and not self._in_head and not self._lingering and not self.transport.is_closing()

    def _close_idle(self) -> bool:
        """Close a connection that waits for a request, in favour of this one; False where none does."""
        others = (cast("CallerProtocol", one) for one in self.state.connections if one is not cast("Any", self))
        idle = min(
            islice((one for one in others if one.is_idle), _COMPARED_IDLE), key=lambda one: one.last_active, default=None
        )
        if idle is not None:
            idle.transport.close()
        return idle is not None

    def _linger(self) -> None:
        """Answered before the whole body came: closing now would reset the connection before the caller has read the answer."""
        self._lingering = True
        self._waiting.clear()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def _start(self, exchange: Exchange) -> None:
        self._exchange = exchange
        exchange.task = self.loop.create_task(exchange.run(self._application))
        self.state.tasks.add(exchange.task)

    def _go_on_without_upgrade(self, rest: bytes) -> bool:
        """No other protocol is offered, so a wish for one is ignored (RFC 9110, 7.8) and the request read as HTTP/1.1."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(405, "method_not_allowed", "This is no proxy.")
            return False
        head = [method, b" ", self._url, b" HTTP/1.1\r\n"]
        for name, value in self._headers:
            if name == b"connection" and b"close" in value.lower():
                head.append(b"connection: close\r\n")
            elif name not in _ABOUT_UPGRADES:
                head += (name, b": ", value, b"\r\n")
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes, self._in_head, self._line = 0, False, b""
        return self._feed(b"".join((*head, b"\r\n", rest)))

    def _look_for_caller(self) -> None:
        """Whether a caller that sends no more is still there; a reset would have ended the connection."""
        found = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or found is None or _TCP_INFO is None:
            return
        if found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] != _CLOSE_WAIT:
            self.transport.abort()
        elif self._exchange is not None:
            self.loop.call_later(_PROBE_SECONDS * 10, self._look_for_caller)

    def _check_head(self) -> None:
        """What is raised here stops the parser and is answered in data_received. Most of what came may be the body."""
        if len(self._headers) > MAX_HEADERS:
            self._head_problem = f"The request has more than {MAX_HEADERS} headers."
        elif len(self._url) + sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD_BYTES:
            self._head_problem = _TOO_LARGE
        if self._head_problem is not None:
            raise ValueError(self._head_problem)

    def _check_hosts(self, version: str) -> None:
        """As `_check_head`. Two proxies may read two Hosts differently, so that one lets pass what the other would not."""
        hosts = sum(name == b"host" for name, _ in self._headers)
        if hosts > 1 or (not hosts and version != "1.0"):
            self._request_problem = (
                "A request needs a Host header." if not hosts else "A request may have one Host header only."
            )
            raise ValueError(self._request_problem)

    def _check_line(self, data: bytes) -> bool:
        """Whether the first line may go on like this. The parser passes over empty lines and more spaces, as not all do."""
        line = self._line + data if self._line else data
        end = line.find(b"\r\n")
        line = line[:end] if end >= 0 else line
        self._line = None if end >= 0 or len(line) > MAX_HEAD_BYTES else line
        spaces = line.count(b" ")
        return line[:1] not in _NO_METHOD and (spaces == 2 or (spaces < 2 and self._line is not None)) and b"  " not in line  # noqa: PLR2004

    def _check_framing(self) -> None:
        """As `_check_head`: of all codings only `chunked` is taken, once, so that every proxy sees the same end of the body."""
        found = [value.lower() for name, value in self._headers if name == b"transfer-encoding"]
        if found != [b"chunked"]:
            self._request_problem = "The one transfer coding that this server takes is chunked."
            raise ValueError(self._request_problem)

    def _check_target(self, head: dict[bytes, bytes]) -> None:
        """As `_check_head`: a whole URL must name the same host as the Host header, which other parts look at."""
        if self._url == b"*" or self._parser.get_method() == b"CONNECT":
            return
        scheme, separator, rest = self._url.partition(b"://")
        authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
        if not separator or scheme.lower() not in (b"http", b"https") or authority.lower() != head.get(b"host", b"").lower():
            self._request_problem = "The target names another host than the Host header."
            raise ValueError(self._request_problem)

    def _check_version(self, version: str) -> bool:
        """As `_check_head`; whether the connection is kept, which that of an older request never is."""
        if version != "1.0":
            self._request_problem = "This server speaks HTTP/1.1 and HTTP/1.0."
            raise ValueError(self._request_problem)
        return False

    def _make_scope(self, version: str) -> Scope:
        path, raw_path, query = _split_target(self._url)
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": self._scheme,
            "path": self._root_path + path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": self._root_path,
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
            "state": self._app_state.copy(),
        }

    def _tick(self) -> None:
        """One timer a connection for all: a head that does not end, an idle kept connection, an answer that is not read."""
        now = monotonic()
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self.last_active = unsent, now
        idle = now - self.last_active
        if self._in_head and now - self._head_began + _TICK_SECONDS > HEAD_SECONDS:
            self._refuse(408, "request_timed_out", "The request's head did not arrive in time.")
        elif (self._exchange is None or self.transport.is_closing()) and not self._in_head and idle > self._keep_alive_seconds:
            # Lingering included: it does not count as activity. Closing waits for a caller that reads; this one does not.
            (self.transport.abort if unsent else self.transport.close)()
        else:
            self._timer = self.loop.call_later(_TICK_SECONDS, self._tick)  # until the connection is lost

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answers what never became a whole request, and closes: where the next one would begin is not known."""
        exchange = self._exchange
        if exchange is not None and not exchange.body_complete and not exchange.started:
            exchange.caller_left()  # its body breaks off here: this is its answer
            exchange = None
        if exchange is None and not self.transport.is_closing():
            kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
            error = {"message": message, "type": kind, "param": None, "code": code}
            body = orjson.dumps({"error": error})
            head = b"content-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n"
            head %= (make_request_id(), len(body))
            self.transport.write(STATUS_LINES[status] + b"\r\n" + head + body)
        self.transport.close()


def _split_target(target: bytes) -> tuple[str, bytes, bytes]:
    """The path, decoded and as it came, and the query of a request's target."""
    if len(target) <= _SHORT_TARGET:
        return _split_short_target(target)
    return _split_any_target(target)


def _split_any_target(target: bytes) -> tuple[str, bytes, bytes]:
    """Only another form than the usual "/path?query" needs a parser."""
    if target.startswith(b"/") and b"#" not in target:
        raw, _, query = target.partition(b"?")
    else:
        url = httptools.parse_url(target)
        raw, query = url.path or b"/", url.query or b""
    path = raw.decode("ascii", "replace")
    return unquote(path) if "%" in path else path, raw, query


_split_short_target = lru_cache(maxsize=256)(_split_any_target)  # most requests ask for one of a few paths


def _address(info: Any) -> tuple[str, int] | None:  # noqa: ANN401  # asyncio does not say what a socket's address is
    return (str(info[0]), int(info[1])) if isinstance(info, tuple) else None
