"""Requests hidden in other requests, and fields that come where a proxy in front would not look for them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.gateway.memory import Caller, MemoryEngine, World, echo, json_reads, make_world, post, read_answers, run, settle
from tests.gateway.scripted_engine import COMPLETION

from aimgpu.gateway.auth import Caller as KeyHolder
from aimgpu.gateway.auth import KeyTable
from aimgpu.keyfile import hash_key

KEY = "k" * 40
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
BODY = json.dumps(CHAT).encode()
HIDDEN = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
# Each: the framing of a request whose body is HIDDEN to one reader, and the next request to another.
PAIRS: dict[str, bytes] = {
    "length and chunks": b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" % (len(HIDDEN) + 5) + HIDDEN,
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two codings": b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a coding after chunks": b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a coding with a space before its colon": b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a coding on a folded line": b"transfer-encoding:\r\n chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a coding after a tab": b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "an unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a list of lengths": b"content-length: 0, %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a length with a sign": b"content-length: +0\r\n\r\n" + HIDDEN,
    "a length in hexadecimal": b"content-length: 0x0\r\n\r\n" + HIDDEN,
    "a negative length": b"content-length: -1\r\n\r\n" + HIDDEN,
    "a length beyond 64 bits": b"content-length: 18446744073709551616\r\n\r\n" + HIDDEN,
    "a length with a line break": b"content-length: 0\rx: y\r\n\r\n" + HIDDEN,
    "a chunk of another size": b"transfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n" + HIDDEN,
    "a chunk with a sign": b"transfer-encoding: chunked\r\n\r\n-0\r\n\r\n" + HIDDEN,
    "a chunk in C's hexadecimal": b"transfer-encoding: chunked\r\n\r\n0x0\r\n\r\n" + HIDDEN,
    "a chunk beyond 64 bits": b"transfer-encoding: chunked\r\n\r\n10000000000000000\r\n\r\n" + HIDDEN,
    "a chunk that ends with a line feed": b"transfer-encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n" + HIDDEN,
    "a space in a name": b"x y: z\r\ncontent-length: 0\r\n\r\n" + HIDDEN,
    "no name": b": y\r\ncontent-length: 0\r\n\r\n" + HIDDEN,
    "a zero byte": b"x: a\x00b\r\ncontent-length: 0\r\n\r\n" + HIDDEN,
}


async def make_gateway(**fields: Any) -> World:
    return make_world(MemoryEngine(lambda _path, _body: json_reads(COMPLETION)), **fields)


@pytest.mark.parametrize("framed", PAIRS.values(), ids=PAIRS)
def test_a_request_that_can_be_framed_in_two_ways_is_refused_and_nothing_of_it_served(framed: bytes) -> None:
    async def main() -> tuple[list[int], list[Any], bool]:
        world = await make_gateway()
        caller = Caller(world.gateway)
        await caller.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + framed)
        await settle(40)
        answers = read_answers(caller.transport.data, ["POST"] * 3)
        return [answer.status for answer in answers], world.engine.asked, caller.transport.closed

    statuses, asked, closed = run(main())
    assert statuses == [400]
    assert asked == []
    assert closed, "where a next request would begin is not known"


@pytest.mark.parametrize("framed", PAIRS.values(), ids=PAIRS)
def test_the_same_comes_out_where_it_comes_in_byte_by_byte(framed: bytes) -> None:
    async def main() -> tuple[list[int], list[Any]]:
        world = await make_gateway()
        caller = Caller(world.gateway)
        for byte in b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + framed:
            if not caller.transport.closed:
                caller.protocol.data_received(bytes([byte]))
        await settle(40)
        return [answer.status for answer in read_answers(caller.transport.data, ["POST"] * 3)], world.engine.asked

    assert run(main()) == ([400], [])


def test_what_follows_a_whole_request_is_the_next_one() -> None:
    """Two right requests in one read: no attack, and both are answered."""

    async def main() -> list[int]:
        world = await make_gateway()
        written = await Caller(world.gateway).ask(HIDDEN + HIDDEN, answers=2)
        return [answer.status for answer in read_answers(written, ["POST", "POST"])]

    assert run(main()) == [200, 200]


TRAILED = (
    b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%btransfer-encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n%b\r\n\r\n"
)


@pytest.mark.parametrize(
    "trailer",
    [
        f"authorization: Bearer {KEY}".encode(),
        f"x-api-key: {KEY}".encode(),
        b"host: evil.example",
        b"x-aimgpu-priority: nonsense",
        b"content-encoding: gzip",
        b"origin: http://evil.example\r\ncontent-type: text/plain",
    ],
    ids=["key", "other key", "host", "priority", "encoding", "origin"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/tokenize"])
def test_fields_after_a_body_are_no_headers(path: str, trailer: bytes) -> None:
    """A proxy that checks or sets headers has let the head pass before these come."""
    fields = CHAT | {"max_tokens": 5, "prompt": "x", "stream": False}
    body = json.dumps(fields).encode()

    async def status(given: bytes, keys: KeyTable | None) -> int:
        world = await make_gateway(keys=keys)
        data = TRAILED % (path.encode(), given, len(body), body, trailer)
        [answer] = read_answers(await Caller(world.gateway).ask(data))
        return answer.status

    keys = KeyTable({hash_key(KEY): KeyHolder(name="ann")})
    assert run(status(b"", keys)) == 401
    assert run(status(f"authorization: Bearer {KEY}\r\n".encode(), keys)) in {200, 502}
    assert run(status(b"", KeyTable(required=False))) in {200, 502}


def test_the_application_never_sees_trailers_however_many_there_are() -> None:
    async def main() -> tuple[Any, int]:
        caller = Caller(echo)
        await caller.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        for number in range(2000):
            caller.protocol.data_received(b"t%d: %b\r\n" % (number, b"v" * 1000))
        held = len(caller.protocol._headers)
        await caller.send(b"\r\n")
        [answer] = read_answers(caller.transport.data)
        return answer.json, held

    said, held = run(main())
    assert [name for name, _ in said["headers"]] == ["host", "transfer-encoding"]
    assert said["body"] == "a"
    assert held == 2, "two megabytes of them are not kept"


@pytest.mark.parametrize(
    "names",
    [["Host", "HOST"], ["host", "Host"], ["host", "x", "host"]],
)
def test_two_hosts_are_found_however_they_are_written(names: list[str]) -> None:
    async def main() -> bytes:
        caller = Caller(echo)
        await caller.send("".join(["GET / HTTP/1.1\r\n", *(f"{name}: a\r\n" for name in names), "\r\n"]).encode())
        return caller.transport.data

    assert run(main()).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("version", ["0.9", "2.0", "3.0", "1.2", "9.9"])
def test_versions_that_this_server_does_not_speak_are_refused(version: str) -> None:
    async def main() -> bytes:
        caller = Caller(echo)
        await caller.send(f"GET / HTTP/{version}\r\nhost: x\r\n\r\n".encode())
        return caller.transport.data

    assert run(main()).startswith((b"HTTP/1.1 400", b"HTTP/1.1 505"))


def test_another_protocol_asked_for_behind_a_request_takes_nothing_of_it() -> None:
    """The second request wants an upgrade, which is ignored; the bytes behind its head are its body."""
    second = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    second += b"content-length: %d\r\n\r\n" % len(BODY) + BODY

    async def main() -> tuple[list[int], list[Any]]:
        world = await make_gateway()
        written = await Caller(world.gateway).ask(HIDDEN + second + HIDDEN, answers=3)
        return [answer.status for answer in read_answers(written, ["POST"] * 3)], [body for _, body in world.engine.asked]

    assert run(main()) == ([200, 200, 200], [CHAT, CHAT, CHAT])


@settings(max_examples=examples(25))
@given(
    st.lists(st.sampled_from([HIDDEN, b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"]), min_size=1, max_size=5),
    st.data(),
)
def test_requests_in_a_row_are_each_answered_once_and_in_order(sent: list[bytes], data: st.DataObject) -> None:
    """However they are cut into reads; the rest of the row stays out while one waits."""
    row = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(row)), max_size=6)))
    reads = [row[start:end] for start, end in zip([0, *cuts], [*cuts, len(row)], strict=True)]

    async def main() -> list[bytes]:
        world = await make_gateway()
        caller = Caller(world.gateway)
        await caller.send(*[read for read in reads if read])
        for _ in range(200):
            if caller.state.total_requests == len(sent):
                break
            await settle(5)
        methods = [one.split(b" ", 1)[0].decode() for one in sent]
        return [answer.body for answer in read_answers(caller.transport.data, methods)]

    kinds = ["chat.completion" if one is HIDDEN else "list" for one in sent]
    assert [json.loads(body)["object"] for body in run(main())] == kinds


def test_nothing_is_read_behind_a_request_that_closes() -> None:
    async def main() -> tuple[int, int, bool]:
        world = await make_gateway()
        caller = Caller(world.gateway)
        await caller.send(post("/v1/chat/completions", CHAT, "connection: close") + HIDDEN)
        await settle(40)
        return caller.transport.data.count(b"HTTP/1.1 200"), len(world.engine.asked), caller.transport.closed

    assert run(main()) == (1, 1, True)


@pytest.mark.parametrize("value", ["100-continue", "100-Continue"])
def test_leave_to_send_is_given_in_any_spelling_and_before_the_body_only(value: str) -> None:
    async def main() -> tuple[bytes, bytes]:
        caller = Caller(echo)
        head = f"POST / HTTP/1.1\r\nhost: x\r\nexpect: {value}\r\ncontent-length: 2\r\n\r\n".encode()
        await caller.send(head)
        invited = caller.transport.data
        await caller.send(b"ab")
        at_once = Caller(echo)
        await at_once.send(head + b"ab")
        return invited, at_once.transport.data

    invited, at_once = run(main())
    assert invited == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert at_once.startswith(b"HTTP/1.1 200")
