"""Reading a request's body with bounds, and the checks that an engine may not make."""

import asyncio
from collections.abc import Mapping, Sized
from dataclasses import dataclass

import orjson

from aimgpu.errors import BodyTooLarge, InvalidRequest, LoadShed, RequestTimedOut, UnsupportedMediaType
from aimgpu.gateway.apart import LARGE_BYTES, apart, check_waiting
from aimgpu.gateway.http.asgi import Head, Receive

LONGEST_NAME = 256  # of a model
_UNCOUNTED_BYTES = 256 * 1024  # so few hold no more values than are parsed in a few milliseconds
_DIGITS_OF_A_VALUE = 32
MOST_VALUES = 400_000  # of a body: parsing more holds every other request up; an image of 16 MiB is one
MOST_MESSAGES = 10_000  # of a conversation; OpenAI takes 2048
_MOST_STOPS = 64
_MOST_CHOICES = 2048  # of one request: an engine takes up each of them at once
MOST_ANSWER_VALUES = 1_500_000  # of an engine's answer: vectors are many short numbers
_RETRY_SECONDS = 2

_NUMBER = (int, float)
_TEXT_OR_LIST = (str, list)
# Fields of OpenAI's requests that engines read, and the types they take. Engines differ in how they fail on a wrong type
# (some with 500, one by ignoring it), so the gateway refuses it the same way for all.
_FIELD_TYPES: Mapping[str, tuple[type, ...]] = {
    "best_of": (int,),
    "dimensions": (int,),
    "echo": (bool,),
    "encoding_format": (str,),
    "frequency_penalty": _NUMBER,
    "input": _TEXT_OR_LIST,
    "logit_bias": (dict, list),
    "logprobs": (bool, int),
    "max_completion_tokens": (int,),
    "max_tokens": (int,),
    "messages": (list,),
    "model": (str,),
    "n": (int,),
    "n_probs": (int,),
    "parallel_tool_calls": (bool,),
    "presence_penalty": _NUMBER,
    "prompt": _TEXT_OR_LIST,
    "prompt_logprobs": (int,),
    "response_format": (dict,),
    "seed": (int,),
    "stop": _TEXT_OR_LIST,
    "stream": (bool,),
    "stream_options": (dict,),
    "suffix": (str,),
    "temperature": _NUMBER,
    "tool_choice": (str, dict),
    "tools": (list,),
    "top_logprobs": (int,),
    "top_p": _NUMBER,
    "user": (str,),
}
_MOST_TOKENS = 1 << 31
# Numbers outside of these mean nothing; some engines fail on them, others answer as if they were something else.
_RANGES: Mapping[str, tuple[float, float]] = {
    "best_of": (1, 128),
    "dimensions": (1, 1 << 20),
    "frequency_penalty": (-2, 2),
    "max_completion_tokens": (1, _MOST_TOKENS),
    "max_tokens": (1, _MOST_TOKENS),
    "logprobs": (0, 100),
    "min_p": (0, 1),
    "n": (1, 128),
    "n_probs": (0, 100),  # llama.cpp's: each multiplies what is answered for a token
    "presence_penalty": (-2, 2),
    "prompt_logprobs": (0, 20),  # vLLM's: for each token of the prompt
    "temperature": (0, 100),
    "top_logprobs": (0, 100),
    "top_p": (0, 1),
}
_REQUIRED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}
_JSON_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """What bodies may take: each of them, and all that are held at once."""

    max_bytes: int = 16 * 1024 * 1024
    receive_seconds: float = 60.0
    max_held_bytes: int = 256 * 1024 * 1024  # received and not answered yet, of all callers together


@dataclass(slots=True)
class HeldBytes:
    """The bodies of all requests that are not answered yet, counted as they come in."""

    limit: int
    held: int = 0

    def add(self, count: int) -> None:
        """Raises LoadShed where that would be too much; else `drop` must follow."""
        if self.held + count > self.limit:
            text = "Too many large requests are being received at once."
            raise LoadShed(text, hint="Try again, or send less.", retry_after_seconds=_RETRY_SECONDS)
        self.held += count

    def drop(self, count: int) -> None:
        """The request is over."""
        self.held -= count


class ClientGone(Exception):
    """The caller closed the connection; there is no one to answer."""


async def parse_apart(body: bytes) -> dict[str, object]:
    """`parse_body`, beside the event loop where it is large."""
    if len(body) > LARGE_BYTES:
        check_waiting()
    return await apart(len(body), parse_body, body)


async def read_body(receive: Receive, head: Head, limits: BodyLimits, held: HeldBytes) -> bytes:
    """All of it; what is returned is counted in `held` until the caller drops it."""
    length = head.get(b"content-length")
    if length is not None and (not length.isdigit() or int(length) > limits.max_bytes):
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.receive_seconds):
            await _read_into(body, receive, limits, held)
    except TimeoutError:
        held.drop(len(body))
        raise RequestTimedOut(f"The body did not arrive within {limits.receive_seconds:.0f} seconds.") from None
    except BaseException:
        held.drop(len(body))
        raise
    return bytes(body)


def hold_body(body: bytes, limits: BodyLimits, held: HeldBytes) -> bytes:
    """A body that has come whole, counted in `held` until the caller drops it."""
    size = len(body)
    if size > limits.max_bytes:
        raise _too_large(limits)
    held.add(size)
    return body


def parse_body(body: bytes) -> dict[str, object]:
    """The JSON object in a body. Raises InvalidRequest, which quotes nothing of the text."""
    if len(body) > _UNCOUNTED_BYTES and has_more_values(body, MOST_VALUES):
        text = f"The body has more than {MOST_VALUES} values; a text counts as two of them, a field as four."
        raise InvalidRequest(text, hint="Send it in parts.")
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The parser's message names the place; it does not quote the text, which may hold a prompt.
        raise InvalidRequest(f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return parsed


def has_more_values(text: bytes, most: int) -> bool:
    """Whether JSON may hold more values than these; an upper bound.

    Values are counted by what they cost the parser, with an integer as one: a list or object three, a text two, a key four, and
    one for 32 digits. What is within texts does not count.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins and ends texts
    quotes = text.count(b'"')
    if quotes > most:
        return True
    outside = b"".join(text.split(b'"')[::2])
    found = quotes + outside.count(b",") + 2 * outside.count(b":") + 3 * (outside.count(b"[") + outside.count(b"{"))
    return found + len(outside) // _DIGITS_OF_A_VALUE > most


def encode_fields(fields: Mapping[str, object]) -> bytes:
    """The fields as a body for an engine. Raises InvalidRequest for what is nested deeper than can be written."""
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError:
        raise nested_too_deep() from None


def nested_too_deep() -> InvalidRequest:
    """The refusal of a body whose values lie within too many others."""
    return InvalidRequest("The body is nested too deep.", hint="Send fewer arrays and objects within each other.")


def check_fields(path: str, fields: Mapping[str, object]) -> str:
    """The model's name; raises InvalidRequest that names the first wrong field."""
    for name, value in fields.items():
        allowed = _FIELD_TYPES.get(name)
        if allowed is not None and value is not None and type(value) not in allowed:  # JSON's types have no subclasses
            expected = " or ".join(_JSON_NAMES[kind] for kind in allowed)
            raise InvalidRequest(f"'{name}' must be {expected}.", param=name)
        if value is not None and name in _RANGES:
            _check_range(name, value, fields)
        if name == "stop":
            check_stops(name, value)
    model = fields.get("model") or ""
    if not isinstance(model, str) or len(model) > LONGEST_NAME:
        raise InvalidRequest("'model' must name a model.", hint="GET /v1/models lists them.", param="model")
    prompts = fields.get("prompt")
    if isinstance(prompts, list):
        _check_prompts(prompts, fields)
    required = _REQUIRED.get(path)
    if required is not None and not fields.get(required) and fields.get(required) != "":
        raise InvalidRequest(f"'{required}' is missing or empty.", param=required)
    if required == "messages":
        _check_messages(fields["messages"])
    return model


def _check_range(name: str, value: object, fields: Mapping[str, object]) -> None:
    least, most = _RANGES[name]
    if name == "max_tokens" and fields.get("echo") is True:
        least = 0  # how a prompt is scored
    if not isinstance(value, _NUMBER) or not least <= value <= most:
        raise InvalidRequest(f"'{name}' must be from {least} to {most}.", param=name)


def check_stops(name: str, stops: object) -> None:
    """Engines look for each of them after each token."""
    if isinstance(stops, list) and len(stops) > _MOST_STOPS:
        raise InvalidRequest(f"'{name}' must be at most {_MOST_STOPS}.", param=name)


def _check_prompts(prompts: list[object], fields: Mapping[str, object]) -> None:
    """A list of numbers is one prompt."""
    number = fields.get("n")
    choices = (number if isinstance(number, int) else 1) * (len(prompts) if prompts and type(prompts[0]) is not int else 1)
    if choices > _MOST_CHOICES:
        text = f"The prompts times 'n' must be at most {_MOST_CHOICES} choices."
        raise InvalidRequest(text, hint="Send them in parts.", param="prompt")


def check_media_type(head: Head) -> None:
    """A page of another origin may send plain text without asking the browser's leave, but not JSON."""
    if b"content-encoding" in head and head[b"content-encoding"].lower() != b"identity":
        raise UnsupportedMediaType("Send the body without content-encoding.")
    if b"origin" in head and not head.get(b"content-type", b"").lower().startswith(b"application/json"):
        raise UnsupportedMediaType("Send the body as application/json.")


def check_length(name: str, items: Sized) -> None:
    """Before each of them is translated."""
    if len(items) > MOST_MESSAGES:
        raise InvalidRequest(f"'{name}' must be at most {MOST_MESSAGES}.", param=name)


def _check_messages(messages: object) -> None:
    assert isinstance(messages, list)  # noqa: S101  # checked by its entry in the table
    if len(messages) > MOST_MESSAGES:
        check_length("messages", messages)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(f"'messages[{index}]' must be an object.", param="messages")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"'messages[{index}].role' must be a string.", param="messages")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise InvalidRequest(f"'messages[{index}].content' must be a string or an array.", param="messages")
        if not all(isinstance(part, dict) for part in content):
            raise InvalidRequest(f"'messages[{index}].content' must hold objects.", param="messages")


async def _read_into(body: bytearray, receive: Receive, limits: BodyLimits, held: HeldBytes) -> None:
    more = True
    while more:
        message = await receive()
        part = _part_of(message)
        held.add(len(part))
        body += part
        _check_size(len(body), limits)
        more = message.get("more_body", False)


def _part_of(message: Mapping[str, object]) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientGone
    part = message.get("body", b"")
    assert isinstance(part, bytes)  # noqa: S101  # what ASGI servers pass
    return part


def _check_size(size: int, limits: BodyLimits) -> None:
    if size > limits.max_bytes:
        raise _too_large(limits)


def _too_large(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limits.max_bytes} bytes.")
