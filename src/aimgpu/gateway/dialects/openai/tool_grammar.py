"""Tools for a model whose template has none: the tools are described to it, and a grammar holds its answer to a call.

The answer is one JSON object, {"name": ..., "arguments": {...}}, or {"answer": "..."} where no call is forced.
"""

import re
import secrets
from typing import Any

import orjson

from aimgpu.gateway.dialects.call import Fields
from aimgpu.gateway.dialects.openai.tool_choice import ToolChoice

_DEFINITIONS = ("$defs", "definitions")
_NAME = re.compile(r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"arguments"\s*:\s*')
_ANY_OBJECT: Fields = {"type": "object"}


def constrain(fields: Fields, choice: ToolChoice) -> Fields:
    """The request without tools, for an answer that `read_call` understands."""
    dropped = ("tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options")
    kept = {name: value for name, value in fields.items() if name not in dropped}
    schema = {"type": "json_schema", "json_schema": {"name": "call", "schema": _schema(choice), "strict": True}}
    messages = [_plain(message) for message in fields.get("messages") or ()]
    return kept | {"messages": _with_instructions(messages, choice), "response_format": schema, "stream": False}


def read_call(answer: Fields) -> Fields:
    """The engine's answer with its JSON turned into a tool call, or into text."""
    choices = [_read_choice(choice) for choice in answer.get("choices") or ()]
    return {**answer, "choices": choices}


def _read_choice(choice: Fields) -> Fields:
    text = (choice.get("message") or {}).get("content") or ""
    message: Fields = {"role": "assistant", "content": None}
    reason = choice.get("finish_reason")
    try:
        said: Any = orjson.loads(text)
    except orjson.JSONDecodeError:  # cut short by max_tokens
        begun = _NAME.match(text)
        message |= {"tool_calls": [_call(begun[1], text[begun.end() :])]} if begun else {"content": ""}
        return {**choice, "message": message, "finish_reason": "length"}
    if isinstance(said, dict) and isinstance(said.get("name"), str):
        message["tool_calls"] = [_call(said["name"], orjson.dumps(said.get("arguments") or {}).decode())]
        return {**choice, "message": message, "finish_reason": "tool_calls"}
    message["content"] = said.get("answer", text) if isinstance(said, dict) else text
    return {**choice, "message": message, "finish_reason": reason}


def _call(name: str, arguments: str) -> Fields:
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _schema(choice: ToolChoice) -> Fields:
    definitions: Fields = {}
    options = [_option(index, tool["function"], definitions) for index, tool in enumerate(choice.tools)]
    if not choice.forced:
        options.append(_object({"answer": {"type": "string"}}))
    schema = options[0] if len(options) == 1 else {"anyOf": options}
    return schema | ({"$defs": definitions} if definitions else {})


def _option(index: int, function: Fields, definitions: Fields) -> Fields:
    """Definitions of a tool's schema move to the top, where references look for them."""
    parameters = dict(function.get("parameters") or _ANY_OBJECT)
    for key in _DEFINITIONS:
        for name, definition in (parameters.pop(key, None) or {}).items():
            definitions[f"{index}_{name}"] = _rebase(definition, index)
    return _object({"name": {"const": function["name"]}, "arguments": _rebase(parameters, index)})


def _rebase(schema: Any, index: int) -> Any:  # noqa: ANN401  # JSON
    if isinstance(schema, dict):
        return {name: _moved(value, index) if name == "$ref" else _rebase(value, index) for name, value in schema.items()}
    return [_rebase(one, index) for one in schema] if isinstance(schema, list) else schema


def _moved(reference: object, index: int) -> object:
    for key in _DEFINITIONS:
        prefix = f"#/{key}/"
        if isinstance(reference, str) and reference.startswith(prefix):
            return f"#/$defs/{index}_{reference.removeprefix(prefix)}"
    return reference


def _object(properties: Fields) -> Fields:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _with_instructions(messages: list[Fields], choice: ToolChoice) -> list[Fields]:
    tools = orjson.dumps([tool["function"] for tool in choice.tools]).decode()
    shape = '{"name": <tool>, "arguments": <object>}'
    other = "" if choice.forced else ' If no tool is needed, answer with {"answer": <text>}.'
    text = f"You can call these tools: {tools}\nTo call one, answer with JSON only: {shape}.{other}"
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _plain(message: Fields) -> Fields:
    """Earlier calls and their results as text: the template knows neither."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"The tool returned: {_text(message.get('content'))}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    said = [
        f'{{"name": "{call["function"]["name"]}", "arguments": {call["function"].get("arguments") or "{}"}}}' for call in calls
    ]
    return {"role": "assistant", "content": "\n".join(said)}


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content or "")
