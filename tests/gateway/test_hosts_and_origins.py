"""Which names are this machine's, who is local, and what browsers' pages may do."""

import itertools
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.gateway.memory import Caller, MemoryEngine, json_reads, make_world, read_answers, run
from tests.gateway.scripted_engine import COMPLETION
from tests.http_answer import HttpAnswer

from aimgpu.errors import InvalidInput
from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.auth import KeyTable
from aimgpu.gateway.cors import parse_origins
from aimgpu.gateway.hosts import is_local, is_loopback, names_this_machine

OWN_NAMES = [
    "localhost",
    "LOCALHOST:8080",
    "chat.localhost",
    "127.0.0.1",
    "127.0.0.1:8080",
    "[::1]",
    "[::1]:8080",
    "10.1.2.3",
    "",
    socket.gethostname(),
    f"{socket.gethostname().upper()}:80",
]
FOREIGN_NAMES = [
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil-localhost",
    "xlocalhost",
    "localhost@evil.example",
    "evil.example#localhost",
    "[evil.example]",
    "0x7f.1",
    "127.1",
    "2130706433",
    "localhost.",
    "\u0131localhost",
]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_names_of_this_machine(name: str) -> None:
    assert names_this_machine(name.encode("latin-1"))


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_names_that_a_page_elsewhere_could_have(name: str) -> None:
    assert not names_this_machine(name.encode())


LABELS = st.text(alphabet="abc0123456789-", min_size=1, max_size=8)


@settings(max_examples=examples(35))
@given(st.lists(LABELS, max_size=4), st.sampled_from(["", ":80", ":8080"]))
def test_a_name_within_another_domain_is_never_ours(labels: list[str], port: str) -> None:
    assert not names_this_machine(".".join([*labels, "evil", "example"]).encode() + port.encode())


def _ask(host: str, path: str = "/v1/models", *headers: str, **settings: Any) -> HttpAnswer:
    async def main() -> HttpAnswer:
        world = make_world(
            MemoryEngine(lambda _path, _body: json_reads(COMPLETION)),
            keys=KeyTable(required=False),
            settings=GatewaySettings(**settings),
        )
        lines = [f"GET {path} HTTP/1.1", f"host: {host}", *headers, "", ""]
        written = await Caller(world.gateway).ask("\r\n".join(lines).encode())
        [answer] = read_answers(written, ["GET"])
        return answer

    return run(main())


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/chat", "/api/tags", "/api/ps", "/api/version", "/openapi.json", "/v1/openapi.json"]
)
def test_without_keys_only_this_machines_names_are_answered(path: str) -> None:
    assert _ask("localhost:8080", path).status == 200
    refused = _ask("rebound.evil.example", path)
    assert refused.status == 403
    assert b"aimgpu keys add" in refused.body


@pytest.mark.parametrize("path", ["/health", "/healthz", "/livez", "/docs"])
def test_what_needs_no_key_needs_no_name_either(path: str) -> None:
    assert _ask("rebound.evil.example", path).status == 200


FORWARDING = ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via"]


@pytest.mark.parametrize("header", FORWARDING)
@pytest.mark.parametrize("value", ["", "127.0.0.1", "for=127.0.0.1", "203.0.113.9"])
def test_a_forwarded_request_is_never_local_whatever_it_says_about_its_origin(header: str, value: str) -> None:
    scope = {"client": ("127.0.0.1", 1)}
    assert is_local(scope, {b"host": b"localhost"})
    assert not is_local(scope, {b"host": b"localhost", header.encode(): value.encode()})


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (("127.0.0.1", 1), True),
        (("127.9.9.9", 1), True),
        (("::1", 1), True),
        (("10.0.0.1", 1), False),
        (("0.0.0.0", 1), False),
        (("", 0), False),
        (None, False),
    ],
)
def test_who_connects_from_loopback(client: tuple[str, int] | None, expected: bool) -> None:  # noqa: FBT001
    assert is_local({"client": client}, {}) is expected


@pytest.mark.parametrize(
    ("name", "expected"), [("localhost", True), ("127.0.0.1", True), ("::1", True), ("example.org", False), ("", False)]
)
def test_addresses_of_this_machine_alone(name: str, expected: bool) -> None:  # noqa: FBT001
    assert is_loopback(name) is expected


ALLOWED = "https://chat.example.org"
SIMILAR = [
    "https://chat.example.org.evil.example",
    "https://evil-chat.example.org",
    "http://chat.example.org",
    "https://chat.example.org:444",
    "https://chat.example.org/",
    "https://chat.example.org@evil.example",
    "https://xchat.example.org",
    "null",
    "*",
    "",
    f"{ALLOWED} https://evil.example",
]


def _preflight(origin: str, method: str = "POST", path: str = "/v1/chat/completions") -> HttpAnswer:
    async def main() -> HttpAnswer:
        world = make_world(MemoryEngine(lambda _path, _body: []), settings=GatewaySettings(origins=parse_origins(ALLOWED)))
        lines = [f"OPTIONS {path} HTTP/1.1", "host: x", f"origin: {origin}", f"access-control-request-method: {method}", "", ""]
        written = await Caller(world.gateway).ask("\r\n".join(lines).encode())
        [answer] = read_answers(written, ["OPTIONS"])
        return answer

    return run(main())


@pytest.mark.parametrize("origin", SIMILAR)
def test_an_origin_that_looks_like_an_allowed_one_is_not(origin: str) -> None:
    refused = _preflight(origin)
    assert refused.status == 405
    assert not any(name.startswith("access-control") for name in refused.headers)
    listed = _ask("localhost", "/v1/models", f"origin: {origin}", origins=parse_origins(ALLOWED))
    assert not any(name.startswith("access-control") for name in listed.headers)


def test_an_allowed_origin_may_ask_for_every_path_and_its_answers_are_not_shared() -> None:
    for path, origin in itertools.product(("/v1/models", "/api/chat", "/v1/messages"), (ALLOWED, ALLOWED.upper())):
        allowed = _preflight(origin, path=path)
        assert allowed.status == 204
        assert allowed.headers["access-control-allow-origin"] == origin
        assert allowed.headers["vary"] == "origin"
        assert "content-length" not in allowed.headers, "an answer without a body by its status says nothing of its length"
    read = _ask("localhost", "/v1/models", f"origin: {ALLOWED}", origins=parse_origins(ALLOWED))
    assert (read.status, read.headers["access-control-allow-origin"]) == (200, ALLOWED)
    assert "access-control-allow-credentials" not in read.headers


def test_a_refusal_to_an_allowed_origin_can_be_read_by_its_page() -> None:
    refused = _ask("localhost", "/v1/models/nothing", f"origin: {ALLOWED}", origins=parse_origins(ALLOWED))
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (404, ALLOWED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        (" , ,", set()),
        ("https://a.example", {b"https://a.example"}),
        ("https://A.example/ , http://localhost:3000", {b"https://a.example", b"http://localhost:3000"}),
    ],
)
def test_origins_are_read_from_a_list(text: str, expected: set[bytes]) -> None:
    assert parse_origins(text) == expected


@pytest.mark.parametrize("text", ["https://*.example.org", "ftp://a", "//a", "https://a b", "https://a/path", "null"])
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_origins(f"https://fine.example,{text}")
