"""OpenAI's stream as Ollama's answer, in one piece or line by line."""

import re
from datetime import UTC, datetime
from time import monotonic_ns
from typing import Any

import orjson

from aimgpu.gateway.apart import apart
from aimgpu.gateway.dialects.call import Fields
from aimgpu.gateway.dialects.tool_calls import TextParts, ToolCallParts
from aimgpu.gateway.dialects.translate import THINKING, TranslatingSend, read_text
from aimgpu.gateway.http.asgi import Message, Send

_FAILED = 502
_MOST_LOGPROBS = 100_000  # tokens
_LONGEST_VECTOR = 1024 * 1024
_VECTOR = re.compile(rb'(?<!\\)"embedding"\s*:\s*(\[[^\[\]"]*\])')  # a quote within a text has a backslash before it


class OllamaSend(TranslatingSend):
    """Durations are measured here: to the first token the prompt was evaluated, from then on the answer."""

    stream_type = b"application/x-ndjson"

    def __init__(self, send: Send, model: str, *, stream: bool, chat: bool) -> None:
        super().__init__(send)
        self._model = model
        self._stream = stream
        self._chat = chat
        self._tools = ToolCallParts()
        self._began = monotonic_ns()
        self._first: int | None = None
        self._usage: Fields = {}
        self._reason = "stop"
        self._text = TextParts()
        self._thinking = TextParts()
        self._logprobs: list[Any] = []
        self._error: str | None = None
        self._whole = b""  # the answer, if it is not streamed

    def whole(self, answer: Fields) -> object:
        """Some engines answer a stream's request in one piece."""
        self._stream = False  # what is said is kept
        choice = (answer.get("choices") or [{}])[0]
        self._note_usage(answer)
        self._note(choice, choice.get("message") or {"content": choice.get("text")})
        return self._final()

    def failure(self, status: int, error: Fields) -> object:
        return {"error": error.get("message") or f"The engine answered {status}."}

    def event(self, chunk: Fields) -> bytes:
        self._note_usage(chunk)
        lines = []
        for choice in chunk.get("choices") or ():
            text, thinking = self._note(choice, choice.get("delta") or {"content": choice.get("text")})
            if self._stream and (text or thinking):
                lines.append(_line(self._part(text, thinking, choice)))
        return b"".join(lines)

    def broken(self, error: Fields) -> bytes:
        self._error = str(error.get("message"))
        return _line({"error": self._error})

    def end(self) -> bytes:
        if not self._stream:
            self._whole = orjson.dumps(self._final())
            return b""
        lines = b""
        if calls := self._tools.whole():
            lines = _line(self._part("", "", {}) | self._said("", "", calls))
        return lines + _line(self._final(last=True))

    async def _pass_events(self, message: Message) -> None:
        if self._stream:
            await super()._pass_events(message)
            return
        events = message.get("body", b"")
        await apart(len(events), self._translate_all, events)
        if not message.get("more_body", False):
            self._end_stream()
            assert self._head is not None  # noqa: S101  # ASGI: the head comes first
            if self._error is not None:
                self._head["status"] = _FAILED
            body = self._whole if self._error is None else orjson.dumps({"error": self._error})
            await self._send_head(b"application/json", len(body))
            await self._send({"type": "http.response.body", "body": body})

    def _note(self, choice: Fields, delta: Fields) -> tuple[str, str]:
        """What is said and thought in it."""
        text, thinking = read_text(delta, "content"), read_text(delta, *THINKING)
        self._reason = choice.get("finish_reason") or self._reason
        if not self._stream:
            self._text.add(text)
            self._thinking.add(thinking)
        if delta.get("tool_calls"):
            self._tools.add(delta["tool_calls"])
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and not self._stream:
            self._logprobs += logprobs.get("content") or []
            if len(self._logprobs) > _MOST_LOGPROBS:
                raise ValueError(len(self._logprobs))
        if self._first is None and (thinking or text or delta.get("tool_calls")):
            self._first = monotonic_ns()
        return text, thinking

    def _note_usage(self, answer: Fields) -> None:
        usage = answer.get("usage")
        if isinstance(usage, dict):
            self._usage = {"prompt_eval_count": usage.get("prompt_tokens"), "eval_count": usage.get("completion_tokens")}

    def _part(self, content: str, thinking: str, choice: Fields) -> Fields:
        line = {"model": self._model, "created_at": datetime.now(UTC).isoformat(), "done": False} | self._said(
            content, thinking
        )
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and logprobs.get("content"):
            line["logprobs"] = logprobs["content"]
        return line

    def _said(self, content: str, thinking: str, calls: list[Fields] | None = None) -> Fields:
        said: Fields = {"thinking": thinking} if thinking else {}
        if calls:
            said["tool_calls"] = [
                {"id": call["id"], "function": {"index": index, "name": call["name"], "arguments": call["arguments"]}}
                for index, call in enumerate(calls)
            ]
        return {"message": {"role": "assistant", "content": content, **said}} if self._chat else {"response": content, **said}

    def _final(self, *, last: bool = False) -> Fields:
        """With everything that was said, unless it is the `last` line of a stream."""
        now = monotonic_ns()
        first = self._first or now
        text, thinking = ("", "") if last else (self._text.join(), self._thinking.join())
        line = self._part(text, thinking, {})
        if not last:
            line |= self._said(text, thinking, self._tools.whole())
            line |= {"logprobs": self._logprobs} if self._logprobs else {}
        counts = {name: count for name, count in self._usage.items() if count is not None}
        return line | {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_duration": first - self._began,
            "eval_duration": now - first,
            **counts,
        }


class OllamaEmbeddings(TranslatingSend):
    """Vectors are passed on as they were written, parsed one by one to see that they are some.

    A call of the parser keeps the interpreter to itself: for all vectors of an answer of 16 MiB it took up to 100 ms.
    """

    def __init__(self, send: Send, model: str, *, legacy: bool) -> None:
        super().__init__(send)
        self._model = model
        self._legacy = legacy
        self._vectors: list[bytes] = []
        self._began = monotonic_ns()

    def _translate_whole(self, status: int) -> bytes | None:
        self._body = _VECTOR.sub(self._keep, self._body)
        return super()._translate_whole(status)

    def _keep(self, found: re.Match[bytes]) -> bytes:
        """The number that stands for a vector until the answer is written; null if the vector cannot be read."""
        vector = found[1]
        if len(vector) > _LONGEST_VECTOR:
            return b'"embedding":null'
        try:
            orjson.loads(vector)
        except orjson.JSONDecodeError:
            return b'"embedding":null'
        self._vectors.append(vector)
        return b'"embedding":%d' % (len(self._vectors) - 1)

    def whole(self, answer: Fields) -> object:
        given = [one["embedding"] for one in answer["data"]]
        vectors = [one if isinstance(one, str) else orjson.Fragment(self._vectors[one]) for one in given]
        if self._legacy:
            return {"embedding": vectors[0]}
        return {
            "model": self._model,
            "embeddings": vectors,
            "total_duration": monotonic_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_count": (answer.get("usage") or {}).get("prompt_tokens"),
        }

    def failure(self, status: int, error: Fields) -> object:
        return {"error": error.get("message") or f"The engine answered {status}."}


def _line(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
