"""Ollama's `/api/chat` and `/api/tags` by the same way as OpenAI's: requests and answers are translated at the door."""

from collections.abc import Mapping
from datetime import UTC, datetime

import orjson

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.http.asgi import Header, Message, Send
from aimgpu.gateway.routes import ServedModel

_EVENT_END = b"\n\n"
_CONTENT_HEADERS = frozenset({b"content-type", b"content-length"})
# Ollama's name for a sampling option -> OpenAI's. Others (num_ctx, mirostat, ...) belong to a model's deployment here.
_OPTIONS = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


def to_openai(fields: Mapping[str, object]) -> dict[str, object]:
    """The chat request as OpenAI's; Ollama streams unless told not to."""
    stream = fields.get("stream", True)
    if not isinstance(stream, bool):
        raise InvalidRequest("'stream' must be a boolean.", param="stream")
    options = fields.get("options") or {}
    if not isinstance(options, dict):
        raise InvalidRequest("'options' must be an object.", param="options")
    model = fields.get("model")
    if isinstance(model, str):
        model = model.removesuffix(":latest")
    translated: dict[str, object] = {"model": model, "messages": fields.get("messages"), "stream": stream}
    translated |= {_OPTIONS[name]: value for name, value in options.items() if name in _OPTIONS}
    if translated.get("max_tokens") in (-1, -2):  # "until it stops", "until the context is full"
        del translated["max_tokens"]
    if fields.get("tools"):
        translated["tools"] = fields["tools"]
    wanted = fields.get("format")
    if wanted == "json":
        translated["response_format"] = {"type": "json_object"}
    elif isinstance(wanted, dict):
        translated["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    if stream:
        translated["stream_options"] = {"include_usage": True}
    return translated


def list_tags(models: tuple[ServedModel, ...]) -> dict[str, object]:
    return {
        "models": [
            {
                "name": model.name,
                "model": model.name,
                "modified_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
                "details": {"parent_model": model.model},
            }
            for model in models
        ]
    }


class OllamaSend:
    """An ASGI `send` that turns OpenAI's answers into Ollama's."""

    def __init__(self, send: Send, model: str) -> None:
        self._send = send
        self._model = model
        self._head: Message | None = None
        self._streaming = False
        self._usage: dict[str, object] = {}
        self._reason = "stop"

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            self._streaming = (b"content-type", b"text/event-stream") in [
                (name, value.split(b";")[0]) for name, value in message["headers"]
            ]
            if self._streaming:
                await self._send_head(b"application/x-ndjson", None)
        elif self._streaming:
            await self._send_events(message)
        else:
            assert self._head is not None  # noqa: S101  # ASGI: the head comes first
            body = orjson.dumps(self._translate_whole(orjson.loads(message["body"])))
            await self._send_head(b"application/json", len(body))
            await self._send({"type": "http.response.body", "body": body})

    async def _send_head(self, content_type: bytes, length: int | None) -> None:
        assert self._head is not None  # noqa: S101  # ASGI: the head comes first
        headers: list[Header] = [header for header in self._head["headers"] if header[0] not in _CONTENT_HEADERS]
        headers.append((b"content-type", content_type))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._send({**self._head, "headers": headers})

    async def _send_events(self, message: Message) -> None:
        lines = [line for event in message["body"].split(_EVENT_END) if (line := self._translate_event(event)) is not None]
        body = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
        await self._send({"type": "http.response.body", "body": body, "more_body": message.get("more_body", False)})

    def _translate_event(self, event: bytes) -> dict[str, object] | None:
        data = event.strip().removeprefix(b"data:").strip()
        if not data or not event.lstrip().startswith(b"data:"):
            return None
        if data == b"[DONE]":
            return self._line("", done=True)
        chunk = orjson.loads(data)
        if "error" in chunk:
            return {"error": chunk["error"]["message"]}
        self._note_usage(chunk)
        for choice in chunk.get("choices", ()):
            self._reason = choice.get("finish_reason") or self._reason
            delta = choice.get("delta", {})
            if delta.get("content") or delta.get("tool_calls"):
                return self._line(delta.get("content") or "", done=False, tools=delta.get("tool_calls"))
        return None

    def _translate_whole(self, answer: dict[str, object]) -> dict[str, object]:
        error = answer.get("error")
        if isinstance(error, dict):
            return {"error": error.get("message")}
        self._note_usage(answer)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        self._reason = choice.get("finish_reason") or "stop"
        said = choice.get("message", {})
        return self._line(said.get("content") or "", done=True, tools=said.get("tool_calls"))

    def _note_usage(self, answer: Mapping[str, object]) -> None:
        usage = answer.get("usage")
        if isinstance(usage, dict):
            self._usage = {"prompt_eval_count": usage.get("prompt_tokens"), "eval_count": usage.get("completion_tokens")}

    def _line(self, content: str, *, done: bool, tools: object = None) -> dict[str, object]:
        said: dict[str, object] = {"role": "assistant", "content": content}
        if tools:
            said["tool_calls"] = tools
        line: dict[str, object] = {
            "model": self._model,
            "created_at": datetime.now(UTC).isoformat(),
            "message": said,
            "done": done,
        }
        return line | {"done_reason": self._reason, **self._usage} if done else line
