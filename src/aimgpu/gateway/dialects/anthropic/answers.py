"""OpenAI's answers as Anthropic's messages, whole or as events."""

import secrets
from typing import Any

import orjson

from aimgpu.gateway.dialects.call import Fields
from aimgpu.gateway.dialects.tool_calls import parse_arguments
from aimgpu.gateway.dialects.translate import THINKING, TranslatingSend, read_text
from aimgpu.gateway.http.asgi import Send

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SERVER_ERROR = 500


def error_json(status: int, error: Fields) -> Fields:
    kind = _TYPES.get(status, "api_error" if status >= _SERVER_ERROR else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.get("message") or f"The engine answered {status}."}}


class MessageSend(TranslatingSend):
    def __init__(self, send: Send, model: str) -> None:
        super().__init__(send)
        self._model = model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._begun = False
        self._open: tuple[str, int] | None = None  # kind of the block that is being written, and the tool's index
        self._index = -1
        self._reason: Fields = {"stop_reason": "end_turn", "stop_sequence": None}
        self._usage: Fields = {"input_tokens": 0, "output_tokens": 0}
        self.input_tokens = 0  # of the prompt, if that was counted before

    def whole(self, answer: Fields) -> object:
        choice = (answer.get("choices") or [{}])[0]
        self._note(answer, choice)
        message = choice.get("message") or {}
        blocks: list[Fields] = []
        if thinking := read_text(message, *THINKING):
            blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if text := read_text(message, "content"):
            blocks.append({"type": "text", "text": text})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = parse_arguments(function.get("arguments") or "")
            blocks.append(
                {"type": "tool_use", "id": call.get("id") or _tool_id(), "name": function["name"], "input": arguments}
            )
        return self._message(blocks) | self._reason | {"usage": self._counts()}

    def failure(self, status: int, error: Fields) -> object:
        return error_json(status, error)

    def event(self, chunk: Fields) -> bytes:
        self._note(chunk, {})
        events = [b"" if self._begun else self._begin()]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if thinking := read_text(delta, *THINKING):
                block: Fields = {"type": "thinking", "thinking": "", "signature": ""}
                events.append(self._write(("thinking", 0), block, {"type": "thinking_delta", "thinking": thinking}))
            if text := read_text(delta, "content"):
                events.append(self._write(("text", 0), {"type": "text", "text": ""}, {"type": "text_delta", "text": text}))
            for position, call in enumerate(delta.get("tool_calls") or ()):
                events.append(self._write_call(call.get("index", position), call))
            self._note(chunk, choice)
        return b"".join(events)

    def broken(self, error: Fields) -> bytes:
        return _event(error_json(_SERVER_ERROR, error), "error")

    def end(self) -> bytes:
        events = b"" if self._begun else self._begin()
        return (
            events
            + self._close()
            + _event({"type": "message_delta", "delta": self._reason, "usage": self._counts()})
            + _event({"type": "message_stop"})
        )

    def _counts(self) -> Fields:
        return self._usage | {"input_tokens": self._usage["input_tokens"] or self.input_tokens}

    def _begin(self) -> bytes:
        self._begun = True
        message = self._message([]) | {
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts() | {"output_tokens": 0},
        }
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def _write_call(self, index: int, call: Fields) -> bytes:
        function = call.get("function") or {}
        block: Fields = {
            "type": "tool_use",
            "id": call.get("id") or _tool_id(),
            "name": function.get("name") or "",
            "input": {},
        }
        return self._write(
            ("tool", index), block, {"type": "input_json_delta", "partial_json": function.get("arguments") or ""}
        )

    def _write(self, kind: tuple[str, int], block: Fields, delta: Fields) -> bytes:
        """A block is opened by its first delta, and closed by the first of another."""
        events = b""
        if self._open != kind:
            events = self._close()
            self._open = kind
            self._index += 1
            events += _event({"type": "content_block_start", "index": self._index, "content_block": block})
        return events + _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event({"type": "content_block_stop", "index": self._index})

    def _message(self, blocks: list[Fields]) -> Fields:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": blocks}

    def _note(self, answer: Fields, choice: Fields) -> None:
        reason: Any = choice.get("finish_reason")
        if reason:
            matched = choice.get("stop_reason")  # vLLM names the sequence that ended the answer
            at_sequence = reason == "stop" and isinstance(matched, str)
            self._reason = {
                "stop_reason": "stop_sequence" if at_sequence else _REASONS.get(reason, "end_turn"),
                "stop_sequence": matched if at_sequence else None,
            }
        usage = answer.get("usage")
        if isinstance(usage, dict):
            counts = (usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)
            self._usage = dict(zip(("input_tokens", "output_tokens"), counts, strict=True))


def _tool_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _event(data: Fields, name: str | None = None) -> bytes:
    return b"event: %b\ndata: %b\n\n" % ((name or data["type"]).encode(), orjson.dumps(data))
