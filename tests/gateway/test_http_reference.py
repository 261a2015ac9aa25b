"""The server's reading of HTTP/1.1 beside h11's: the same requests from the same bytes, and refusals where h11 refuses."""

import json
from dataclasses import dataclass
from typing import Any

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.gateway.memory import Caller, echo, read_answers, run, settle

METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"])
TOKENS = st.text(alphabet="abcXYZ09-_.!~*'", min_size=1, max_size=10).map(str.encode)
TARGETS = st.text(alphabet="abc/?=&%20.-_~:@!$'()*+,;", max_size=20).map(lambda text: b"/" + text.encode())
VALUES = st.text(alphabet="abc XYZ09,;=\"/()<>@[]{}?\t!#$%&'*+-.^_`|~:", max_size=20).map(lambda text: text.strip().encode())
BODIES = st.binary(max_size=40)


@dataclass(frozen=True)
class Read:
    """One request as a server understood it."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True)
class Reading:
    requests: tuple[Read, ...]
    refused: bool  # what came after them


def read_by_us(*reads: bytes) -> Reading:
    async def main() -> tuple[bytes, bool]:
        caller = Caller(echo)
        await caller.send(*reads)
        await settle(40)
        return caller.transport.data, caller.transport.closed

    data, _closed = run(main())
    found: list[Read] = []
    for answer in read_answers(data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""), ["POST"] * 20) if data else ():
        if answer.status != 200:
            return Reading(tuple(found), refused=answer.status >= 400)
        said: Any = answer.json
        headers = tuple((name, value.rstrip(" \t")) for name, value in said["headers"])  # taken off where a value is read
        found.append(Read(said["method"], said["target"], headers, said["body"].encode("latin-1")))
    return Reading(tuple(found), refused=False)


def read_by_h11(data: bytes) -> Reading:
    server = h11.Connection(our_role=h11.SERVER, max_incomplete_event_size=64 * 1024)
    server.receive_data(data)
    found: list[Read] = []
    request: h11.Request | None = None
    body = b""
    try:
        while True:
            event = server.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers)
                target = request.target.decode("latin-1").partition("?")[0]
                found.append(Read(request.method.decode(), target, headers, body))
                server.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                server.send(h11.EndOfMessage())
                if server.our_state is not h11.DONE or server.their_state is not h11.DONE:
                    return Reading(tuple(found), refused=False)
                server.start_next_cycle()
            else:
                return Reading(tuple(found), refused=False)
    except h11.RemoteProtocolError:
        return Reading(tuple(found), refused=True)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request that is right, its body framed in one of the two ways."""
    names = draw(st.lists(TOKENS.map(lambda token: b"x-" + token), max_size=4))
    lines = [b"host: example.org", *(name + b":" + draw(st.sampled_from([b"", b" ", b"\t"])) + draw(VALUES) for name in names)]
    body = draw(BODIES)
    if draw(st.booleans()):
        size = draw(st.integers(1, 9))
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        lines.append(b"Transfer-Encoding: chunked")
    else:
        framed = body
        lines.append(b"Content-Length: %d" % len(body))
    target = draw(TARGETS)
    return b"%b %b HTTP/1.1\r\n%b\r\n\r\n%b" % (draw(METHODS), target, b"\r\n".join(draw(st.permutations(lines))), framed)


@settings(max_examples=examples(30))
@given(st.lists(requests(), min_size=1, max_size=3))
def test_right_requests_are_read_as_h11_reads_them(sent: list[bytes]) -> None:
    data = b"".join(sent)
    ours, theirs = read_by_us(data), read_by_h11(data)
    assert ours == theirs
    assert len(ours.requests) == len(sent)


@settings(max_examples=examples(25))
@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_where_reads_are_cut_makes_no_difference(sent: list[bytes], sizes: list[int]) -> None:
    data, reads, at = b"".join(sent), [], 0
    left = data
    while left:
        size = sizes[at % len(sizes)]
        reads.append(left[:size])
        left = left[size:]
        at += 1
    assert read_by_us(*reads) == read_by_us(data)


SPOILS = [b"\x00", b"\n", b"\r", b" ", b"\t", b":", b"\x7f", b"\xff", b"chunked", b"0", b"-1", b"+", b"\r\n", b"\r\n\r\n", b"G"]


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    data = draw(requests())
    at, kind = draw(st.integers(0, len(data))), draw(st.integers(0, 2))
    piece = draw(st.sampled_from(SPOILS))
    if kind == 0:
        return data[:at] + piece + data[at:]
    return data[:at] + (piece if kind == 1 else b"") + data[at + 1 :]


def _same_requests(ours: Reading, theirs: Reading) -> bool:
    """All that ours took, h11 took as the same; where h11 refuses, ours has not gone on."""
    shared = min(len(ours.requests), len(theirs.requests))
    if ours.requests[:shared] != theirs.requests[:shared]:
        return False
    return len(ours.requests) <= len(theirs.requests)


@settings(max_examples=examples(100))
@given(spoiled())
@example(b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ncontent-length: 0\r\n\r\n")
@example(b"GET / HTTP/1.1\nhost: x\n\n")
@example(b"\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n")
@example(b"\rGET / HTTP/1.1\r\nhost: x\r\n\r\n")
@example(b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n")
@example(b"GET /  HTTP/1.1\r\nhost: x\r\n\r\n")
@example(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
@example(b"GET / HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n")
def test_a_spoiled_request_is_never_read_as_another_than_h11_reads(data: bytes) -> None:
    """Stricter than h11 is fine. What h11 refuses, or reads as another request, must not reach a model."""
    ours, theirs = read_by_us(data), read_by_h11(data)
    assert _same_requests(ours, theirs), (data, ours, theirs)


POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
REFUSED = {
    "a coding beside chunked": POST + b"transfer-encoding: xchunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a compressed body": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a leading CR": b"\rGET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n",
    "two spaces before the version": b"GET /  HTTP/1.1\r\nhost: x\r\n\r\n",
    "another host in the target": b"GET http://evil.example/ HTTP/1.1\r\nhost: x\r\n\r\n",
    "a user in the target": b"GET http://x@evil.example/ HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_two_servers_may_read_differently_is_refused_however_it_is_cut(data: bytes, size: int) -> None:
    assert read_by_us(*(data[at : at + size] for at in range(0, len(data), size))) == Reading((), refused=True)


BEFORE = {
    "no body": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "a body": POST + b"content-length: 21\r\n\r\nG\r\n\r\nGET / HTTP/1.1\r\n",
    "chunks": POST + b"transfer-encoding: chunked\r\n\r\n7;a=b\r\n\r\n\r\nGET\r\n0\r\n\r\n",
    "trailers": POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: y\r\n\r\n",
    "an upgrade": b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
}
SECOND = b"GET /second HTTP/1.1\r\nhost: x\r\n\r\n"
EMPTY_LINES = {"an empty line": b"\r\n" + SECOND, "a line feed": b"\n" + SECOND, "empty lines": b"\r\n\r\n" + SECOND}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("data", (REFUSED | EMPTY_LINES).values(), ids=REFUSED | EMPTY_LINES)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_it_is_refused_behind_another_request_too(before: bytes, data: bytes, size: int) -> None:
    sent = before + data
    assert len(read_by_us(*(sent[at : at + size] for at in range(0, len(sent), size))).requests) <= 1
    good = before + SECOND
    assert len(read_by_us(*(good[at : at + size] for at in range(0, len(good), size))).requests) == 2


def test_a_body_of_many_ends_is_read_and_what_comes_behind_it_in_one_read_is_not() -> None:
    body = b"".join(b"4\r\n\r\n\r\n\r\n" for _ in range(200)) + b"0\r\n\r\n"
    many = POST + b"transfer-encoding: chunked\r\n\r\n" + body
    assert [len(one.body) for one in read_by_us(many).requests] == [800]
    assert len(read_by_us(many, SECOND).requests) == 2
    assert len(read_by_us(many + SECOND).requests) <= 1


def test_a_whole_url_of_the_same_host_is_taken() -> None:
    read = read_by_us(b"GET http://Example.org:80/a?b HTTP/1.1\r\nhost: example.org:80\r\n\r\n")
    assert [one.target for one in read.requests] == ["/a"]


@settings(max_examples=examples(40))
@given(st.binary(min_size=1, max_size=200))
def test_whatever_bytes_come_they_are_answered_or_waited_for(data: bytes) -> None:
    async def main() -> tuple[bytes, bool]:
        caller = Caller(echo)
        await caller.send(data)
        return caller.transport.data, caller.transport.closed

    written, closed = run(main())
    for answer in read_answers(written, ["POST"] * 20) if written else ():
        assert answer.status in {200, 400, 405, 431}
        if answer.status != 200:
            assert closed
            assert json.loads(answer.body)["error"]["code"]
