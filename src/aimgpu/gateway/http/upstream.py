"""The gateway's client to the engines: pooled HTTP/1.1 over asyncio, parsed by httptools.

Everything else in this room sees `Upstream` and `UpstreamAnswer` only.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from aimgpu.errors import EngineDisconnected, EngineTimedOut, EngineUnreachable

_BUFFER_HIGH = 256 * 1024
_MOST_ORIGINS = 4096
_MOST_HEAD_BYTES = 64 * 1024  # of an answer, with all interim ones before it
_MOST_HEADERS = 100
_LONG_HEAD = f"the head of the engine's answer is longer than {_MOST_HEAD_BYTES} bytes or {_MOST_HEADERS} headers"
_NO_BODY = f"the engine sent more than {_MOST_HEAD_BYTES} bytes in its answer without any of the body"

Consumer = Callable[[bytes], bool]
CheckPeer = Callable[[str, tuple[str, int], tuple[str, int]], None]
FirstConsumer = Callable[["UpstreamAnswer", bytes], bool]


@dataclass(frozen=True, slots=True)
class UpstreamTarget:
    """Where bodies are posted, and the head that goes before each: all of it but the body's length."""

    url: str  # origin, "http://127.0.0.1:41234"
    head: bytes

    @classmethod
    def make(cls, url: str, path: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> "UpstreamTarget":
        """The head for one path of an engine, with these headers."""
        lines = [f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n".encode("ascii")]
        lines.extend(b"%b: %b\r\n" % header for header in headers)
        return cls(url, b"".join(lines) + b"content-length: ")


class UpstreamAnswer(Protocol):
    """An answer whose head has come; the body is read by `read` or chunk by chunk. Its owner cancels it in the end."""

    status: int
    headers: list[tuple[bytes, bytes]]  # names in lower case
    complete: bool  # all of it has come; nothing does after the next chunk

    async def next_chunk(self, consumer: Consumer | None = None) -> bytes:
        """Bytes as they come; empty at the end. Raises EngineDisconnected when the engine broke off.

        What comes while this waits is offered to `consumer` first, in the moment it is read. What it takes (it returns True) is
        not returned here: no task has to run for it. The end of an answer is never offered.
        """

    def take_whole(self) -> bytes | None:
        """The whole body where it has come already, as short ones do with their head; else None, and `read` waits for it."""

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body. Raises EngineDisconnected where it is longer than the limit, or breaks off."""

    def cancel(self) -> None:
        """Close the connection, so that the engine stops working on it. Harmless after the end."""


class Upstream(Protocol):
    """The way to the engines."""

    def send(
        self, target: UpstreamTarget, body: bytes, first: FirstConsumer | None = None
    ) -> Coroutine[Any, Any, UpstreamAnswer]:
        """Send and wait for the head. Cancelling this task cancels the request at the engine.

        The first part of a longer body is offered to `first` in the moment it is read, before the task that waits here runs.
        """

    def last_heard(self, url: str) -> float:
        """When the last byte came from this origin, by the steady clock; 0: never."""

    async def close(self) -> None:
        """End all connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLimits:
    """How long engines may take, and how many connections are kept."""

    connect_seconds: float = 5.0
    silence_seconds: float = 600.0  # without a byte from an engine that works on a request
    idle_per_origin: int = 256
    idle_seconds: float = 30.0
    sweep_seconds: float = 1.0


class PooledUpstream:
    """Keeps connections to each engine and sends one request at a time on each."""

    def __init__(self, limits: UpstreamLimits | None = None, check: CheckPeer | None = None) -> None:
        """`check`, in a thread and before anything is sent, takes the origin and both addresses of each new connection."""
        self._limits = limits or UpstreamLimits()
        self._check = check
        self._idle: dict[str, deque[_Connection]] = {}
        self._connections: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None
        self._heard: dict[str, float] = {}  # by origin, of connections that are closed

    def send(
        self, target: UpstreamTarget, body: bytes, first: FirstConsumer | None = None
    ) -> Coroutine[Any, Any, UpstreamAnswer]:
        """Send, and wait for the head; on an idle connection where there is one."""
        payload = b"%b%d\r\n\r\n%b" % (target.head, len(body), body)
        connection = self._take_idle(target.url)
        return self._ask_new(target.url, payload, first) if connection is None else connection.ask(payload, first)

    async def _ask_new(self, url: str, payload: bytes, first: FirstConsumer | None) -> "_Answer":
        connection = await self._connect(url)
        try:
            return await connection.ask(payload, first)
        except _StaleConnection as error:
            raise EngineDisconnected("the engine closed the connection without an answer") from error

    async def ask_again(self, url: str, payload: bytes, first: FirstConsumer | None) -> "_Answer":
        """An idle connection closed without an answer: an engine that still listens has closed it before it read anything."""
        try:
            return await self._ask_new(url, payload, first)
        except EngineUnreachable as error:
            raise EngineDisconnected("the engine closed the connection without an answer, and is gone") from error

    async def close(self) -> None:
        """End all connections, and wait until they are closed."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self._idle.clear()
        for connection in tuple(self._connections):
            connection.cancel()
        if self._connections:  # each leaves when the loop has closed its socket
            self._emptied = asyncio.Event()
            await self._emptied.wait()

    def last_heard(self, url: str) -> float:
        """When the last byte came from this origin, by the steady clock; 0: never."""
        latest = max((one.heard for one in self._connections if one.origin == url), default=0.0)
        return max(latest, self._heard.get(url, 0.0))

    def _take_idle(self, origin: str) -> "_Connection | None":
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()  # the last one used: the others age out
            if connection.usable:
                return connection
        return None

    async def _connect(self, origin: str) -> "_Connection":
        parts = urlsplit(origin)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, origin, loop), parts.hostname or "", parts.port or 80
                )
        except TimeoutError as error:
            raise EngineTimedOut("the engine did not accept a connection in time") from error
        except OSError as error:
            raise EngineUnreachable(f"the engine is not reachable: {error.strerror or error}") from error
        self._connections.add(connection)
        self._arm()
        if self._check is not None:
            try:
                await connection.prove(self._check)
            except BaseException:
                connection.cancel()
                raise
        return connection

    def put_idle(self, connection: "_Connection") -> None:
        """Keep a connection for the next request to its origin."""
        idle = self._idle.get(connection.origin)
        if idle is None:
            idle = self._idle[connection.origin] = deque()
        if len(idle) >= self._limits.idle_per_origin:
            connection.cancel()
        else:
            idle.append(connection)

    def forget(self, connection: "_Connection") -> None:
        """It is closed."""
        self._heard[connection.origin] = max(connection.heard, self._heard.get(connection.origin, 0.0))
        if len(self._heard) > _MOST_ORIGINS:
            del self._heard[next(iter(self._heard))]
        self._connections.discard(connection)
        if self._emptied is not None and not self._connections:
            self._emptied.set()
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.origin]

    def _arm(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._limits.sweep_seconds, self._sweep)

    def _sweep(self) -> None:
        """One timer for all connections: cheaper than one a request, and exact enough for time-outs of seconds."""
        self._sweeper = None
        now = monotonic()
        for connection in tuple(self._connections):
            silent = now - connection.last_active
            if connection.busy and silent > self._limits.silence_seconds:
                connection.fail(EngineTimedOut(f"the engine was silent for {self._limits.silence_seconds:.0f} seconds"))
            elif not connection.busy and silent > self._limits.idle_seconds:
                connection.cancel()
        if self._connections:
            self._arm()


class _StaleConnection(Exception):
    """The connection closed before a byte of the answer came."""


class _Answer:
    __slots__ = (
        "_connection",
        "buffered_bytes",
        "chunks",
        "complete",
        "consumer",
        "error",
        "first",
        "headers",
        "status",
        "waiter",
    )

    def __init__(self, connection: "_Connection", first: FirstConsumer | None) -> None:
        self._connection = connection
        self.first = first  # until something has come
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []
        self.buffered_bytes = 0
        self.complete = False
        self.error: BaseException | None = None
        self.consumer: Consumer | None = None  # while something waits for the next chunk
        self.waiter: asyncio.Future[None] | None = None  # done when something has come, or nothing more will

    async def next_chunk(self, consumer: Consumer | None = None) -> bytes:
        while not self.chunks:
            if self.complete:
                return b""
            if self.error is not None:
                raise self.error
            self.consumer = consumer
            self.waiter = waiter = self._connection.loop.create_future()
            await waiter
        return self._take()

    def take_whole(self) -> bytes | None:
        return self._take() if self.complete else None

    async def read(self, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while chunk := await self.next_chunk():
            size += len(chunk)
            if size > limit_bytes:
                self.cancel()
                raise EngineDisconnected(f"the engine's answer is longer than {limit_bytes} bytes")
            parts.append(chunk)
        return b"".join(parts)

    def cancel(self) -> None:
        if not self.complete:
            self._connection.fail(EngineDisconnected("cancelled"))

    def add(self, parts: list[bytes]) -> None:
        """More of the body has come; `parts` is emptied."""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self.first is not None:
            first, self.first = self.first, None
            if not self.complete and first(self, data):
                return
        if self.consumer is not None and self.consumer(data):
            return
        self.chunks.append(data)
        self.buffered_bytes += len(data)
        if self.waiter is not None:
            self.wake()

    def wake(self) -> None:
        waiter, self.waiter, self.consumer = self.waiter, None, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> bytes:
        chunks = self.chunks
        chunk = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.buffered_bytes = 0
        if not self.complete:
            self._connection.resume()
        return chunk


class _Connection(asyncio.Protocol):
    """One connection, one request at a time; the httptools callbacks are its `on_...` methods.

    A read may hold many parts of a body: they are collected by a list's own method and handled together after the read.
    """

    def __init__(self, pool: PooledUpstream, origin: str, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.loop = loop
        self.last_active = monotonic()
        self.heard = 0.0  # when its last byte came
        self._used = False  # for a request before this one
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []  # of the body, in the read that is being parsed
        self.on_body = self._parts.append  # httptools looks its callbacks up once, here
        self._parser = httptools.HttpResponseParser(self)
        self._answer: _Answer | None = None
        self._bodiless = 0  # bytes since the request, or since some of the body came: a head, a chunk's extension, trailers
        self._reading = True

    @property
    def busy(self) -> bool:
        return self._answer is not None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def prove(self, check: CheckPeer) -> None:
        """In a thread: it reads tables of the kernel. Raises what `check` raises, or EngineUnreachable."""
        assert self._transport is not None  # noqa: S101  # it is connected
        ours, theirs = (self._transport.get_extra_info(name)[:2] for name in ("sockname", "peername"))
        await asyncio.to_thread(check, self.origin, ours, theirs)
        if not self.usable:
            raise EngineUnreachable("the engine closed the connection at once")

    async def ask(self, payload: bytes, first: FirstConsumer | None = None) -> _Answer:
        assert self._transport is not None  # noqa: S101  # the pool only hands out connected ones
        self._answer = answer = _Answer(self, first)
        self._parts.clear()
        self._bodiless = 0
        self.last_active = monotonic()
        self._transport.write(payload)
        try:
            while answer.status == 0:
                if answer.error is not None:
                    if self._used and isinstance(answer.error, _StaleConnection):
                        return await self._pool.ask_again(self.origin, payload, first)
                    raise answer.error
                answer.waiter = waiter = self.loop.create_future()
                await waiter
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return answer

    def cancel(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: BaseException) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.complete:
            answer.error = error
            answer.wake()
        self.cancel()

    def resume(self) -> None:
        if not self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without being a subclass

    def data_received(self, data: bytes) -> None:
        self.heard = self.last_active = monotonic()
        answer = self._answer
        if answer is None:  # nothing was asked: do not trust what else comes on this connection
            self.cancel()
            return
        problem: str | None = None
        self._bodiless += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            problem = "the engine's answer is not HTTP"
        except httptools.HttpParserUpgrade:
            problem = "the engine's answer is not HTTP/1.1"
        if self._parts and self._answer is not None:
            self._bodiless = 0
            answer.add(self._parts)
            if answer.buffered_bytes > _BUFFER_HIGH and self._reading and self._transport is not None:
                self._reading = False
                self._transport.pause_reading()
        elif self._bodiless > _MOST_HEAD_BYTES and self._answer is not None:
            problem = _NO_BODY if answer.status else _LONG_HEAD
        if problem is not None:
            self.fail(EngineDisconnected(problem))

    def eof_received(self) -> None:
        answer = self._answer
        if answer is not None and answer.status and self._ends_with_connection(answer):
            self.on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio names it
        self._pool.forget(self)
        answer = self._answer
        if answer is not None:
            stale = answer.status == 0 and not answer.headers
            text = "the engine closed the connection in the middle of its answer"
            self.fail(_StaleConnection() if stale else EngineDisconnected(text))
        self._transport = None

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if answer is not None and not answer.status:  # else a field after the body
            answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer = self._answer
        if answer is None:
            return
        status = self._parser.get_status_code()
        if status < 200:  # noqa: PLR2004  # 1xx: the real answer follows
            answer.headers.clear()
            return
        if len(answer.headers) > _MOST_HEADERS or (
            self._bodiless > _MOST_HEAD_BYTES < sum(len(name) + len(value) for name, value in answer.headers)
        ):
            self.fail(EngineDisconnected(_LONG_HEAD))
            return
        answer.status = status
        answer.wake()

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None or answer.status == 0:
            return
        self._answer = answer.consumer = None  # the end goes to the task that reads
        self._used = True
        answer.complete = True
        if self._parts:
            answer.add(self._parts)
        answer.wake()
        if self.usable and self._parser.should_keep_alive():
            self.resume()
            self._pool.put_idle(self)
        else:
            self.cancel()

    @staticmethod
    def _ends_with_connection(answer: _Answer) -> bool:
        return not any(
            name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
            for name, value in answer.headers
        )
