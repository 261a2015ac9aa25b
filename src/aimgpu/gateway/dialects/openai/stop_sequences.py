"""Which sequence ended an answer: vLLM names it, other engines cut it off in silence, so for them the gateway looks for it."""

import contextlib

import orjson

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.apart import apart
from aimgpu.gateway.dialects.call import Call, Fields
from aimgpu.gateway.dialects.openai.chat import model_name, serve_chat
from aimgpu.gateway.dialects.tool_calls import TextParts, ToolCallParts
from aimgpu.gateway.dialects.translate import THINKING, Stopped, StopWatch, TranslatingSend, read_text
from aimgpu.gateway.http.asgi import Message, Send, send_answer

_NAMES_SEQUENCE = frozenset({"vllm"})
_BAD_GATEWAY = 502
_MOST_SEQUENCES = 16
_LONGEST_SEQUENCE = 256


async def serve_naming_stop(call: Call, chat: Fields, send: TranslatingSend) -> None:
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
    watched = send if chat.get("stream") is True else JoiningSend(send)
    watched.stops = StopWatch(sequences)
    with contextlib.suppress(Stopped):
        await serve_chat(call, asked, watched)


class JoiningSend(TranslatingSend):
    """A stream of chunks goes on as one whole answer, and what is not a stream as it is."""

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._texts = {name: TextParts() for name in ("content", *THINKING)}
        self._calls = ToolCallParts()
        self._answer: Fields = {}
        self._ending: Fields = {"finish_reason": None}
        self._failure: Fields | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streaming = b"text/event-stream" in dict(message["headers"]).get(b"content-type", b"")
            self._head = message
        elif self._streaming:
            await self._pass_events(message)
            return
        if not self._streaming:
            await self._send(message)

    def event(self, chunk: Fields) -> bytes:
        if not self._answer:
            self._answer = {"object": "chat.completion", **{name: chunk.get(name) for name in ("id", "created", "model")}}
        if usage := chunk.get("usage"):
            self._answer["usage"] = usage
        for choice in chunk.get("choices") or ():
            delta: Fields = choice.get("delta") or {}
            for name, parts in self._texts.items():
                if delta.get(name):
                    parts.add(read_text(delta, name))
            if calls := delta.get("tool_calls"):
                self._calls.add(calls)
            if choice.get("finish_reason"):
                self._ending = {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
        return b""

    def broken(self, error: Fields) -> bytes:
        self._failure = error
        return b""

    async def _pass_events(self, message: Message) -> None:
        events = message.get("body", b"")
        await apart(len(events), self._translate_all, events)
        if message.get("more_body", False) and not self._ended:
            return
        assert self._head is not None  # noqa: S101  # ASGI: the head comes first
        kept = [header for header in self._head["headers"] if header[0] not in (b"content-type", b"content-length")]
        status = self._head["status"] if self._failure is None else _BAD_GATEWAY
        body = orjson.dumps({"error": self._failure} if self._failure is not None else self._join())
        await send_answer(self._send, status, [(b"content-type", b"application/json"), *kept], body)
        raise Stopped

    def _join(self) -> Fields:
        message: Fields = {"role": "assistant", "content": ""} | {
            name: text for name, parts in self._texts.items() if (text := parts.join())
        }
        if calls := self._calls.written():
            message["tool_calls"] = calls
        return self._answer | {"choices": [{"index": 0, "message": message, **self._ending}]}
