"""Anthropic's requests as OpenAI's."""

from collections.abc import Iterator
from typing import Any

import orjson

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.body import check_length, check_stops
from aimgpu.gateway.dialects.call import Fields

_SAME = ("temperature", "top_p", "top_k", "stream")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_LEFT_OUT = frozenset({"thinking", "redacted_thinking"})  # of earlier turns: models are not shown what they thought before


def _object(required: tuple[str, ...], **properties: Fields) -> Fields:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT: Fields = {"type": "string"}
_NUMBER: Fields = {"type": "integer"}
_PAIR: Fields = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}
_EDITS = ("view", "create", "str_replace", "insert")
_EDITOR = {"old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER, "insert_text": _TEXT, "file_text": _TEXT}
# Tools that the caller runs and Anthropic defines: clients send a type and a name, a model needs words and a schema.
_CLIENT_TOOLS: dict[str, tuple[str, Fields]] = {
    "bash_": ("Run a command in a shell that stays open.", _object((), command=_TEXT, restart={"type": "boolean"})),
    "text_editor_": (
        "View and edit text files.",
        _object(
            ("command", "path"),
            command={"type": "string", "enum": [*_EDITS, "undo_edit"]},
            path=_TEXT,
            view_range=_PAIR,
            **_EDITOR,
        ),
    ),
    "memory_": (
        "Keep notes in files below /memories.",
        _object(
            ("command",),
            command={"type": "string", "enum": [*_EDITS, "delete", "rename"]},
            path=_TEXT,
            old_path=_TEXT,
            new_path=_TEXT,
            view_range=_PAIR,
            **_EDITOR,
        ),
    ),
    "computer_": (
        "Use the screen, the mouse and the keyboard of a computer.",
        _object(
            ("action",),
            action=_TEXT,
            coordinate=_PAIR,
            start_coordinate=_PAIR,
            text=_TEXT,
            duration={"type": "number"},
            scroll_amount=_NUMBER,
            scroll_direction={"type": "string", "enum": ["up", "down", "left", "right"]},
        ),
    ),
}


def to_chat(fields: Fields, model: str, *, counting: bool = False) -> Fields:
    """`counting`: only what makes up the prompt."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("'messages' is missing or empty.", param="messages")
    check_length("messages", messages)
    chat: Fields = {"model": model, "messages": [*_system(fields.get("system")), *_messages(messages)]}
    chat |= _tools(fields)
    if counting:
        return chat
    if not isinstance(fields.get("max_tokens"), int):
        raise InvalidRequest("'max_tokens' must be an integer.", param="max_tokens")
    chat["max_tokens"] = fields["max_tokens"]
    chat |= {name: fields[name] for name in _SAME if fields.get(name) is not None}
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
        check_stops("stop_sequences", chat["stop"])
    if fields.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    chat |= _thinking(fields.get("thinking"))
    return chat | _output_format(fields)


def _system(system: object) -> Iterator[Fields]:
    text = "\n\n".join(_texts(system, "system")) if system else ""
    if text:
        yield {"role": "system", "content": text}


def _texts(content: object, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not all(isinstance(block, dict) and block.get("type") == "text" for block in content):
        raise InvalidRequest(f"'{where}' must be a string or an array of text blocks.", param=where)
    return [str(block.get("text", "")) for block in content]


def _messages(messages: list[Any]) -> Iterator[Fields]:
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"'messages[{index}].role' must be user or assistant.", param="messages")
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif isinstance(content, list) and all(isinstance(block, dict) for block in content):
            yield from _user(content) if role == "user" else _assistant(role, content)
        else:
            raise InvalidRequest(f"'messages[{index}].content' must be a string or an array of blocks.", param="messages")


def _user(blocks: list[Fields]) -> Iterator[Fields]:
    """Results of tools come first: they answer the turn before."""
    parts: list[Fields] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block)}
        else:
            parts.append(_part(block))
    if all(part["type"] == "text" for part in parts):
        text = "\n\n".join(part["text"] for part in parts)
        if parts:
            yield {"role": "user", "content": text}
    else:
        yield {"role": "user", "content": parts}


def _result(block: Fields) -> str:
    content = block.get("content")
    text = "" if content is None else "\n\n".join(_texts(content, "tool_result.content"))
    return f"Error: {text}" if block.get("is_error") else text


def _part(block: Fields) -> Fields:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise InvalidRequest(f"Blocks of type '{str(kind)[:50]}' are not offered.", hint="Send text or images.", param="messages")


def _assistant(role: str, blocks: list[Fields]) -> Iterator[Fields]:
    texts, calls = [], []
    for block in blocks:
        if block.get("type") == "tool_use":
            arguments = orjson.dumps(block.get("input") or {}).decode()
            calls.append(
                {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}
            )
        elif block.get("type") not in _LEFT_OUT:
            texts.append(_spoken(block))
    message: Fields = {"role": role, "content": "\n\n".join(texts)}
    yield message | ({"tool_calls": calls} if calls else {})


def _spoken(block: Fields) -> str:
    part = _part(block)
    if part["type"] != "text":
        raise InvalidRequest("An assistant's turn holds text and tool calls, no images.", param="messages")
    return str(part["text"])


def _tools(fields: Fields) -> Fields:
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidRequest("'tools' must be an array.", param="tools")
    check_length("tools", tools)
    found: Fields = {"tools": [_tool(tool) for tool in tools]} if tools else {}
    choice = fields.get("tool_choice")
    if choice is None:
        return found
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in ("tool", *_CHOICES):
        raise InvalidRequest("'tool_choice' must be an object with a type: auto, any, tool or none.", param="tool_choice")
    if not tools:
        if kind in ("tool", "any"):
            raise InvalidRequest("'tool_choice' asks for a tool, and there are none.", param="tool_choice")
        return found
    named = {"type": "function", "function": {"name": choice.get("name")}}
    found["tool_choice"] = named if kind == "tool" else _CHOICES[kind]
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _tool(tool: object) -> Fields:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise InvalidRequest("Each tool must have a name.", param="tools")
    kind = str(tool.get("type") or "custom")[:50]
    known = next((found for prefix, found in _CLIENT_TOOLS.items() if kind.startswith(prefix)), None)
    if kind != "custom" and known is None:
        raise InvalidRequest(
            f"Tools of type '{kind}' run at Anthropic and are not offered.", hint="Give an input_schema.", param="tools"
        )
    description, schema = known or (tool.get("description") or "", tool.get("input_schema") or {})
    return {"type": "function", "function": {"name": tool["name"], "description": description, "parameters": schema}}


def _thinking(thinking: object) -> Fields:
    """Whether a model that can think does; how long is the model's own choice."""
    if not isinstance(thinking, dict):
        return {}
    return {"chat_template_kwargs": {"enable_thinking": thinking.get("type") in ("enabled", "adaptive")}}


def _output_format(fields: Fields) -> Fields:
    configured = fields.get("output_config")
    wanted = fields.get("output_format") or (configured.get("format") if isinstance(configured, dict) else None)
    if not isinstance(wanted, dict):
        return {}
    schema = wanted.get("schema")
    if wanted.get("type") != "json_schema" or not isinstance(schema, dict):
        raise InvalidRequest("'output_format' must be a json_schema with its schema.", param="output_format")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}}
