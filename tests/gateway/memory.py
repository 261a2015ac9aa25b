"""A gateway whose callers and engines are transports in memory: real parsers and real framing, without sockets or threads."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11
from tests.gateway.conftest import TestRoutes
from tests.http_answer import HttpAnswer
from uvicorn.server import ServerState

from aimgpu.gateway.application import Gateway, GatewayDependencies, GatewaySettings
from aimgpu.gateway.auth import KeyTable
from aimgpu.gateway.http.asgi import Message, Receive, Scope, Send
from aimgpu.gateway.http.server import CallerProtocol, caller_config
from aimgpu.gateway.http.upstream import PooledUpstream, _Connection
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.routes import Backend

T = TypeVar("T")
_MANY_TURNS = 20_000
_READS_PER_TURN = 5
ENGINE_URL = "http://127.0.0.1:9"


class MemoryTransport(asyncio.Transport):
    """Keeps what is written. `unsent` is what a socket's buffer would still hold: a caller that does not read."""

    def __init__(self, written: Callable[[bytes], None] | None = None, peer: tuple[str, int] = ("127.0.0.1", 4711)) -> None:
        super().__init__({"peername": peer, "sockname": ("127.0.0.1", 8080)})
        self.data = b""
        self.unsent = 0
        self.closed = self.aborted = self.ended = self.paused = False
        self._written = written

    def write(self, data: Any) -> None:
        self.data += bytes(data)
        if self._written is not None:
            self._written(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True


class Caller:
    """One connection to an application, as the server's protocol sees it."""

    def __init__(
        self,
        application: Any,
        *,
        peer: tuple[str, int] = ("127.0.0.1", 4711),
        state: ServerState | None = None,
        most_connections: int | None = None,
    ) -> None:
        config = caller_config(application)
        config.limit_concurrency = most_connections
        config.load()
        self.state = state or ServerState()
        self.transport = MemoryTransport(peer=peer)
        self.protocol = CallerProtocol(config, self.state, {}, asyncio.get_running_loop())
        self.protocol.connection_made(self.transport)

    async def send(self, *reads: bytes) -> None:
        """Each as one read; what they begin runs as far as it comes by itself."""
        for data in reads:
            if self.transport.closed:
                return
            self.protocol.data_received(data)
            await settle()

    async def ask(self, data: bytes, answers: int = 1) -> bytes:
        """Send, and wait until so many answers are out or the connection is closed: what was written since."""
        before, wanted = len(self.transport.data), self.state.total_requests + answers
        self.protocol.data_received(data)
        await turns_until(lambda: self.state.total_requests >= wanted or self.transport.closed)
        return self.transport.data[before:]

    def leave(self) -> None:
        self.transport.closed = True
        self.protocol.connection_lost(None)


async def settle(turns: int = 12) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def turns_until(condition: Callable[[], bool]) -> None:
    """Turns of the loop and no time: what does not happen by itself would never come."""
    for _ in range(_MANY_TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing more happens")


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


def read_answers(data: bytes, methods: Sequence[str] = ("POST",)) -> list[HttpAnswer]:
    """What h11 reads from these bytes, at most one answer for each method; raises where they are not HTTP/1.1."""
    found = []
    client = h11.Connection(our_role=h11.CLIENT)
    client.receive_data(data)
    for method in methods:
        if not client.trailing_data[0]:
            break
        client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        found.append(_read_one(client))
        if client.our_state is not h11.DONE or client.their_state is not h11.DONE:
            break
        client.start_next_cycle()
    return found


def _read_one(client: h11.Connection) -> HttpAnswer:
    status, headers, body = 0, {}, b""
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(b"")  # the connection is closed, where it has not ended before
        elif isinstance(event, h11.Response):
            status, headers = event.status_code, {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return HttpAnswer(status, headers, body)


def post(path: str, body: object, *headers: str, host: str = "127.0.0.1") -> bytes:
    """`body`: bytes go as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json", *headers)
    return "\r\n".join((*lines, f"content-length: {len(data)}", "", "")).encode() + data


def json_reads(value: object, status: str = "200 OK") -> list[bytes]:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


def stream_reads(events: Iterable[bytes]) -> list[bytes]:
    """Each event as a read of its own."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%b\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]


@dataclass
class MemoryEngine(PooledUpstream):
    """The way to one engine: what it answers is a function of the request, read by read."""

    answer: Callable[[str, Any], Sequence[bytes]]  # path and body
    breaks_off: bool = False  # after what it answers
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    async def _connect(self, origin: str) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection(self, origin, loop)
        transport = MemoryTransport(lambda data: self._begin(connection, transport, data))
        connection.connection_made(transport)
        self._connections.add(connection)
        return connection

    async def close(self) -> None:
        """Nothing has to be waited for: there are no sockets."""

    def _begin(self, connection: _Connection, transport: MemoryTransport, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode()
        content = json.loads(body) if b"application/json" in head else body
        self.asked.append((path, content))
        asyncio.get_running_loop().call_soon(self._feed, connection, transport, iter(self.answer(path, content)))

    def _feed(self, connection: _Connection, transport: MemoryTransport, reads: Any) -> None:
        for _ in range(_READS_PER_TURN):
            if transport.closed:
                connection.connection_lost(None)
                return
            data = next(reads, None)
            if data is None:
                if self.breaks_off:
                    connection.eof_received()
                    connection.connection_lost(None)
                return
            connection.data_received(data)
        asyncio.get_running_loop().call_soon(self._feed, connection, transport, reads)


@dataclass
class Records:
    found: list[RequestRecord] = field(default_factory=list)

    def finished(self, record: RequestRecord) -> None:
        self.found.append(record)


@dataclass
class World:
    """A gateway with one model, `chat`, behind a memory engine."""

    gateway: Gateway
    routes: TestRoutes
    engine: MemoryEngine
    records: Records

    async def ask(self, path: str, body: object, *headers: str) -> HttpAnswer:
        written = await Caller(self.gateway).ask(post(path, body, *headers))
        [answer] = read_answers(written)
        return answer


def make_world(  # noqa: PLR0913 - what a test may choose
    engine: MemoryEngine,
    *,
    keys: KeyTable | None = None,
    settings: GatewaySettings | None = None,
    slots: int = 4,
    cache_field: str | None = None,
    takes_priority: bool = False,
    **fields: Any,
) -> World:
    """To be called within a loop."""
    routes, records = TestRoutes(), Records()
    dependencies = GatewayDependencies(keys=keys, observer=records, upstream=engine)
    gateway = Gateway(routes, settings or GatewaySettings(), dependencies)
    backend = Backend(
        instance_id="chat-0",
        url=ENGINE_URL,
        api_key="engine-key",
        slots=slots,
        cache_field=cache_field,
        takes_priority=takes_priority,
    )
    routes.put("chat", "ready", backends=(backend,), **fields)
    return World(gateway, routes, engine, records)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with what it was asked, for tests of the server alone."""
    body, more = b"", True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
    said = {"method": scope["method"], "target": scope["raw_path"].decode("latin-1"), "headers": headers}
    data = json.dumps({**said, "body": body.decode("latin-1")}).encode()
    length = (b"content-length", b"%d" % len(data))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json"), length]})
    await send({"type": "http.response.body", "body": data})


Application = Callable[[Scope, Receive, Send], Awaitable[None]]
