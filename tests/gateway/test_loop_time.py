"""Whatever a caller or an engine sends, the event loop works on it for a small multiple of the time of parsing it."""

import gc
import json
import string
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st
from tests.examples import examples
from tests.gateway.loop_time import FORM, STREAM, Served, ratio, serve_once

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.body import MOST_VALUES, has_more_values
from aimgpu.gateway.forms import read_form

MOST = 3.0  # times json.loads of the same bytes, in the same process
LIMIT = 16 * 1024 * 1024
TRIES = 6

MODEL = b'{"model":"chat",'
MAX = MODEL + b'"max_tokens":5,'
IMAGE = b"data:image/png;base64,"


def filled(head: bytes, unit: bytes, tail: bytes, *, values: int = MOST_VALUES) -> bytes:
    """As many of `unit` between `head` and `tail` as a body may have."""
    left = values - cost(head + tail) - 100
    count = min((LIMIT - len(head) - len(tail)) // (len(unit) + 1), left // cost(unit + b","))
    return head + b",".join([unit] * count) + tail


def cost(text: bytes) -> int:
    """As the gateway counts values, or more."""
    lists = text.count(b"[") + text.count(b"{")
    return len(text) // 32 + 1 + text.count(b'"') + text.count(b",") + 2 * text.count(b":") + 3 * lists


def long_text(head: bytes, piece: bytes, tail: bytes) -> bytes:
    return head + piece * ((LIMIT - len(head) - len(tail)) // len(piece)) + tail


def messages(unit: bytes) -> bytes:
    return filled(MODEL + b'"messages":[', unit, b"]}")


def numbered(head: bytes, tail: bytes, value: bytes) -> bytes:
    return head + b",".join(b'"%x":%b' % (number, value) for number in range(MOST_VALUES // 7)) + tail


CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = b'"messages":[{"role":"user"}],'
# By name: the path, and what makes the body.
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "chat: an image": (
        CHAT,
        lambda: long_text(MODEL + b'"messages":[{"role":"user","content":[{"image_url":{"url":"' + IMAGE, b"A", b'"}}]}]}'),
    ),
    "chat: letters of two bytes": (
        CHAT,
        lambda: long_text(MODEL + b'"messages":[{"role":"u","content":"', "é".encode(), b'"}]}'),
    ),
    "chat: escapes": (CHAT, lambda: long_text(MODEL + b'"messages":[{"role":"u","content":"', b"\\u0001", b'"}]}')),
    "chat: quotes": (CHAT, lambda: long_text(MODEL + b'"messages":[{"role":"u","content":"', b'\\"', b'"}]}')),
    "chat: commas": (CHAT, lambda: long_text(MODEL + b'"messages":[{"role":"u","content":"', b",", b'"}]}')),
    "chat: messages": (CHAT, lambda: messages(b'{"role":"user"}')),
    "chat: messages with parts": (CHAT, lambda: messages(b'{"role":"user","content":[{}]}')),
    "chat: fields": (CHAT, lambda: numbered(MODEL + USER, b"}", b"1")),
    "chat: tools": (CHAT, lambda: filled(MODEL + USER + b'"tools":[', b'{"function":{"name":""}}', b"]}")),
    "chat: allowed tools": (
        CHAT,
        lambda: filled(
            MODEL
            + USER
            + b'"tools":['
            + b",".join([b'{"function":{"name":"a"}}'] * 1000)
            + b'],"tool_choice":{"type":"allowed_tools"'
            b',"tools":[',
            b'{"name":"x"}',
            b"]}}",
        ),
    ),
    "chat: choices": (CHAT, lambda: long_text(MODEL + b'"n":128,"messages":[{"role":"user","content":"', b"A", b'"}]}')),
    "chat: too many values": (CHAT, lambda: long_text(b"[", b"{},", b"{}]")),
    "chat: too deep": (CHAT, lambda: MODEL + b'"messages":' + b"[" * (LIMIT // 2 - 50) + b"]" * (LIMIT // 2 - 50) + b"}"),
    "chat: a long number": (CHAT, lambda: long_text(MODEL + b'"seed":1', b"1", b"}")),
    "chat: a schema": (
        CHAT,
        lambda: filled(MODEL + USER + b'"response_format":{"schema":{"anyOf":[', b'{"properties":{"a":{}}}', b"]}}}"),
    ),
    "chat: a long constant": (CHAT, lambda: long_text(MODEL + USER + b'"response_format":{"const":"', b"A", b'"}}')),
    "chat: patterns": (
        CHAT,
        lambda: (
            MODEL
            + USER
            + b'"response_format":{"schema":{"anyOf":['
            + b",".join(b'{"pattern":"(a|b)?%d(a{9}|[b-d]*)*[a-z]{1,40}x{%d}"}' % (one, one % 90) for one in range(9000))
            + b"]}}}"
        ),
    ),
    "completions: prompts": (COMPLETIONS, lambda: filled(MODEL + b'"prompt":[', b'""', b"]}")),
    "embeddings: tokens": ("/v1/embeddings", lambda: filled(MODEL + b'"input":[', b"1", b"]}")),
    "rerank: documents": ("/v1/rerank", lambda: filled(MODEL + b'"query":"q","documents":[', b'""', b"]}")),
    "tokenize: a text": ("/v1/tokenize", lambda: long_text(MODEL + b'"prompt":"', b"A", b'"}')),
    "detokenize: tokens": ("/v1/detokenize", lambda: filled(MODEL + b'"tokens":[', b"1", b"]}")),
    "responses: calls": (RESPONSES, lambda: filled(MODEL + b'"input":[', b'{"type":"function_call"}', b"]}")),
    "responses: instructions": (RESPONSES, lambda: filled(MODEL + b'"input":[', b'{"role":"system"}', b"]}")),
    "responses: parts": (RESPONSES, lambda: filled(MODEL + b'"input":[{"role":"u","content":[', b'{"type":"text"}', b"]}]}")),
    "responses: tools": (RESPONSES, lambda: filled(MODEL + b'"input":"x","tools":[', b'{"type":"function"}', b"]}")),
    "responses: a text": (RESPONSES, lambda: long_text(MODEL + b'"input":"', b"A", b'"}')),
    "anthropic: messages": (ANTHROPIC, lambda: filled(MAX + b'"messages":[', b'{"role":"user","content":""}', b"]}")),
    "anthropic: blocks": (
        ANTHROPIC,
        lambda: filled(MAX + b'"messages":[{"role":"user","content":[', b'{"type":"text"}', b"]}]}"),
    ),
    "anthropic: uses of tools": (
        ANTHROPIC,
        lambda: filled(MAX + b'"messages":[{"role":"assistant","content":[', b'{"type":"tool_use"}', b"]}]}"),
    ),
    "anthropic: tools": (
        ANTHROPIC,
        lambda: filled(MAX + b'"messages":[{"role":"user","content":""}],"tools":[', b'{"name":""}', b"]}"),
    ),
    "anthropic: an image": (
        ANTHROPIC,
        lambda: long_text(
            MAX + b'"messages":[{"role":"user","content":[{"type":"image","source":{"media_type":"image/png","data":"',
            b"A",
            b'"}}]}]}',
        ),
    ),
    "anthropic: tokens counted": (
        "/v1/messages/count_tokens",
        lambda: filled(MODEL + b'"messages":[', b'{"role":"user","content":""}', b"]}"),
    ),
    "ollama: messages": ("/api/chat", lambda: messages(b'{"role":"user"}')),
    "ollama: images": ("/api/chat", lambda: filled(MODEL + b'"messages":[{"role":"user","images":[', b'""', b"]}]}")),
    "ollama: an image": ("/api/chat", lambda: long_text(MODEL + b'"messages":[{"role":"user","images":["', b"A", b'"]}]}')),
    "ollama: calls": (
        "/api/chat",
        lambda: filled(MODEL + b'"messages":[{"role":"assistant","tool_calls":[', b'{"function":{"name":""}}', b"]}]}"),
    ),
    "ollama: results of calls": (
        "/api/chat",
        lambda: filled(
            MODEL
            + b'"messages":[{"role":"assistant","tool_calls":['
            + b",".join([b'{"function":{"name":"a"}}'] * 40_000)
            + b"]},",
            b'{"role":"tool","tool_name":"a"}',
            b"]}",
        ),
    ),
    "ollama: options": ("/api/chat", lambda: numbered(MODEL + USER + b'"options":{', b"}}", b"null")),
    "ollama: a prompt": ("/api/generate", lambda: long_text(MODEL + b'"prompt":"', b"A", b'"}')),
    "ollama: texts": ("/api/embed", lambda: filled(MODEL + b'"input":[', b'""', b"]}")),
    "ollama: a name": ("/api/show", lambda: long_text(b'{"model":"', b"A", b'"}')),
}
FORMS = {
    "parameters of a head": lambda: long_text(b"--B\r\ncontent-disposition: form-data", b"; a=b", b"\r\n\r\n\r\n--B--\r\n"),
    "heads": lambda: long_text(b"--B\r\n", b"a: b\r\n", b"\r\n\r\n--B--\r\n"),
    "parts": lambda: long_text(b"--B\r\n", b"\r\n\r\n\r\n--B\r\n", b"--B--\r\n"),
    "what is nearly an end": lambda: long_text(b'--B\r\na: b;name="file"\r\n\r\n', b"\r\n--", b"\r\n--B--\r\n"),
    "a file": lambda: long_text(b'--B\r\na: b; name="file"\r\n\r\n', b"\x00", b"\r\n--B--\r\n"),
}


ALWAYS = {"chat: an image", "chat: messages", "responses: calls", "anthropic: uses of tools", "ollama: results of calls"}


@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.rest) for name in BODIES])
def test_no_body_of_a_caller_holds_the_loop(name: str, engine: str) -> None:
    path, make = BODIES[name]
    served = Served(path=path, body=make(), engine=engine)
    assert len(served.body) <= LIMIT
    assert ratio(served, MOST, TRIES) <= MOST


WORST = {
    "fields": lambda: numbered(MODEL + USER, b"}", b"1"),
    "long fields": lambda: filled(b"[", b'{"%062x":1}' % 7, b"]"),
    "empty arrays": lambda: filled(b"[", b"[]", b"]"),
    "nested arrays": lambda: filled(b"[", b"[" * 100 + b"]" * 100, b"]"),
    "long numbers": lambda: filled(b"[", b"2.4703282292062327208299439634110764e-324", b"]"),
    "very long numbers": lambda: filled(
        b"[", b"1.000000000000000111022302462515654042363166809082031" + b"0" * 700 + b"1", b"]"
    ),
    "texts": lambda: filled(b"[", b'"%030x"' % 7, b"]"),
    "wide texts": lambda: filled(b"[", '"\U0001f600aaaaaaaaaaaaaaaaaaaa"'.encode(), b"]"),
}


@pytest.mark.parametrize("name", WORST)
def test_no_single_call_of_the_parser_takes_much_longer_than_for_one_text(name: str) -> None:
    """The parser keeps the interpreter to itself, in whichever thread: some 30 ms, as for 16 MiB of text."""
    body = WORST[name]()
    assert not has_more_values(body, MOST_VALUES)

    def spend(parse: Callable[[bytes], Any], text: bytes) -> float:
        gc.freeze()  # as the server does: a collection looks at what else lives here, which are tests
        try:
            begun = time.thread_time()
            parse(text)
            return time.thread_time() - begun
        finally:
            gc.unfreeze()

    image = long_text(b'"', b"A", b'"')
    reference = min(spend(json.loads, image) for _ in range(TRIES))
    assert min(spend(orjson.loads, body) for _ in range(TRIES)) <= 2 * MOST * reference


def test_what_is_within_texts_is_no_value() -> None:
    """A prompt of code has more commas, brackets and quotes than a body may have values."""
    text = json.dumps([{"role": "user", "content": '{"a": [1, 2], "b\\": "\\\\"}, ' * 400_000}]).encode()
    assert text.count(b",") > MOST_VALUES
    assert not has_more_values(text, 20)


@pytest.mark.parametrize("name", FORMS)
def test_no_form_of_a_caller_holds_the_loop(name: str) -> None:
    served = Served(path="/v1/audio/transcriptions", body=FORMS[name](), content_type=FORM)
    assert ratio(served, MOST, TRIES) <= MOST


@pytest.mark.parametrize("body", ["a" * (LIMIT - 100), "a,[{" * (LIMIT // 5)], ids=["letters", "commas"])
def test_one_text_of_the_largest_body_passes(body: str) -> None:
    spent = serve_once(
        Served(path=CHAT, body=json.dumps({"model": "chat", "messages": [{"role": "u", "content": body}]}).encode())
    )
    assert (spent.status, spent.asked) == (200, 1)


def delta(**fields: Any) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":%b}]}\n\n' % json.dumps(fields).encode()


def stream(event: bytes, size: int = 2 * 1024 * 1024, chunk: int = 64 * 1024) -> list[bytes]:
    text = event * (size // len(event)) + b"data: [DONE]\n\n"
    return [text[at : at + chunk] for at in range(0, len(text), chunk)]


CALL_PART = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "xxxx"}}
STREAMS = {
    "letters": lambda: stream(delta(content="aaaaaaaaaaaaaaaa")),
    "parts of one call": lambda: stream(delta(tool_calls=[CALL_PART])),
    "thoughts and words by turns": lambda: stream(delta(reasoning_content="aaaaaaaa") + delta(content="aaaaaaaa")),
    "choices of one event": lambda: [
        b'data: {"choices":[' + b",".join([b'{"delta":{"content":"a"}}'] * 80_000) + b"]}\n\n",
        b"data: [DONE]\n\n",
    ],
    "an event of too many values": lambda: [b"data: [" + b"{}," * 1_300_000 + b"{}]\n\n"],
}
CALLS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "?"}]},
    RESPONSES: {"input": "?"},
    ANTHROPIC: {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5},
    "/api/chat": {"messages": [{"role": "user", "content": "?"}]},
}


@pytest.mark.rest
@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("name", STREAMS)
def test_no_stream_of_an_engine_holds_the_loop(name: str, path: str) -> None:
    """The multiple is of one call of `json.loads` for each event."""
    body = json.dumps({"model": "chat", "stream": True, **CALLS[path]}).encode()
    served = Served(path=path, body=body, answer=STREAMS[name](), answer_type=STREAM)
    assert ratio(served, MOST, TRIES) <= MOST


SEQUENCES = {
    "the longest, of the same letters": ["a" * 255 + letter for letter in "bcdefghijklmnopq"],
    "none that is found": ["zz"],
}


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("text", ["a", "aaaaaaaaaaaaaaac", "ac"])
def test_sequences_that_end_an_answer_are_found_without_holding_the_loop(text: str, name: str, *, streamed: bool) -> None:
    fields = CALLS[ANTHROPIC] | {"model": "chat", "stream": streamed, "stop_sequences": SEQUENCES[name]}
    events = [delta(content=text) * 100] * 300
    served = Served(path=ANTHROPIC, body=json.dumps(fields).encode(), answer=events, answer_type=STREAM)
    assert ratio(served, MOST, TRIES) <= MOST


@pytest.mark.parametrize("sequences", [["zz"], ["zz"] * 65])
def test_a_whole_answer_that_comes_as_a_stream_is_bounded(sequences: list[str]) -> None:
    fields = CALLS[ANTHROPIC] | {"model": "chat", "stop_sequences": sequences}
    events = [delta(content="a" * 100_000)] * 180
    spent = serve_once(Served(path=ANTHROPIC, body=json.dumps(fields).encode(), answer=events, answer_type=STREAM))
    assert spent.status == (502 if len(sequences) == 1 else 400)


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b""], ids=["LF", "CRLF", "none"])
def test_an_event_that_comes_in_small_reads_costs_in_proportion_to_its_length(path: str, end: bytes) -> None:
    """Four times the reads: sixteen times the work where each looked at all that came before."""
    body = json.dumps({"model": "chat", "stream": True, **CALLS[path]}).encode()

    def seconds(length: int) -> float:
        event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"a" * length + b'"}}]}' + end
        reads = [event[at : at + 100] for at in range(0, len(event), 100)]
        spent = [serve_once(Served(path=path, body=body, answer=reads, answer_type=STREAM)) for _ in range(TRIES)]
        assert all(one.status == 200 and b"a" * length in b"".join(one.sent) for one in spent)
        return min(one.seconds for one in spent)

    assert seconds(2_000_000) <= 8 * seconds(500_000)


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("size", [1, 3, 100, 10_000])
def test_events_that_end_with_crlf_are_passed_on_as_they_come(path: str, size: int) -> None:
    body = json.dumps({"model": "chat", "stream": True, **CALLS[path]}).encode()

    def ask(events: bytes) -> list[bytes]:
        reads = [events[at : at + size] for at in range(0, len(events), size)]
        return serve_once(Served(path=path, body=body, answer=reads, answer_type=STREAM)).sent

    events = b"".join(delta(content=f"word{number}") for number in range(9)) + b"data: [DONE]\n\n"
    found = ask(events.replace(b"\n", b"\r\n"))
    assert b"".join(found).count(b"word") == b"".join(ask(events)).count(b"word") >= 9
    if size <= 100:
        assert sum(b"word" in part for part in found) >= 5


WHOLE = {
    "a text": lambda: long_text(b'{"choices":[{"message":{"content":"', b"a", b'"}}]}'),
    "escapes": lambda: long_text(b'{"choices":[{"message":{"content":"', b"\\u0001", b'"}}]}'),
    "calls": lambda: filled(b'{"choices":[{"message":{"tool_calls":[', b'{"function":{"name":"a"}}', b"]}}]}"),
    "choices": lambda: filled(b'{"choices":[', b'{"message":{"content":"a"}}', b"]}"),
    "too many values": lambda: long_text(b'{"choices":[', b"{},", b"{}]}"),
    "vectors": lambda: filled(b'{"data":[{"embedding":[', b"0.12345678", b"]}]}", values=1_000_000),
    "more than it may be": lambda: b"a" * (LIMIT + 1),
}


@pytest.mark.rest
@pytest.mark.parametrize("path", [*CALLS, "/api/embed", "/v1/tokenize"])
@pytest.mark.parametrize("name", WHOLE)
def test_no_whole_answer_of_an_engine_holds_the_loop(name: str, path: str) -> None:
    body: dict[str, Any] = {"model": "chat", "input": "?", "prompt": "?", **CALLS.get(path, {})}
    served = Served(path=path, body=json.dumps(body).encode(), answer=[WHOLE[name]()])
    assert ratio(served, MOST, TRIES) <= MOST


# The search for worse shapes: a field of a dialect, filled with a unit of JSON that is made up.
PLACES = (
    (CHAT, MODEL + b'"messages":[', b"]}"),
    (CHAT, MODEL + b'"messages":[{"role":"user","content":[', b"]}]}"),
    (CHAT, MODEL + USER + b'"tools":[', b"]}"),
    (CHAT, MODEL + USER + b'"response_format":{"schema":{"anyOf":[', b"]}}}"),
    (CHAT, MODEL + USER + b'"stop":[', b"]}"),
    (RESPONSES, MODEL + b'"input":[', b"]}"),
    (RESPONSES, MODEL + b'"input":[{"role":"user","content":[', b"]}]}"),
    (ANTHROPIC, MAX + b'"messages":[', b"]}"),
    (ANTHROPIC, MAX + b'"messages":[{"role":"user","content":[', b"]}]}"),
    (ANTHROPIC, MAX + b'"messages":[{"role":"user","content":""}],"tools":[', b"]}"),
    ("/api/chat", MODEL + b'"messages":[', b"]}"),
    ("/api/chat", MODEL + b'"messages":[{"role":"assistant","tool_calls":[', b"]}]}"),
    ("/api/embed", MODEL + b'"input":[', b"]}"),
)
KEYS = st.sampled_from(
    ("role", "content", "type", "name", "function", "tool_calls", "arguments", "text", "id", "call_id", "tool_name", "input")
)
TEXTS = st.sampled_from(
    ["", "user", "assistant", "system", "tool", "text", "tool_use", "tool_result", "function", "(a|b)*{9}", "#"]
)
UNITS = st.recursive(
    TEXTS | st.integers(0, 9) | st.none() | st.text(string.printable, max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.rest
@pytest.mark.hypothesis
@settings(max_examples=examples(60))
@given(place=st.sampled_from(PLACES), unit=UNITS, padding=st.integers(0, 2000), engine=st.sampled_from(["llamacpp", "vllm"]))
def test_no_shape_that_is_searched_for_holds_the_loop(
    place: tuple[str, bytes, bytes], unit: Any, padding: int, engine: str
) -> None:
    path, head, tail = place
    written = json.dumps(
        unit if not padding else {"role": "user", "type": "text", "text": "a" * padding, "unit": unit}
    ).encode()
    served = Served(path=path, body=filled(head, written, tail), engine=engine)
    found = ratio(served, MOST, TRIES)
    target(found, label="times json.loads")
    assert found <= MOST


@given(st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_body_is_never_taken_to_have_fewer_values_than_it_has(value: Any) -> None:
    def count(one: Any) -> int:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        return 1 + sum(map(count, inner))

    text = json.dumps(value).encode()
    assert not has_more_values(text, 10**9)
    assert has_more_values(text, count(value) // 2 - 2)


@given(
    st.lists(
        st.tuples(st.sampled_from(["model", "stream", "x"]), st.text(string.ascii_letters + "é ", max_size=20)), max_size=9
    )
)
def test_a_form_is_read_as_it_was_written(fields: list[tuple[str, str]]) -> None:
    parts = [
        f'--b0undary\r\nContent-Disposition: form-data; name="{name}"\r\nContent-Type: text/plain\r\n\r\n{text}\r\n'
        for name, text in fields
    ]
    file = '--b0undary\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
    body = ("".join(parts) + file + "--b0undary--\r\n").encode()
    content_type = b'multipart/form-data; boundary="b0undary"'
    if [name for name, _ in fields].count("model") > 1:
        with pytest.raises(InvalidRequest, match="twice"):
            read_form(content_type, body)
    else:
        assert read_form(content_type, body) == dict(fields)
