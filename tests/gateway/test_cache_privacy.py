"""What an answer says about the prefix cache is taken out of it, and nothing else is, however it is nested or cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects.conversations import recut
from tests.examples import examples
from tests.gateway.memory import MemoryEngine, json_reads, make_world, run, stream_reads
from tests.http_answer import HttpAnswer

from aimgpu.gateway.answer_privacy import hide_cache_use, hide_in_events, make_cache_salt, may_reveal
from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.gateway.routes import ModelCard
from aimgpu.keyfile import hash_key

KEYS = {name: name * 40 for name in ("a", "b")}
TELLING: dict[str, dict[str, Any]] = {
    "OpenAI's counts": {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}},
    "counts of responses": {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}}},
    "a response within an event": {
        "type": "response.completed",
        "response": {"usage": {"input_tokens_details": {"cached_tokens": 8}}},
    },
    "Anthropic's counts": {"usage": {"cache_read_input_tokens": 8, "cache_creation_input_tokens": 1}},
    "Anthropic's first event": {"type": "message_start", "message": {"usage": {"cache_read_input_tokens": 8}}},
    "llama.cpp's times": {"timings": {"cache_n": 8, "prompt_n": 1, "prompt_ms": 3.0}},
    "llama.cpp's progress": {"prompt_progress": {"total": 9, "cache": 8, "processed": 9, "time_ms": 3}},
    "llama.cpp's details": {"__verbose": {"tokens_cached": 8, "timings": {}}},
    "its older count": {"tokens_cached": 8},
    "its older times": {"prompt_ms": 3.0, "prompt_per_second": 8.0, "cache": 0},
}
REST = {"id": "x", "model": "m", "choices": [{"index": 0, "delta": {"content": "cached_tokens: 8, timings"}}]}


def numbers(value: Any, inside: str = "") -> list[Any]:
    """Every number that stands below a name about caches or times."""
    if isinstance(value, dict):
        return [found for name, each in value.items() for found in numbers(each, inside + "/" + name)]
    if isinstance(value, list):
        return [found for each in value for found in numbers(each, inside)]
    told = any(word in inside for word in ("cache", "timings", "prompt_ms", "prompt_per_second", "progress", "__verbose"))
    return [value] if told and not isinstance(value, str) and value else []


@pytest.mark.parametrize("telling", TELLING.values(), ids=TELLING)
def test_nothing_of_the_cache_is_left_and_all_else_is(telling: dict[str, Any]) -> None:
    answer = json.dumps(REST | telling).encode()
    assert may_reveal(answer)
    hidden = json.loads(hide_cache_use(answer))
    assert numbers(hidden) == []
    assert {name: hidden[name] for name in REST} == REST
    [event, last] = hide_in_events(b"event: x\ndata: " + answer + b"\n\ndata: [DONE]\n\n").split(b"\n\n")[:2]
    assert event.startswith(b"event: x\ndata: ")
    assert json.loads(event.partition(b"data: ")[2]) == hidden
    assert last == b"data: [DONE]"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(35))
@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4))
def test_an_answer_that_says_nothing_of_it_is_the_same_after(answer: dict[str, Any]) -> None:
    assert json.loads(hide_cache_use(json.dumps(answer).encode())) == answer


@pytest.mark.parametrize("body", [b"", b"not json timings", b"[1, 2]", b'"timings"', b"null"])
def test_what_is_no_object_is_left_as_it_is(body: bytes) -> None:
    assert hide_cache_use(body) == body


def ask(
    path: str, fields: dict[str, Any], reads: list[bytes], *, with_key: bool = True, engine: str = "llamacpp"
) -> HttpAnswer:
    async def main() -> HttpAnswer:
        keys = KeyTable({hash_key(KEYS["a"]): Caller(name="a")}) if with_key else None
        world = make_world(MemoryEngine(lambda _path, _body: reads), keys=keys, card=ModelCard(engine=engine))
        return await world.ask(path, {"model": "chat", **fields}, f"authorization: Bearer {KEYS['a']}")

    return run(main())


MESSAGES = [{"role": "user", "content": "?"}]
WHOLE = {
    "id": "x",
    "object": "chat.completion",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello"}}],
}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "choices": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
    "completions": ("/v1/completions", {"prompt": "?"}),
    "embeddings": ("/v1/embeddings", {"input": "?"}),
    "anthropic": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    "responses": ("/v1/responses", {"input": "?"}),
}


@pytest.mark.parametrize("telling", TELLING.values(), ids=TELLING)
@pytest.mark.parametrize(("path", "fields"), ASKS.values(), ids=ASKS)
def test_no_dialect_shows_it_to_the_holder_of_a_key(path: str, fields: dict[str, Any], telling: dict[str, Any]) -> None:
    answer = ask(path, fields, json_reads(WHOLE | telling))
    assert answer.status == 200
    assert numbers(answer.json) == []


@pytest.mark.parametrize("telling", TELLING.values(), ids=TELLING)
@pytest.mark.parametrize("size", [7, 64, 5000])
def test_no_stream_shows_it_however_it_is_cut(telling: dict[str, Any], size: int) -> None:
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"content": "Hello"}}]}
    events = [b"data: " + json.dumps(chunk | telling).encode() + b"\n\n"] * 3 + [b"data: [DONE]\n\n"]
    reads = recut(stream_reads(events), [size])
    for path, fields in (ASKS["chat"], ASKS["anthropic"], ASKS["responses"], ("/api/chat", {"messages": MESSAGES})):
        answer = ask(path, fields | ({} if path == "/api/chat" else {"stream": True}), reads)
        lines = answer.body.splitlines() if path == "/api/chat" else []
        shown = [json.loads(line) for line in lines] or answer.events
        assert b"Hello" in answer.body
        assert [number for event in shown for number in numbers(event)] == []


def test_vllms_own_responses_are_cleaned_too() -> None:
    told = {"id": "r", "output": [], "usage": {"input_tokens_details": {"cached_tokens": 8}}}
    assert numbers(ask("/v1/responses", {"input": "?"}, json_reads(told), engine="vllm").json) == []
    events = [
        b"event: response.completed\ndata: " + json.dumps({"type": "response.completed", "response": told}).encode() + b"\n\n"
    ]
    answer = ask("/v1/responses", {"input": "?", "stream": True}, stream_reads(events), engine="vllm")
    assert numbers(answer.events) == []
    assert answer.events[0]["response"]["id"] == "r"


def test_without_keys_an_engines_figures_are_shown() -> None:
    path, fields = ASKS["chat"]
    for telling in TELLING.values():
        answer = ask(path, fields, json_reads(WHOLE | telling), with_key=False)
        assert answer.json == WHOLE | telling


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("cache_field", ["cache_salt", "cache_prompt", None])
def test_engines_get_a_salt_per_key_where_caches_are_kept_apart(separate: bool, cache_field: str | None) -> None:  # noqa: FBT001
    async def main() -> list[Any]:
        keys = KeyTable({hash_key(key): Caller(name=name) for name, key in KEYS.items()})
        engine = MemoryEngine(lambda _path, _body: json_reads(WHOLE))
        world = make_world(engine, keys=keys, settings=GatewaySettings(separate_caches=separate), cache_field=cache_field)
        for name in ("a", "b", "a"):
            await world.ask("/v1/chat/completions", {"model": "chat", "messages": MESSAGES}, f"x-api-key: {KEYS[name]}")
        return [body.get(cache_field) for _, body in engine.asked]

    first, second, third = run(main())
    if not separate or cache_field is None:
        assert (first, second, third) == (None, None, None)
    elif cache_field == "cache_prompt":
        assert (first, second, third) == (False, False, False)
    else:
        assert first == third != second


@settings(max_examples=examples(35))
@given(st.text(max_size=20), st.text(max_size=20))
def test_salts_of_two_keys_differ_and_say_nothing_of_their_names(one: str, other: str) -> None:
    assert (make_cache_salt(one) == make_cache_salt(other)) is (one == other)
    assert len(one) < 4 or one not in make_cache_salt(one)
