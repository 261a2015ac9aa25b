"""The client to the engines over real sockets: what is an answer, what is none, and which connections are used again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from aimgpu.errors import EngineDisconnected, EngineFailed, EngineTimedOut, EngineUnreachable
from aimgpu.gateway.http.upstream import PooledUpstream, UpstreamAnswer, UpstreamLimits, UpstreamTarget

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nHello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nHel\r\n2\r\nlo\r\n0\r\n\r\n"
TO_END = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nHello"
MOST = 1 << 20


@dataclass
class Engine:
    """Answers each request with the next of its replies; None breaks off."""

    replies: list[bytes | None]
    closes: bool = False  # after each reply
    asked: list[bytes] = field(default_factory=list)
    connections: int = 0
    target: UpstreamTarget = field(init=False)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.asked.append(head + await reader.readexactly(int(head.rpartition(b"content-length: ")[2])))
                reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                if reply is not None:
                    writer.write(reply)
                    await writer.drain()
                if reply is None or self.closes:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def running(engine: Engine, **limits: float) -> AsyncIterator[PooledUpstream]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.target = UpstreamTarget.make(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/x", ((b"a", b"b"),))
    upstream = PooledUpstream(UpstreamLimits(**limits))  # type: ignore[arg-type]
    try:
        yield upstream
    finally:
        await upstream.close()
        server.close()


async def ask(upstream: PooledUpstream, engine: Engine, body: bytes = b"{}") -> tuple[int, bytes]:
    answer = await upstream.send(engine.target, body)
    try:
        return answer.status, await answer.read(MOST)
    finally:
        answer.cancel()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await main()

    asyncio.run(whole())


@pytest.mark.parametrize("reply", [OK, CHUNKED, TO_END], ids=["length", "chunks", "end of the connection"])
def test_an_answer_is_read_however_its_end_is_marked(reply: bytes) -> None:
    async def main() -> None:
        engine = Engine([reply], closes=reply is TO_END)
        async with running(engine) as upstream:
            assert await ask(upstream, engine, b'{"a": 1}') == (200, b"Hello")
            head, _, body = engine.asked[0].partition(b"\r\n\r\n")
            assert body == b'{"a": 1}'
            assert head.startswith(b"POST /x HTTP/1.1\r\nhost: 127.0.0.1:")
            assert b"\r\na: b\r\n" in head

    run(main)


@pytest.mark.parametrize("reply", [OK, CHUNKED])
def test_every_way_to_cut_an_answer_short_is_an_error_and_never_an_answer(reply: bytes) -> None:
    async def main() -> None:
        engine = Engine([reply], closes=True)
        async with running(engine) as upstream:
            for cut in range(len(reply)):
                engine.replies = [reply[:cut]]
                with pytest.raises(EngineDisconnected):
                    await ask(upstream, engine)

    run(main)


def test_an_answer_may_come_byte_by_byte_and_after_a_word_that_it_will() -> None:
    async def main() -> None:
        engine = Engine([b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + CHUNKED])
        async with running(engine) as upstream:
            answer = await upstream.send(engine.target, b"")
            assert (answer.status, answer.headers) == (200, [(b"transfer-encoding", b"chunked")])
            assert await answer.read(MOST) == b"Hello"

    run(main)


@pytest.mark.parametrize(
    "reply",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
    ids=["no HTTP", "no status", "no length", "no chunk", "another protocol", "TLS"],
)
def test_what_is_no_answer_is_a_broken_engine(reply: bytes) -> None:
    async def main() -> None:
        engine = Engine([reply], closes=True)
        async with running(engine) as upstream:
            with pytest.raises(EngineFailed):
                await ask(upstream, engine)

    run(main)


def test_connections_are_used_again_and_no_more_of_them_than_are_needed() -> None:
    async def main() -> None:
        engine = Engine([OK])
        async with running(engine) as upstream:
            for _ in range(10):
                assert await ask(upstream, engine) == (200, b"Hello")
            assert engine.connections == 1
            answers = await asyncio.gather(*(ask(upstream, engine) for _ in range(5)))
            assert {status for status, _ in answers} == {200}
            assert engine.connections <= 5

    run(main)


def test_an_idle_connection_that_the_engine_closed_is_replaced_and_the_request_sent_once_more() -> None:
    async def main() -> None:
        engine = Engine([OK, None, OK])
        async with running(engine) as upstream:
            assert await ask(upstream, engine, b"one") == (200, b"Hello")
            assert await ask(upstream, engine, b"two") == (200, b"Hello")
            assert [asked.rpartition(b"\r\n\r\n")[2] for asked in engine.asked] == [b"one", b"two", b"two"]
            assert engine.connections == 2

    run(main)


def test_a_new_connection_that_breaks_off_is_not_tried_again() -> None:
    async def main() -> None:
        engine = Engine([None])
        async with running(engine) as upstream:
            with pytest.raises(EngineDisconnected):
                await ask(upstream, engine)
            assert len(engine.asked) == 1

    run(main)


def test_only_so_many_idle_connections_are_kept() -> None:
    async def main() -> None:
        engine = Engine([OK])
        async with running(engine, idle_per_origin=2) as upstream:
            await asyncio.gather(*(ask(upstream, engine) for _ in range(8)))
            for _ in range(20):
                await asyncio.sleep(0)
            assert sum(len(idle) for idle in upstream._idle.values()) <= 2

    run(main)


def test_an_engine_that_is_silent_for_too_long_has_timed_out() -> None:
    async def main() -> None:
        engine = Engine([b""])
        async with running(engine, silence_seconds=0.02, sweep_seconds=0.01) as upstream:
            with pytest.raises(EngineTimedOut, match="silent"):
                await ask(upstream, engine)

    run(main)


def test_nobody_listens() -> None:
    async def main() -> None:
        engine = Engine([OK])
        async with running(engine):
            pass
        upstream = PooledUpstream()
        with pytest.raises(EngineUnreachable):
            await upstream.send(engine.target, b"")
        await upstream.close()

    run(main)


def test_an_answer_longer_than_its_bound_is_given_up() -> None:
    async def main() -> None:
        engine = Engine([OK])
        async with running(engine) as upstream:
            answer = await upstream.send(engine.target, b"")
            with pytest.raises(EngineDisconnected, match="longer than 4"):
                await answer.read(4)

    run(main)


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async def main() -> None:
        engine = Engine([OK + OK])
        async with running(engine) as upstream:
            for _ in range(3):
                assert await ask(upstream, engine) == (200, b"Hello")

    run(main)


def test_when_an_engine_was_last_heard_is_known_after_its_connection_is_gone() -> None:
    async def main() -> None:
        engine = Engine([OK], closes=True)
        async with running(engine) as upstream:
            url = engine.target.url
            assert upstream.last_heard(url) == 0.0
            await ask(upstream, engine)
            heard = upstream.last_heard(url)
            assert heard > 0
            await upstream.close()
            assert upstream.last_heard(url) == heard

    run(main)


def test_parts_go_to_their_consumer_in_order_and_the_end_to_the_task() -> None:
    async def main() -> None:
        parts = [b"part-%d;" % number for number in range(200)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        engine = Engine([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"])
        async with running(engine) as upstream:
            got: list[bytes] = []
            offered = 0

            def consume(data: bytes) -> bool:
                nonlocal offered
                offered += 1
                if offered % 3 == 0:
                    return False  # now and then the task has to take it
                got.append(data)
                return True

            def first(_answer: UpstreamAnswer, data: bytes) -> bool:
                return consume(data)

            answer = await upstream.send(engine.target, b"", first)
            while chunk := await answer.next_chunk(consume):
                got.append(chunk)
            assert b"".join(got) == b"".join(parts)
            assert answer.complete

    run(main)


def test_cancelling_a_request_closes_its_connection() -> None:
    async def main() -> None:
        engine = Engine([b""])
        async with running(engine) as upstream:
            task = asyncio.ensure_future(upstream.send(engine.target, b""))
            while not engine.asked:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(50):
                await asyncio.sleep(0)
            assert upstream._connections == set()

    run(main)


def with_headers(count: int) -> bytes:
    """A right answer with so many headers."""
    return OK.replace(b"\r\n", b"\r\n" + b"x: y\r\n" * (count - 1), 1)


@pytest.mark.parametrize(
    "reply",
    [
        with_headers(101),
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 12_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 4_000,
    ],
    ids=["too many headers", "a head without an end", "too many interim answers"],
)
def test_an_answer_with_too_long_a_head_is_an_error(reply: bytes) -> None:
    async def main() -> None:
        engine = Engine([reply])
        async with running(engine) as upstream:
            with pytest.raises(EngineDisconnected):
                await ask(upstream, engine)
            engine.replies = [with_headers(100)]
            assert await ask(upstream, engine) == (200, b"Hello")

    run(main)


BEGUN = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"


@pytest.mark.parametrize(
    "more",
    [b"0\r\nx: " + b"y" * 1_000_000, b"0\r\n" + b"x: y\r\n" * 100_000, b"2;" + b"y" * 1_000_000],
    ids=["one trailer", "trailers", "a chunk's extension"],
)
def test_an_answer_that_goes_on_without_a_body_is_given_up(more: bytes) -> None:
    """The parser puts a field together from all of its reads: twice as long takes four times as long."""

    async def main() -> None:
        engine = Engine([BEGUN + more], closes=True)
        async with running(engine) as upstream:
            with pytest.raises(EngineDisconnected, match="without any of the body"):
                await ask(upstream, engine)

    run(main)


def test_trailers_of_a_usual_length_and_small_parts_are_read() -> None:
    parts = b"".join(b"1;x=" + b"y" * 100 + b"\r\na\r\n" for _ in range(1000))
    reply = BEGUN + parts + b"0\r\n" + b"x: y\r\n" * 1000 + b"\r\n"

    async def main() -> None:
        engine = Engine([reply])
        async with running(engine) as upstream:
            for _ in range(3):
                assert await ask(upstream, engine) == (200, b"{}" + b"a" * 1000)
        assert engine.connections == 1

    run(main)
