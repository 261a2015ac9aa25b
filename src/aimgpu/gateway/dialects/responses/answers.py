"""Chats as answers of the Responses API, whole or as events."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import orjson

from aimgpu.gateway.dialects.call import Fields
from aimgpu.gateway.dialects.tool_calls import TextParts
from aimgpu.gateway.dialects.translate import THINKING, TranslatingSend, read_text
from aimgpu.gateway.http.asgi import Send

_MOST_KEPT = 16 * 1024 * 1024
_MOST_ITEMS = 1000  # thoughts, texts and calls by turns: each takes six events
_ITEM_COST = 500
Finished = Callable[[Fields], None]  # gets the complete response


class ResponseSend(TranslatingSend):
    def __init__(self, send: Send, request: Fields, finished: Finished) -> None:
        super().__init__(send)
        self._request = request
        self._finished = finished
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._sequence = -1
        self._items: list[Fields] = []
        self._text = TextParts()  # of the item that is being written
        self._kept = 0  # of all items: text, and what each takes beside it
        self._open: tuple[str, int] | None = None  # kind of the item that is being written, and the tool's index
        self._reason = "stop"
        self._usage: Fields | None = None

    def whole(self, answer: Fields) -> object:
        choice = (answer.get("choices") or [{}])[0]
        message = choice.get("message") or {}
        self._note(answer, choice)
        if thinking := read_text(message, *THINKING):
            self._items.append(_reasoning(thinking))
        if text := read_text(message, "content"):
            self._items.append(_message(text, _logprobs(choice)))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            self._items.append(_call(call.get("id"), function["name"], function.get("arguments") or ""))
        return self._finish()

    def failure(self, status: int, error: Fields) -> object:  # noqa: ARG002  # the status goes out with the head
        return {"error": error}

    def event(self, chunk: Fields) -> bytes:
        events = [self._begin()]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self._note(chunk, choice)
            if thinking := read_text(delta, *THINKING):
                events.append(self._write_text("reasoning", thinking, []))
            if text := read_text(delta, "content"):
                events.append(self._write_text("message", text, _logprobs(choice)))
            for position, call in enumerate(delta.get("tool_calls") or ()):
                events.append(self._write_call(call.get("index", position), call))
        self._note(chunk, {})
        return b"".join(events)

    def broken(self, error: Fields) -> bytes:
        events = self._begin()
        self._fill()
        failed = self._describe("failed") | {"error": {"code": "server_error", "message": error.get("message")}}
        return events + self._emit("response.failed", response=failed)

    def end(self) -> bytes:
        events = self._begin() + self._close()
        response = self._finish()
        return events + self._emit(f"response.{response['status']}", response=response)

    def _begin(self) -> bytes:
        if self._sequence >= 0:
            return b""
        begun = self._describe("in_progress")
        return self._emit("response.created", response=begun) + self._emit("response.in_progress", response=begun)

    def _write_text(self, kind: str, text: str, logprobs: list[Any]) -> bytes:
        events = b""
        if self._open != (kind, 0):
            events = self._open_item((kind, 0), _message("", []) if kind == "message" else _reasoning(""))
            if kind == "message":
                events += self._emit("response.content_part.added", **self._part_place(), part=self._items[-1]["content"][0])
        part = self._items[-1]["content"][0]
        self._keep(text, len(logprobs))
        if kind == "reasoning":
            return events + self._emit("response.reasoning_text.delta", **self._part_place(), delta=text)
        part["logprobs"] += logprobs
        return events + self._emit("response.output_text.delta", **self._part_place(), delta=text, logprobs=logprobs)

    def _write_call(self, index: int, call: Fields) -> bytes:
        function = call.get("function") or {}
        events = b""
        if self._open != ("call", index):
            events = self._open_item(("call", index), _call(call.get("id"), function.get("name") or "", ""))
        text = function.get("arguments") or ""
        if text:
            self._keep(text, 0)
            events += self._emit("response.function_call_arguments.delta", **self._place(), delta=text)
        return events

    def _open_item(self, kind: tuple[str, int], item: Fields) -> bytes:
        events = self._close()
        self._open = kind
        self._items.append(item)
        if len(self._items) > _MOST_ITEMS:
            raise ValueError(len(self._items))
        shown = {**item, "status": "in_progress"} | ({"content": []} if "content" in item else {})
        return events + self._emit("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        kind, item = self._open[0], self._items[-1]
        self._fill()
        self._open = None
        if kind == "call":
            place = {**self._place(), "name": item["name"]}
            events = self._emit("response.function_call_arguments.done", **place, arguments=item["arguments"])
        elif kind == "reasoning":
            events = self._emit("response.reasoning_text.done", **self._part_place(), text=item["content"][0]["text"])
        else:
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            events = self._emit("response.output_text.done", **self._part_place(), **done)
            events += self._emit("response.content_part.done", **self._part_place(), part=part)
        return events + self._emit("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _keep(self, text: str, logprobs: int) -> None:
        """Raises ValueError where all items together are longer than any model's answer."""
        self._kept += len(text) + _ITEM_COST * logprobs
        if self._kept > _MOST_KEPT:
            raise ValueError(self._kept)
        self._text.add(text)

    def _fill(self) -> None:
        """Put what was said into the item that is being written."""
        if self._open is not None:
            item, text = self._items[-1], self._text.join()
            if self._open[0] == "call":
                item["arguments"] = text
            else:
                item["content"][0]["text"] = text
            self._text = TextParts()

    def _place(self) -> Fields:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _part_place(self) -> Fields:
        return {**self._place(), "content_index": 0}

    def _emit(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401  # JSON
        self._sequence += 1
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))

    def _note(self, answer: Fields, choice: Fields) -> None:
        self._reason = choice.get("finish_reason") or self._reason
        usage = answer.get("usage")
        if isinstance(usage, dict):
            read, written = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
            self._usage = {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            }

    def _finish(self) -> Fields:
        cut = self._reason == "length"
        response = self._describe("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._finished(response)
        return response

    def _describe(self, status: str) -> Fields:
        asked = self._request
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": asked.get("model"),
            "output": self._items,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": asked.get("previous_response_id"),
            "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
            "store": asked.get("store", True),
            "temperature": asked.get("temperature"),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": self._usage,
            "user": asked.get("user"),
        }


def _message(text: str, logprobs: list[Any]) -> Fields:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "id": f"msg_{secrets.token_hex(24)}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _reasoning(text: str) -> Fields:
    part = {"type": "reasoning_text", "text": text}
    return {"id": f"rs_{secrets.token_hex(24)}", "type": "reasoning", "status": "completed", "summary": [], "content": [part]}


def _call(identity: str | None, name: str, arguments: str) -> Fields:
    return {
        "id": f"fc_{secrets.token_hex(24)}",
        "type": "function_call",
        "status": "completed",
        "call_id": identity or f"call_{secrets.token_hex(12)}",
        "name": name,
        "arguments": arguments,
    }


def _logprobs(choice: Fields) -> list[Any]:
    found = choice.get("logprobs")
    return list(found.get("content") or ()) if isinstance(found, dict) else []
