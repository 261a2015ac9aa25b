"""An answer of an engine, in OpenAI's shape, on its way to a caller that speaks another dialect."""

import re
from typing import Any

import orjson

from aimgpu.gateway.apart import LARGE_BYTES, apart
from aimgpu.gateway.body import MOST_VALUES, has_more_values
from aimgpu.gateway.http.asgi import Header, Message, Send

EVENT_END = b"\n\n"
_CONTENT_HEADERS = frozenset({b"content-type", b"content-length"})
_DONE = b"[DONE]"
_ERRORS_FROM = 300
_BAD_GATEWAY = 502
NOT_UNDERSTOOD: dict[str, Any] = {
    "message": "The engine's answer could not be understood.",
    "code": "engine_failed",
    "type": "server_error",
    "param": None,
}
THINKING = ("reasoning_content", "reasoning")  # where engines put what a model thinks: llama.cpp and older vLLM, newer vLLM
WRONG_SHAPES = (KeyError, IndexError, TypeError, ValueError, AttributeError)  # a JSON error is a ValueError


class Stopped(Exception):
    """The answer is complete: what the engine would write further is not wanted."""


class StopWatch:
    """Ends a stream of chunks before the first of some sequences, though it came in parts.

    What may be the beginning of one is held back: as much as the longest of them, from a character on that one begins with.
    """

    def __init__(self, sequences: list[str]) -> None:
        self.matched: str | None = None
        self._sequences = [(one[-1], one) for one in sequences]
        self._begins = re.compile("|".join(sorted({re.escape(one[0]) for one in sequences})))
        self._most_held = max(map(len, sequences)) - 1
        self._held = ""
        self._tokens = 0

    def cut(self, chunk: dict[str, Any]) -> bool:
        """Leave in it what may go on; False: nothing of it may. `matched` is set where a sequence is whole with it."""
        choices = chunk.get("choices")
        if not choices:  # the usage
            return True
        choice = choices[0]
        delta, over = choice["delta"], choice.get("finish_reason") is not None
        text = delta.get("content")
        self._tokens += 1
        if not isinstance(text, str):
            if not over:
                return True
            text = ""
        held = self._held + text if self._held else text
        begin = -1
        for last, one in self._sequences:
            if last in text and one in held:
                begin, self.matched = min((held.find(one), one) for _, one in self._sequences if one in held)
                break
        if begin < 0:
            beginning = None if over else self._begins.search(held, max(0, len(held) - self._most_held))
            begin = len(held) if beginning is None else beginning.start()
        self._held = held[begin:]
        delta["content"] = held[:begin]
        return begin > 0 or over or len(delta) > 1

    def ending(self) -> tuple[dict[str, Any], ...]:
        """The chunks that end the answer with the sequence that was found."""
        last = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": self.matched}
        return {"choices": [last]}, {"choices": [], "usage": {"completion_tokens": self._tokens}}


class TranslatingSend:
    """An ASGI `send` for the gateway to write to; a subclass says how each part reads in its dialect."""

    stream_type = b"text/event-stream"

    def __init__(self, send: Send) -> None:
        self.stops: StopWatch | None = None
        self._send = send
        self._head: Message | None = None
        self._streaming = False
        self._started = False
        self._ended = False  # nothing of the stream counts any more: it is complete, or has failed
        self._body = b""

    def whole(self, answer: dict[str, Any]) -> object:
        """The JSON of a complete answer."""
        raise NotImplementedError

    def failure(self, status: int, error: dict[str, Any]) -> object:
        """The JSON of an error; `error` has OpenAI's message, type, param and code."""
        raise NotImplementedError

    def event(self, chunk: dict[str, Any]) -> bytes:
        """What one chunk of a stream becomes; an answer that is never streamed has none."""
        raise ValueError(f"a chunk of {len(chunk)} fields where none was asked for")

    def broken(self, error: dict[str, Any]) -> bytes:
        """What ends a stream that failed."""
        return b"data: " + orjson.dumps({"error": error}) + EVENT_END

    def end(self) -> bytes:
        """What follows after the last chunk of a stream."""
        return b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            self._streaming = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        elif self._streaming:
            await self._pass_events(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._pass_whole()

    async def _pass_whole(self) -> None:
        assert self._head is not None  # noqa: S101  # ASGI: the head comes first
        body = await apart(len(self._body), self._translate_whole, self._head["status"])
        if body is None:
            self._head["status"] = _BAD_GATEWAY
            body = orjson.dumps(self.failure(_BAD_GATEWAY, NOT_UNDERSTOOD))
        await self._send_head(b"application/json", len(body))
        await self._send({"type": "http.response.body", "body": body})

    def _translate_whole(self, status: int) -> bytes | None:
        """None: the engine's answer is not what it should be."""
        try:
            answer = orjson.loads(self._body) if self._body else {}
            if status < _ERRORS_FROM:
                return orjson.dumps(self.whole(answer))
            error = answer.get("error")
            return orjson.dumps(self.failure(status, error if isinstance(error, dict) else {}))
        except WRONG_SHAPES:
            return None

    async def _pass_events(self, message: Message) -> None:
        if not self._started:
            self._started = True
            await self._send_head(self.stream_type, None)
        events = message.get("body", b"")
        body = await apart(len(events), self._translate_all, events)
        more = message.get("more_body", False)
        if not more:
            body += self._end_stream()  # some engines leave the last event out
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more and not self.stopped})
        if more and self.stopped:
            raise Stopped

    @property
    def stopped(self) -> bool:
        """A sequence has ended the answer."""
        return self.stops is not None and self.stops.matched is not None

    def _translate_all(self, events: bytes) -> bytes:
        return b"".join(map(self._translate, events.split(EVENT_END)))

    def _translate(self, event: bytes) -> bytes:
        data = read_event(event)
        if data is None or self._ended:
            return b""
        if len(data) > LARGE_BYTES and has_more_values(data, MOST_VALUES):
            return self._break_off(NOT_UNDERSTOOD)
        if data == _DONE:
            return self._end_stream()
        try:
            chunk = orjson.loads(data)
            error = chunk.get("error")
            if not error:
                return self.event(chunk) if self.stops is None else self._cut(chunk, self.stops)
        except WRONG_SHAPES:
            error = NOT_UNDERSTOOD
        return self._break_off(error)

    def _cut(self, chunk: dict[str, Any], stops: StopWatch) -> bytes:
        events = self.event(chunk) if stops.cut(chunk) else b""
        if stops.matched is None:
            return events
        return events + b"".join(map(self.event, stops.ending())) + self._end_stream()

    def _end_stream(self) -> bytes:
        if self._ended:
            return b""
        try:
            last = self.end()
        except WRONG_SHAPES:
            return self._break_off(NOT_UNDERSTOOD)
        self._ended = True
        return last

    def _break_off(self, error: object) -> bytes:
        """Engines go on after an error, with the end of a stream that did not come to its end."""
        self._ended = True
        return self.broken(error if isinstance(error, dict) else {**NOT_UNDERSTOOD, "message": str(error)})

    async def _send_head(self, content_type: bytes, length: int | None) -> None:
        assert self._head is not None  # noqa: S101  # ASGI: the head comes first
        headers: list[Header] = [header for header in self._head["headers"] if header[0] not in _CONTENT_HEADERS]
        headers.append((b"content-type", content_type))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._send({**self._head, "headers": headers})


def read_event(event: bytes) -> bytes | None:
    """The data of one server-sent event; None where it has none."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def read_text(said: dict[str, Any], *names: str) -> str:
    """What is said under the first of these names that holds something. Raises TypeError where that is not a text."""
    text = next((said[name] for name in names if said.get(name)), "")
    if not isinstance(text, str):
        raise TypeError(names)
    return text


class CollectedAnswer:
    """An ASGI `send` that keeps a whole answer, for a dialect that makes something else of it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        else:
            self.body += message.get("body", b"")

    @property
    def ok(self) -> bool:
        return 0 < self.status < _ERRORS_FROM

    def json(self) -> Any:  # noqa: ANN401  # JSON
        return orjson.loads(self.body)

    async def pass_on(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})
