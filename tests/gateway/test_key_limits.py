"""What a key lets its holder do: how often, how many at once, which models, how important; and bytes of bodies over all."""

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.gateway.memory import MemoryEngine, World, json_reads, make_world, run
from tests.gateway.scripted_engine import COMPLETION

from aimgpu.domain import Priority
from aimgpu.errors import AimGpuError, BodyTooLarge, InvalidRequest, LoadShed, NotAuthenticated, RateExceeded, RequestTimedOut
from aimgpu.gateway.auth import ANYONE, Caller, KeyTable, caller_of, identify
from aimgpu.gateway.body import BodyLimits, ClientGone, HeldBytes, check_fields, parse_body, read_body
from aimgpu.gateway.caller_limits import CallerLimits, choose_priority, read_deadline
from aimgpu.keyfile import StoredKey, hash_key

KEY, OTHER = "a" * 40, "b" * 40
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "?"}]}


def refusal_of(act: Callable[[], object]) -> AimGpuError | None:
    try:
        act()
    except AimGpuError as error:
        return error
    return None


@settings(max_examples=examples(35))
@given(st.integers(1, 5), st.lists(st.booleans(), max_size=80))
def test_no_more_at_once_than_a_key_may_and_every_place_is_given_back(most: int, steps: list[bool]) -> None:
    limits, caller = CallerLimits(), Caller(name="ann", concurrency=most)
    running = 0
    for enters in steps:
        if enters:
            try:
                limits.enter(caller, 0.0)
            except RateExceeded:
                assert running == most
            else:
                running += 1
        elif running:
            limits.leave(caller)
            running -= 1
        assert running <= most
    for _ in range(running):
        limits.leave(caller)
    for _ in range(most):
        limits.enter(caller, 0.0)


@settings(max_examples=examples(35))
@given(st.floats(0.1, 20), st.lists(st.floats(0, 2), min_size=1, max_size=80))
def test_no_more_often_than_a_key_may_and_a_refusal_says_when(rate: float, gaps: list[float]) -> None:
    limits, caller, now, passed = CallerLimits(), Caller(name="ann", requests_per_second=rate), 0.0, 0
    for gap in gaps:
        now += gap
        refused = refusal_of(functools.partial(limits.enter, caller, now))
        if isinstance(refused, RateExceeded):
            assert refused.retry_after_seconds is not None
            assert 1 <= refused.retry_after_seconds <= 1 / rate + 1
        else:
            limits.leave(caller)
            passed += 1
        assert passed <= max(1.0, rate) + rate * now + 1e-6


def test_keys_do_not_use_up_each_others_limits() -> None:
    limits = CallerLimits()
    for name in ("ann", "bob", "eve"):
        limits.enter(Caller(name=name, concurrency=1), 0.0)
    with pytest.raises(RateExceeded):
        limits.enter(Caller(name="bob", concurrency=1), 0.0)
    unlimited = Caller(name="root")
    for _ in range(1000):
        limits.enter(unlimited, 0.0)
    limits.leave(unlimited)
    assert "root" not in limits._uses, "callers without limits are not counted"


def test_a_request_refused_for_its_rate_does_not_take_a_place() -> None:
    limits, caller = CallerLimits(), Caller(name="ann", concurrency=1, requests_per_second=1)
    limits.enter(caller, 0.0)
    limits.leave(caller)
    for _ in range(5):
        with pytest.raises(RateExceeded, match="a second"):
            limits.enter(caller, 0.0)
    limits.enter(caller, 1.0)


PRIORITIES = st.sampled_from(list(Priority))


@settings(max_examples=examples(35))
@given(st.none() | PRIORITIES, PRIORITIES, st.none() | PRIORITIES)
def test_a_header_never_lifts_a_request_above_its_key(own: Priority | None, of_model: Priority, asked: Priority | None) -> None:
    head = {} if asked is None else {b"x-aimgpu-priority": f" {asked.value.upper()} ".encode()}
    found = choose_priority(Caller(name="a", priority=own), of_model, head)
    assert own is None or found.rank <= own.rank
    if asked is None:
        assert found is (own or of_model)
    elif own is None or asked.rank <= own.rank:
        assert found is asked


@pytest.mark.parametrize("text", [b"0", b"-1", b"1.5", b"soon", b"", b"86400001", b"9" * 5000, b"\xd9\xa3", b"1_000", b"+5"])
def test_a_deadline_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_deadline({b"x-aimgpu-deadline-ms": text})


@settings(max_examples=examples(35))
@given(st.integers(1, 86_400_000), st.sampled_from([b"", b" ", b"\t"]))
def test_a_deadline_is_read_in_milliseconds(milliseconds: int, space: bytes) -> None:
    assert read_deadline({b"x-aimgpu-deadline-ms": b"%d" % milliseconds + space}) == milliseconds / 1000
    assert read_deadline({}) is None


def bearer(text: str, scheme: str = "Bearer") -> dict[bytes, bytes]:
    return {b"authorization": f"{scheme} {text}".encode()}


TABLE = KeyTable({hash_key(KEY): Caller(name="ann"), hash_key(OTHER): Caller(name="bob")})


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (bearer(KEY), "ann"),
        (bearer(KEY, "bearer"), "ann"),
        (bearer(f"  {OTHER} "), "bob"),
        ({b"x-api-key": KEY.encode()}, "ann"),
        ({b"x-api-key": f"{KEY} ".encode()}, "ann"),
        (bearer(KEY, "Basic") | {b"x-api-key": OTHER.encode()}, "bob"),
        (bearer(KEY) | {b"x-api-key": OTHER.encode()}, "ann"),
        (bearer("") | {b"x-api-key": OTHER.encode()}, "bob"),
    ],
)
def test_a_key_is_found_in_either_header_and_the_usual_one_counts(head: dict[bytes, bytes], name: str) -> None:
    assert identify(TABLE, head).name == name


@pytest.mark.parametrize(
    "head",
    [
        {},
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "a"),
        bearer(KEY.upper()),
        bearer(hash_key(KEY)),
        bearer(KEY, "Basic"),
        {b"authorization": KEY.encode()},
        {b"authorization": f"Bearer{KEY}".encode()},
        {b"x-api-key": b""},
        {b"x-api-key": f"Bearer {KEY}".encode()},
        {b"cookie": KEY.encode()},
    ],
)
def test_nothing_else_opens_the_door(head: dict[bytes, bytes]) -> None:
    with pytest.raises(NotAuthenticated):
        identify(TABLE, head)


@settings(max_examples=examples(35))
@given(st.binary(max_size=80))
def test_no_bytes_but_a_key_are_one(token: bytes) -> None:
    assert TABLE.find(token) is None or token in {KEY.encode(), OTHER.encode()}


def test_keys_are_replaced_as_a_whole() -> None:
    table = KeyTable({hash_key(KEY): Caller(name="ann")})
    table.replace({hash_key(OTHER): Caller(name="bob")}, required=True)
    assert (len(table), table.find(KEY.encode()), table.find(OTHER.encode())) == (1, None, Caller(name="bob"))
    with pytest.raises(ValueError, match="hexadecimal"):
        table.replace({"not hex": Caller(name="x")}, required=True)
    table.replace({}, required=True)
    with pytest.raises(NotAuthenticated, match="none exists"):
        identify(table, {})
    table.replace({}, required=False)
    assert identify(table, {}) is identify(None, bearer("anything")) is ANYONE


def test_a_stored_key_becomes_the_caller_that_it_was_made_for() -> None:
    stored = StoredKey(
        name="ann", sha256="00", created=1, models=("a", "b"), priority="low", requests_per_second=2.5, concurrency=3
    )
    caller = caller_of(stored)
    assert (caller.priority, caller.requests_per_second, caller.concurrency) == (Priority.LOW, 2.5, 3)
    assert caller.may_use("a")
    assert not caller.may_use("c")
    assert not caller.unrestricted
    plain = caller_of(StoredKey(name="root", sha256="00", created=1))
    assert plain.unrestricted
    assert plain.may_use("anything")
    nothing = caller_of(StoredKey(name="none", sha256="00", created=1, models=()))
    assert not nothing.may_use("a")
    with pytest.raises(ValueError, match="urgent"):
        caller_of(StoredKey(name="x", sha256="00", created=1, priority="urgent"))


def parts_of(*parts: bytes, ends: bool = True) -> Any:
    left = [*({"type": "http.request", "body": part, "more_body": True} for part in parts)]
    if ends and left:
        left[-1]["more_body"] = False

    async def receive() -> Any:
        if left:
            return left.pop(0)
        if ends:
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()
        return None

    return receive


@settings(max_examples=examples(35))
@given(st.lists(st.binary(max_size=30), min_size=1, max_size=8), st.integers(10, 100), st.integers(10, 150))
def test_bytes_held_are_counted_exactly_whatever_becomes_of_a_body(parts: list[bytes], most: int, most_held: int) -> None:
    held, limits = HeldBytes(most_held), BodyLimits(max_bytes=most)
    size = sum(map(len, parts))

    async def main() -> bytes:
        return await read_body(parts_of(*parts), {}, limits, held)

    try:
        body = run(main())
    except BodyTooLarge:
        assert size > most
        assert held.held == 0
    except LoadShed:
        assert size > most_held
        assert held.held == 0
    else:
        assert body == b"".join(parts)
        assert held.held == size <= min(most, most_held)
        held.drop(size)
        assert held.held == 0


@pytest.mark.parametrize(
    ("parts", "ends", "expected"),
    [((b"abc",), False, RequestTimedOut), ((), False, RequestTimedOut), ((), True, ClientGone)],
    ids=["breaks off", "never begins", "the caller left"],
)
def test_a_body_that_does_not_come_whole_leaves_nothing_held(parts: tuple[bytes, ...], ends: bool, expected: Any) -> None:  # noqa: FBT001
    held = HeldBytes(100)

    async def main() -> None:
        await read_body(parts_of(*parts, ends=ends), {}, BodyLimits(receive_seconds=0.01), held)

    with pytest.raises(expected):
        run(main())
    assert held.held == 0


@pytest.mark.parametrize("length", [b"101", b"99999999999999999999", b"-1", b"abc", b""])
def test_a_length_beyond_the_bound_is_refused_before_a_byte_is_read(length: bytes) -> None:
    async def main() -> None:
        await read_body(parts_of(ends=False), {b"content-length": length}, BodyLimits(max_bytes=100), HeldBytes(1000))

    with pytest.raises(BodyTooLarge):
        run(main())


NAMES = st.sampled_from(["model", "messages", "role", "content", "n", "stream", "max_tokens", "temperature"])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(35))
@given(ANY_JSON)
def test_any_json_is_taken_with_a_models_name_or_refused_with_a_sentence(value: Any) -> None:
    refused = refusal_of(lambda: check_fields("/v1/chat/completions", parse_body(json.dumps(value).encode())))
    if refused is None:
        assert isinstance(value["model"], str)
    else:
        assert refused.http_status == 400
        assert refused.message.endswith(".")


def test_a_key_for_some_models_learns_nothing_of_the_others() -> None:
    async def main() -> list[tuple[int, bytes]]:
        keys = KeyTable({hash_key(KEY): Caller(name="ann", models=frozenset({"mine"}))})
        world: World = make_world(MemoryEngine(lambda _path, _body: json_reads(COMPLETION)), keys=keys)
        world.routes.put("mine", "loading")
        header = f"authorization: Bearer {KEY}"
        asks: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", CHAT | {"model": "unknown"}),
            ("/api/show", {"model": "chat"}),
            ("/api/chat", CHAT),
            ("/v1/messages", CHAT | {"max_tokens": 5}),
            ("/v1/responses", {"model": "chat", "input": "?"}),
            ("/v1/tokenize", {"model": "chat", "prompt": "?"}),
            ("/api/embed", {"model": "chat", "input": "?"}),
        ]
        found = [await world.ask(path, fields, header) for path, fields in asks]
        assert world.engine.asked == []
        return [(answer.status, answer.body) for answer in found]

    answers = run(main())
    assert [status for status, _ in answers] == [403, 404, 403, 403, 403, 403, 403, 403]
    assert b"Known models: mine." in answers[1][1]
