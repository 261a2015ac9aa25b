"""Ollama's requests as OpenAI's."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.body import check_length
from aimgpu.gateway.dialects.call import Fields
from aimgpu.gateway.routes import ServedModel

# Ollama's sampling options -> what engines call them; an engine ignores the names of the others.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "frequency_penalty": ("frequency_penalty",),
    "min_p": ("min_p",),
    "num_predict": ("max_tokens",),
    "presence_penalty": ("presence_penalty",),
    "repeat_last_n": ("repeat_last_n",),
    "repeat_penalty": ("repeat_penalty", "repetition_penalty"),
    "seed": ("seed",),
    "stop": ("stop",),
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "typical_p": ("typical_p",),
}
_OF_DEPLOYMENT = frozenset({"main_gpu", "num_batch", "num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap"})
_UNBOUNDED = (-1, -2)  # num_predict: "until it stops", "until the context is full"
_NOT_OFFERED = {
    "suffix": "filling in the middle is not offered",
    "template": "the model's own template is used",
    "context": "send the conversation to /api/chat instead",
}


def read_flag(fields: Fields, name: str, *, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be a boolean.", param=name)
    return value


def chat_request(fields: Fields, model: ServedModel) -> Fields:
    """Always a stream: its parts are timed, and a caller that wants one answer gets it in one."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("'messages' must be an array of objects.", param="messages")
    check_length("messages", messages)
    return {"model": fields["model"], "messages": _messages(messages), **_shared(fields, model), **_tools(fields)}


def generate_request(fields: Fields, model: ServedModel) -> Fields:
    """The prompt as one turn of a chat, in the model's template."""
    refuse_not_offered(fields)
    system, prompt = _text(fields, "system"), _text(fields, "prompt")
    user: Fields = {"role": "user", "content": prompt}
    if images := fields.get("images"):
        user["images"] = images
    turns = [{"role": "system", "content": system}] if system else []
    return {"model": fields["model"], "messages": _messages([*turns, user]), **_shared(fields, model)}


def raw_request(fields: Fields, model: ServedModel) -> Fields:
    """The prompt as it is, without a template."""
    refuse_not_offered(fields)
    if fields.get("images"):
        raise InvalidRequest("'images' cannot be given with 'raw'.", param="images")
    return {"model": fields["model"], "prompt": _text(fields, "prompt"), **_shared(fields, model)}


def embed_request(fields: Fields, model: ServedModel) -> Fields:
    texts = fields.get("input", fields.get("prompt"))
    if not isinstance(texts, str | list) or (isinstance(texts, list) and not all(isinstance(text, str) for text in texts)):
        raise InvalidRequest("'input' must be a string or an array of strings.", param="input")
    translate_options(fields.get("options"), model)  # none of them changes an embedding; wrong ones are refused
    dimensions = fields.get("dimensions")
    return {"model": fields["model"], "input": texts} | ({"dimensions": dimensions} if dimensions else {})


def refuse_not_offered(fields: Fields) -> None:
    for name, reason in _NOT_OFFERED.items():
        if fields.get(name):
            raise InvalidRequest(f"'{name}' cannot be set: {reason}.", param=name)


def translate_options(options: object, model: ServedModel) -> Fields:
    """Sampling options by the names that engines know. Raises InvalidRequest for what would be ignored."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise InvalidRequest("'options' must be an object.", param="options")
    found: Fields = {}
    for name, value in options.items():
        if value is None:
            continue
        if name == "num_ctx":
            _check_context(value, model)
        elif name in _OF_DEPLOYMENT:
            hint = "Leave it out; the stack file has the model's resources."
            raise InvalidRequest(
                f"'{name}' is set when a model is deployed, not by a request.", hint=hint, param=f"options.{name}"
            )
        elif name not in _OPTIONS:
            known = ", ".join(sorted((*_OPTIONS, "num_ctx")))
            raise InvalidRequest(f"There is no option '{name[:50]}' here.", hint=f"Known: {known}.", param="options")
        elif not (name == "num_predict" and value in _UNBOUNDED):
            found |= dict.fromkeys(_OPTIONS[name], value)
    return found


def _check_context(value: object, model: ServedModel) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest("'num_ctx' must be an integer.", param="options.num_ctx")
    deployed = model.card.context_tokens
    if deployed is not None and value > deployed:
        raise InvalidRequest(
            f"'num_ctx' of {value} is more than the {deployed} tokens that '{model.name}' was deployed with.",
            hint="Set `context` of the model in the stack file.",
            param="options.num_ctx",
        )


def _shared(fields: Fields, model: ServedModel) -> Fields:
    found: Fields = {"stream": True, "stream_options": {"include_usage": True}}
    found |= translate_options(fields.get("options"), model)
    wanted = fields.get("format")
    if wanted == "json":
        found["response_format"] = {"type": "json_object"}
    elif isinstance(wanted, dict):
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    elif wanted:
        raise InvalidRequest("'format' must be \"json\" or a JSON schema.", param="format")
    think = fields.get("think")
    if think is not None:
        found["chat_template_kwargs"] = {"enable_thinking": bool(think)}
        found |= {"reasoning_effort": think} if isinstance(think, str) else {}
    if read_flag(fields, "logprobs", default=False):
        found |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs") or 0}
    return found


def _tools(fields: Fields) -> Fields:
    return {"tools": fields["tools"]} if fields.get("tools") else {}


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name) or ""
    if not isinstance(value, str):
        raise InvalidRequest(f"'{name}' must be a string.", param=name)
    return value


def _messages(messages: Sequence[Fields]) -> list[Fields]:
    """OpenAI matches a tool's result to its call by an id; Ollama's messages may have none, so they get one by their order."""
    pending = _PendingCalls()
    translated = []
    for number, message in enumerate(messages):
        one: Fields = {"role": message.get("role"), "content": message.get("content") or ""}
        if images := message.get("images"):
            one["content"] = [{"type": "text", "text": one["content"]}, *_images(images)]
        if calls := message.get("tool_calls"):
            one["tool_calls"] = _calls(calls, number)
            pending = _PendingCalls(one["tool_calls"])
        if one["role"] == "tool":
            one["tool_call_id"] = message.get("tool_call_id") or pending.take(message.get("tool_name"))
        translated.append(one)
    return translated


def _calls(calls: object, number: int) -> list[Fields]:
    if not isinstance(calls, list):
        raise InvalidRequest("'tool_calls' must be an array.", param="messages")
    check_length("tool_calls", calls)
    found = []
    for index, call in enumerate(calls):
        function: Any = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest("A tool call must have a function with a name.", param="messages")
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        identity = call.get("id") or f"call_{number}_{index}"
        found.append({"id": identity, "type": "function", "function": {"name": function["name"], "arguments": text}})
    return found


class _PendingCalls:
    """Calls of the last turn that have no result yet: each is taken once, the first of a name or the first of all."""

    def __init__(self, calls: Sequence[Fields] = ()) -> None:
        self._all: deque[list[str]] = deque()  # identifiers; empty once taken
        self._named: dict[str, deque[list[str]]] = {}
        for call in calls:
            entry = [call["id"]]
            self._all.append(entry)
            self._named.setdefault(call["function"]["name"], deque()).append(entry)

    def take(self, name: object) -> str:
        pending = self._all if name in (None, "") else self._named.get(name) if isinstance(name, str) else None
        while pending:
            if entry := pending.popleft():
                return entry.pop()
        return "call_unknown"


def _images(images: object) -> list[Fields]:
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidRequest("'images' must be an array of base64 texts.", param="images")
    check_length("images", images)
    return [{"type": "image_url", "image_url": {"url": f"data:image/{_image_type(image)};base64,{image}"}} for image in images]


def _image_type(image: str) -> str:
    return "png" if image.startswith("iVBOR") else "jpeg"
