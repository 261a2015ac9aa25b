"""Requests of the Responses API as chats."""

from collections.abc import Iterable, Iterator
from typing import Any

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.body import check_length
from aimgpu.gateway.dialects.call import Fields

_REFUSED = {
    "background": "Responses are not made in the background.",
    "conversation": "Conversations are not kept as objects; use 'previous_response_id'.",
    "prompt": "Stored prompts are not offered.",
}
_SAME = ("temperature", "top_p", "top_k", "user", "seed", "parallel_tool_calls")
_SYSTEM = ("system", "developer")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text"})


def read_items(given: object) -> list[Fields]:
    """`input` as a list of items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise InvalidRequest("'input' must be a string or an array of items.", param="input")
    check_length("input", given)
    return given


def check(fields: Fields) -> None:
    for name, reason in _REFUSED.items():
        if fields.get(name):
            raise InvalidRequest(reason, param=name)
    if not isinstance(fields.get("instructions"), str | None):
        raise InvalidRequest("'instructions' must be a string.", param="instructions")
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidRequest("'tools' must be an array.", param="tools")
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise InvalidRequest(
                f"Tools of type '{str(kind)[:50]}' are not offered.", hint="Only functions are.", param="tools"
            )


def to_chat(fields: Fields, items: list[Fields]) -> Fields:
    """`items`: the whole conversation."""
    instructions = fields.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat: Fields = {"model": fields.get("model"), "messages": _joined([*system, *_messages(items)])}
    chat |= {name: fields[name] for name in _SAME if fields.get(name) is not None}
    if fields.get("max_output_tokens") is not None:
        chat["max_tokens"] = fields["max_output_tokens"]
    if fields.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": fields["top_logprobs"]}
    if fields.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        chat["reasoning_effort"] = reasoning["effort"]
    return chat | _format(fields.get("text")) | _tools(fields)


def _messages(items: list[Fields]) -> Iterator[Fields]:
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            yield {"role": _role(item), "content": _content(item.get("content"))}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            yield {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}],
            }
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
        elif kind != "reasoning":  # what was thought before is not shown again
            raise InvalidRequest(f"Items of type '{str(kind)[:50]}' are not offered.", param="input")


def _joined(messages: Iterable[Fields]) -> list[Fields]:
    """Several system messages in a row are one, and the calls of one turn belong to one message.

    Each message is a new object: it is added to in place, since a turn may have a hundred thousand calls.
    """
    joined: list[Fields] = []
    instructions: list[str] = []  # of the system messages that end the list
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] == "system" and isinstance(message["content"], str):
            instructions.append(message["content"])
            if len(instructions) == 1:
                joined.append(message)
            continue
        _close_system(joined, instructions)
        if message.get("tool_calls") and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            joined.append(message)
    _close_system(joined, instructions)
    return joined


def _close_system(joined: list[Fields], instructions: list[str]) -> None:
    if len(instructions) > 1:
        joined[-1]["content"] = "\n\n".join(instructions)
    instructions.clear()


def _role(item: Fields) -> str:
    role = item.get("role")
    if not isinstance(role, str):
        raise InvalidRequest("Each message of 'input' must have a role.", param="input")
    return "system" if role in _SYSTEM else role


def _content(content: object) -> Any:  # noqa: ANN401  # text, or parts of OpenAI's chat
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequest("The content of an item must be a string or an array of parts.", param="input")
    parts = [_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Fields) -> Fields:
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise InvalidRequest(f"Parts of type '{str(kind)[:50]}' are not offered.", param="input")


def _format(text: object) -> Fields:
    wanted = text.get("format") if isinstance(text, dict) else None
    kind = wanted.get("type", "text") if isinstance(wanted, dict) else "text"
    if kind == "text" or not isinstance(wanted, dict):
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise InvalidRequest("'text.format' must be text, json_object, or a json_schema with its schema.", param="text")
    schema = {name: wanted[name] for name in ("name", "schema", "strict") if wanted.get(name) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(fields: Fields) -> Fields:
    tools = fields.get("tools")
    if not tools:
        return {}
    names = ("name", "description", "parameters", "strict")
    functions = [{name: tool[name] for name in names if tool.get(name) is not None} for tool in tools]
    found: Fields = {"tools": [{"type": "function", "function": function} for function in functions]}
    choice = fields.get("tool_choice")
    return found | ({"tool_choice": choice} if choice else {})
