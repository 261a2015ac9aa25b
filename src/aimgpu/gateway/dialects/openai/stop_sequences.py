"""Which sequence ended an answer: vLLM names it, other engines cut it off in silence, so for them the gateway looks for it."""

import contextlib
from typing import Any

import orjson

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.dialects.call import Call, Fields
from aimgpu.gateway.dialects.openai.chat import model_name, serve_chat
from aimgpu.gateway.dialects.translate import EVENT_END, THINKING, WRONG_SHAPES, CollectedAnswer, read_event
from aimgpu.gateway.http.asgi import Message, Send, send_answer

_NAMES_SEQUENCE = frozenset({"vllm"})
_OK = 200
_MOST_SEQUENCES = 16
_LONGEST_SEQUENCE = 256


class _Stopped(Exception):
    """The answer is complete: what the engine would write further is not wanted."""


async def serve_naming_stop(call: Call, chat: Fields, send: Send) -> None:
    """As `serve_chat`; a choice that a sequence of `stop` ended has it under `stop_reason`."""
    model = call.find(model_name(chat))
    sequences = [one for one in chat.get("stop") or () if isinstance(one, str) and one]
    if not sequences or model.card.engine in _NAMES_SEQUENCE or model.card.engine is None:
        await serve_chat(call, chat, send)
        return
    if len(sequences) > _MOST_SEQUENCES or max(map(len, sequences)) > _LONGEST_SEQUENCE:
        text = f"'stop_sequences' may be {_MOST_SEQUENCES}, each of at most {_LONGEST_SEQUENCE} characters."
        raise InvalidRequest(text, param="stop_sequences")
    asked = {name: value for name, value in chat.items() if name != "stop"}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chat.get("stream") is True
    collected = CollectedAnswer()
    watched = _StopSend(send if streamed else collected, sequences)
    with contextlib.suppress(_Stopped):
        await serve_chat(call, asked, watched)
    if streamed:
        return
    if not collected.ok or b"text/event-stream" not in dict(collected.headers).get(b"content-type", b""):
        await collected.pass_on(send)
        return
    headers = [header for header in collected.headers if header[0] not in (b"content-type", b"content-length")]
    status, answer = _join(collected.body)
    await send_answer(send, status, [(b"content-type", b"application/json"), *headers], orjson.dumps(answer))


class _StopSend:
    """An ASGI `send` that ends a stream of chunks before the first of the sequences, though it came in parts."""

    def __init__(self, send: Send, sequences: list[str]) -> None:
        self._send = send
        self._sequences = sequences
        self._held = ""  # may be the beginning of a sequence
        self._tokens = 0
        self._streams = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = message["status"] == _OK
        if message["type"] == "http.response.start" or not self._streams:
            await self._send(message)
            return
        parts: list[bytes] = []
        for event in message.get("body", b"").split(EVENT_END):
            if not event:
                continue
            made, matched = self._translate(event)
            parts += made
            if matched is not None:
                last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": matched}]}
                usage = {"choices": [], "usage": {"completion_tokens": self._tokens}}
                parts += [_event(last), _event(usage), b"data: [DONE]" + EVENT_END]
                await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": False})
                raise _Stopped
        more = message.get("more_body", False)
        if parts or not more:
            await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": more})

    def _translate(self, event: bytes) -> tuple[list[bytes], str | None]:
        """The events that may go on, and the sequence that ended the answer."""
        data = read_event(event)
        try:
            chunk: Fields = orjson.loads(data or b"")
            delta = chunk["choices"][0]["delta"]
            text, over = delta.get("content"), chunk["choices"][0].get("finish_reason") is not None
            self._tokens += 1
            if not isinstance(text, str) and not over:
                return [event + EVENT_END], None
        except WRONG_SHAPES:  # the end, the usage, an error
            return [event + EVENT_END], None
        held = self._held + (text or "")
        found = min(((held.find(one), one) for one in self._sequences if one in held), default=None)
        kept = len(held) if over else len(held) - max(_begun(held, one) for one in self._sequences)
        shown, self._held = (held[: found[0]], "") if found else (held[:kept], held[kept:])
        delta["content"] = shown
        return ([] if not shown and not over else [_event(chunk)]), found[1] if found else None


def _begun(text: str, sequence: str) -> int:
    """How much of the sequence the text ends with."""
    return next((size for size in range(min(len(sequence), len(text)), 0, -1) if text.endswith(sequence[:size])), 0)


def _event(chunk: Fields) -> bytes:
    return b"data: " + orjson.dumps(chunk) + EVENT_END


def _join(body: bytes) -> tuple[int, Fields]:
    """The whole answer that a stream came to; an error of the stream as one."""
    message: Fields = {"role": "assistant", "content": ""}
    calls: dict[int, Fields] = {}
    answer: Fields = {"object": "chat.completion"}
    end: Fields = {"finish_reason": None}
    for event in body.split(EVENT_END):
        data = read_event(event)
        if data is None or data == b"[DONE]":
            continue
        chunk: Fields = orjson.loads(data)
        if chunk.get("error"):
            return 502, chunk
        answer |= {name: chunk[name] for name in ("id", "created", "model", "usage") if chunk.get(name) is not None}
        for choice in chunk.get("choices") or ():
            delta: Fields = choice.get("delta") or {}
            for name in ("content", *THINKING):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for position, one in enumerate(delta.get("tool_calls") or ()):
                _add_call(calls, one.get("index", position), one)
            if choice.get("finish_reason"):
                end = {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return _OK, answer | {"choices": [{"index": 0, "message": message, **end}]}


def _add_call(calls: dict[int, Fields], index: int, part: Any) -> None:  # noqa: ANN401  # JSON
    known = calls.setdefault(index, {"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}})
    for name in ("name", "arguments"):
        known["function"][name] += (part.get("function") or {}).get(name) or ""
