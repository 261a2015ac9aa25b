"""Tool calls that come in parts, put together."""

from typing import Any

import orjson

from aimgpu.gateway.dialects.call import Fields


class ToolCallParts:
    """Deltas of OpenAI's streams, or the calls of a whole answer."""

    def __init__(self) -> None:
        self._calls: dict[int, Fields] = {}

    def add(self, deltas: list[Fields]) -> None:
        for position, delta in enumerate(deltas):
            call = self._calls.setdefault(delta.get("index", position), {"id": "", "name": "", "arguments": ""})
            function = delta.get("function") or {}
            call["id"] = call["id"] or delta.get("id") or ""
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def whole(self) -> list[Fields]:
        """Each with its arguments as an object; what is no object of JSON (an answer cut short) stays text."""
        return [{**call, "arguments": parse_arguments(call["arguments"])} for _, call in sorted(self._calls.items())]


def parse_arguments(text: str) -> Any:  # noqa: ANN401  # JSON
    try:
        return orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return {"_incomplete": text}
