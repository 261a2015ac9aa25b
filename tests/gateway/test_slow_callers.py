"""Callers that hold a connection without using it: heads, line breaks and bodies that trickle in, answers that are not read.

Time is a number that each test moves; no test waits.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from tests.gateway.memory import Caller, MemoryEngine, World, echo, json_reads, make_world, post, read_answers, run, settle
from tests.gateway.scripted_engine import COMPLETION
from uvicorn.server import ServerState

from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.auth import Caller as KeyHolder
from aimgpu.gateway.auth import KeyTable
from aimgpu.gateway.body import BodyLimits
from aimgpu.gateway.http import server
from aimgpu.keyfile import hash_key

KEY = "k" * 40


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, caller: Caller, seconds: float) -> None:
        """As the connection's timer sees it, tick by tick, until it is closed."""
        end = self.now + seconds
        while self.now < end and not caller.transport.closed:
            self.now = min(self.now + server._TICK_SECONDS, end)
            caller.protocol._tick()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server, "monotonic", clock)
    return clock


def make_gateway(**settings: Any) -> World:
    return make_world(MemoryEngine(lambda _path, _body: json_reads(COMPLETION)), **settings)


async def answered(caller: Caller) -> None:
    while not caller.state.total_requests:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "drip",
    [b"x: y\r\n", b"x", b"x-long-name-that-goes-on", b"\r\nx: "],
    ids=["header by header", "byte by byte", "one name", "in the middle of values"],
)
def test_a_head_that_trickles_in_is_cut_off_after_its_time(clock: Clock, drip: bytes) -> None:
    async def main() -> float:
        caller = Caller(echo)
        began = clock.now
        await caller.send(b"GET / HTTP/1.1\r\nhost: x\r\na")
        while not caller.transport.closed:
            clock.pass_time(caller, 1.0)
            await caller.send(drip.replace(b"\r\nx: ", b": y\r\nx"))
        [answer] = read_answers(caller.transport.data)
        assert answer.status in {408, 400}
        return clock.now - began

    assert run(main()) <= server.HEAD_SECONDS + server._TICK_SECONDS


def test_an_empty_line_before_a_head_ends_the_connection() -> None:
    async def main() -> tuple[bytes, bool]:
        caller = Caller(echo)
        await caller.send(b"\r\n")
        return caller.transport.data, caller.transport.closed

    written, closed = run(main())
    assert written.startswith(b"HTTP/1.1 400 ")
    assert closed


def test_a_second_request_has_the_whole_time_for_its_head(clock: Clock) -> None:
    async def main() -> bytes:
        caller = Caller(echo)
        for _ in range(4):
            await caller.send(b"GET / HTTP/1.1\r\nhost: x\r\n")
            clock.pass_time(caller, server.HEAD_SECONDS * 0.7)
            await caller.send(b"\r\n")
            clock.pass_time(caller, server.HEAD_SECONDS * 0.7)
        return caller.transport.data

    assert run(main()).count(b"HTTP/1.1 200 OK") == 4


def test_a_head_that_trickles_in_behind_a_request_ends_the_connection(clock: Clock) -> None:
    async def main() -> bool:
        never = asyncio.Event()

        async def hang(_scope: Any, _receive: Any, _send: Any) -> None:
            await never.wait()

        caller = Caller(hang)
        await caller.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT")
        clock.pass_time(caller, server.HEAD_SECONDS * 2)
        caller.leave()
        never.set()
        await settle()
        return caller.transport.data == b""

    assert run(main())


def test_a_connection_that_never_sends_anything_is_closed(clock: Clock) -> None:
    async def main() -> tuple[bool, bool]:
        caller = Caller(echo)
        clock.pass_time(caller, caller.protocol._keep_alive_seconds - 1)
        early = caller.transport.closed
        clock.pass_time(caller, 10)
        return early, caller.transport.closed

    assert run(main()) == (False, True)


@pytest.mark.parametrize("framing", ["content-length: 50", "transfer-encoding: chunked"])
@pytest.mark.parametrize("begun", [b"", b"{"], ids=["nothing of it", "a byte of it"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/responses"])
def test_a_body_that_does_not_come_is_not_waited_for(path: str, framing: str, begun: bytes) -> None:
    async def main() -> int:
        settings = GatewaySettings(body=BodyLimits(receive_seconds=0.02))
        world = make_gateway(settings=settings)
        caller = Caller(world.gateway)
        part = begun and (b"1\r\n{\r\n" if "chunked" in framing else begun)
        caller.protocol.data_received(f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{framing}\r\n\r\n".encode() + part)
        await answered(caller)
        assert not world.engine.asked
        [answer] = read_answers(caller.transport.data)
        return answer.status

    assert run(main()) == 408


def test_a_body_that_does_not_come_gives_its_keys_place_back() -> None:
    async def main() -> list[int]:
        keys = KeyTable({hash_key(KEY): KeyHolder(name="ann", concurrency=1)})
        world = make_gateway(keys=keys, settings=GatewaySettings(body=BodyLimits(receive_seconds=1.0)))  # outlasts the other
        slow = Caller(world.gateway)
        bearer = f"authorization: Bearer {KEY}"
        slow.protocol.data_received(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{bearer}\r\ncontent-length: 9\r\n\r\n".encode()
        )
        await settle()
        body = {"model": "chat", "messages": [{"role": "user", "content": "?"}]}
        during = await world.ask("/v1/chat/completions", body, bearer)
        await answered(slow)
        after = await world.ask("/v1/chat/completions", body, bearer)
        return [during.status, after.status]

    assert run(main()) == [429, 200]


def test_an_answer_that_is_not_read_is_given_up(clock: Clock) -> None:
    """Closing would wait for the caller to read the rest, and keep all of it in memory for as long."""

    async def main() -> tuple[bool, bool]:
        caller = Caller(echo)
        caller.transport.unsent = 50_000_000
        await caller.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert caller.transport.closed  # which a socket with a full buffer is not before it is empty
        caller.transport.closed = False
        clock.pass_time(caller, caller.protocol._keep_alive_seconds)
        early = caller.transport.aborted
        clock.pass_time(caller, 10)
        return early, caller.transport.aborted

    assert run(main()) == (False, True)


def test_a_caller_that_reads_slowly_gets_all_of_it(clock: Clock) -> None:
    async def main() -> bool:
        caller = Caller(echo)
        caller.transport.unsent = 1_000_000
        await caller.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(100):
            clock.pass_time(caller, 60.0)
            caller.transport.unsent -= 10_000
        return caller.transport.aborted

    assert not run(main())


def test_what_a_refused_caller_still_sends_is_not_kept(clock: Clock) -> None:
    async def main() -> tuple[int, bool, bool]:
        world = make_gateway(settings=GatewaySettings(body=BodyLimits(max_bytes=1000)))
        caller = Caller(world.gateway)
        written = await caller.ask(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5000000\r\n\r\n")
        [answer] = read_answers(written)
        for _ in range(50):
            await caller.send(b"x" * 100_000)
        assert len(caller.transport.data) == len(written), "it is not answered again"
        assert caller.transport.ended, "it is told that no more is read"
        clock.pass_time(caller, 200.0)
        return answer.status, caller.transport.paused, caller.transport.closed

    assert run(main()) == (413, False, True)


def test_a_body_nobody_reads_is_not_let_in() -> None:
    async def main() -> tuple[bool, int]:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await go_on.wait()
            await echo(scope, receive, send)

        caller = Caller(slow)
        await caller.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n")
        await begun.wait()
        sent = 0
        while not caller.transport.paused:
            await caller.send(b"x" * 10_000)
            sent += 10_000
        held = caller.transport.paused
        go_on.set()
        while sent < 300_000:
            await settle()
            assert not caller.transport.paused
            await caller.send(b"x" * 10_000)
            sent += 10_000
        await settle()
        [answer] = read_answers(caller.transport.data)
        return held, len(answer.json["body"])

    assert run(main()) == (True, 300_000)


def test_requests_in_a_row_are_let_in_one_by_one() -> None:
    async def main() -> tuple[bool, bool, int]:
        go_on = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await go_on.wait()
            await echo(scope, receive, send)

        caller = Caller(slow)
        await caller.send(post("/1", {}), post("/2", {}))
        waits = caller.transport.paused
        go_on.set()
        await settle(40)
        answers = read_answers(caller.transport.data, ["POST", "POST"])
        assert [answer.json["target"] for answer in answers] == ["/1", "/2"]
        return waits, caller.transport.paused, len(answers)

    assert run(main()) == (True, False, 2)


def test_a_connection_that_waits_for_no_answer_is_closed_for_a_new_one(clock: Clock) -> None:
    async def main() -> None:
        state = ServerState()
        callers = [Caller(echo, state=state, most_connections=3) for _ in range(3)]
        await callers[0].send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")  # its body has not come
        clock.now += 1
        await callers[1].ask(post("/", b""))  # answered a second after the last connected
        Caller(echo, state=state, most_connections=3)
        assert [one.transport.closed for one in callers] == [False, False, True]

    run(main())


def test_where_every_connection_is_in_use_a_new_one_is_refused() -> None:
    async def main() -> None:
        state = ServerState()
        busy = [Caller(echo, state=state, most_connections=2) for _ in range(2)]
        for one in busy:
            await one.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        late = Caller(echo, state=state, most_connections=2)
        assert late.transport.data.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"too_many_connections"' in late.transport.data
        assert late.transport.closed
        assert [one.transport.closed for one in busy] == [False, False]

    run(main())


@pytest.mark.parametrize(("open_files", "connections"), [(64, 16), (1024, 384), (65536, 32640), (2, 1)])
def test_callers_leave_files_for_everything_else(open_files: int, connections: int) -> None:
    assert server.most_connections(open_files) == connections
