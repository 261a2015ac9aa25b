"""Texts and tool calls that come in parts, put together: each part is copied once, and all of them are bounded."""

from typing import Any

import orjson

from aimgpu.gateway.dialects.call import Fields

_MOST_KEPT = 16 * 1024 * 1024  # of an answer, if it is kept until its end
_COST = 64  # of a part, beside its letters


class TextParts:
    """Raises ValueError where an answer is longer than any model's."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        if text:
            self._size += len(text) + _COST
            if self._size > _MOST_KEPT:
                raise ValueError(self._size)
            self._parts.append(text)

    def join(self) -> str:
        text = "".join(self._parts)
        self._parts = [text] if text else []
        return text


class _Call:
    def __init__(self) -> None:
        self.id = ""
        self.name = TextParts()
        self.arguments = TextParts()


class ToolCallParts:
    """Deltas of OpenAI's streams, or the calls of a whole answer."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._size = 0

    def add(self, deltas: list[Fields]) -> None:
        for position, delta in enumerate(deltas):
            function = delta.get("function") or {}
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            self._size += len(name) + len(arguments) + _COST
            if self._size > _MOST_KEPT:
                raise ValueError(self._size)
            index = delta.get("index", position)
            call = self._calls.get(index)
            if call is None:
                call = self._calls[index] = _Call()
            call.id = call.id or delta.get("id") or ""
            call.name.add(name)
            call.arguments.add(arguments)

    def written(self) -> list[Fields]:
        """In OpenAI's shape."""
        return [
            {"id": call.id, "type": "function", "function": {"name": call.name.join(), "arguments": call.arguments.join()}}
            for _, call in sorted(self._calls.items())
        ]

    def whole(self) -> list[Fields]:
        """Each with its arguments as an object; what is not an object of JSON (an answer cut short) stays text."""
        return [
            {"id": call.id, "name": call.name.join(), "arguments": parse_arguments(call.arguments.join())}
            for _, call in sorted(self._calls.items())
        ]


def parse_arguments(text: str) -> Any:  # noqa: ANN401  # JSON
    try:
        return orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return {"_incomplete": text}
