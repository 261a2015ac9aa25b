"""Chat beyond what an engine does by itself: several choices, and tools that are kept to.

Every dialect that chats comes through `serve_chat`.
"""

from typing import Any

import orjson

from aimgpu.errors import EngineFailed, InvalidRequest, ModelNotReady
from aimgpu.gateway.apart import apart
from aimgpu.gateway.body import check_fields
from aimgpu.gateway.dialects.call import Call, Fields
from aimgpu.gateway.dialects.openai.choices import serve_choices
from aimgpu.gateway.dialects.openai.tool_choice import ToolChoice, read_tool_choice
from aimgpu.gateway.dialects.openai.tool_grammar import constrain, read_call
from aimgpu.gateway.dialects.translate import WRONG_SHAPES, CollectedAnswer
from aimgpu.gateway.http.asgi import NO_STORE, Header, Send, send_answer
from aimgpu.gateway.routes import ServedModel

CHAT_PATH = "/v1/chat/completions"
_SPECIAL_FIELDS = frozenset({"n", "tools", "tool_choice", "functions", "function_call", "modalities", "web_search_options"})
COUNTS_CHOICES = frozenset({"vllm"})  # engines that serve `n` choices of one request, and count all their tokens
_KEEPS_TOOL_CHOICE = frozenset({"vllm"})  # by a grammar of their own, whatever the template has
_REFUSES_TOOLS = frozenset({"ollama"})  # in words, where the template has none; it ignores `tool_choice`
_PROBE = "aimgpu_probe"


def is_special_chat(fields: Fields) -> bool:
    """Others pass through as they are."""
    return not _SPECIAL_FIELDS.isdisjoint(fields)


async def chat(call: Call) -> None:
    await serve_chat(call, await call.read_fields(), call.send)


async def serve_chat(call: Call, fields: Fields, send: Send) -> None:
    """One chat request, answered into `send` in OpenAI's shape, as a stream or whole, as `fields` asks for."""
    if not is_special_chat(fields):
        await call.serve(CHAT_PATH, fields, send)
        return
    model = call.find(model_name(fields))
    _check_offered(fields, model)
    choice = read_tool_choice(fields)
    if wants_many(fields) and model.card.engine not in COUNTS_CHOICES:
        await serve_choices(call, CHAT_PATH, fields, send, serve_chat)
    elif choice.tools and not await _keeps(call, model, choice):
        await _serve_by_grammar(call, fields, choice, send)
    else:
        await call.serve(CHAT_PATH, _narrowed(fields, model, choice), send)


def _check_offered(fields: Fields, model: ServedModel) -> None:
    """What engines would leave out in silence. Some builds of vLLM speak."""
    if fields.get("web_search_options") is not None:
        hint = "Send a function that searches as a tool."
        raise InvalidRequest("'web_search_options' is not offered.", hint=hint, param="web_search_options")
    modalities: Any = fields.get("modalities")
    if model.card.engine not in (None, "vllm") and modalities not in (None, ["text"]):
        raise InvalidRequest(f"'modalities' must be [\"text\"]: '{model.name}' answers in text.", param="modalities")


async def prepare_chat(call: Call, fields: Fields) -> Fields:
    """The request as an engine gets it, for those who only want to know how long its prompt is."""
    model = call.find(model_name(fields))
    choice = read_tool_choice(fields)
    if choice.tools and not await _keeps(call, model, choice):
        return await apart(call.size, constrain, fields, choice)
    return _narrowed(fields, model, choice)


async def wait_until_loaded(call: Call, model: ServedModel) -> ServedModel:
    """With a ready instance. Raises a RequestRefused where it gets none."""
    if not model.backends:
        await call.services.load(model, call.heartbeat)
        model = call.find(model.name)
    if not model.backends:
        raise ModelNotReady(f"'{model.name}' is {model.state}.")
    return model


async def _keeps(call: Call, model: ServedModel, choice: ToolChoice) -> bool:
    """Whether the engine itself offers these tools to the model and holds it to the choice."""
    engine = model.card.engine
    if engine in _KEEPS_TOOL_CHOICE or engine is None:
        return True
    if engine in _REFUSES_TOOLS:
        return not choice.forced
    model = await wait_until_loaded(call, model)
    return await _template_has_tools(call, model)


async def _template_has_tools(call: Call, model: ServedModel) -> bool:
    """llama.cpp ignores tools where the template does; whether it does shows in a prompt made from one."""
    backend = model.backends[0]
    known = call.services.template_has_tools.get(backend.instance_id)
    if known is None:
        tool = {"type": "function", "function": {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object"}}}
        question: Fields = {"messages": [{"role": "user", "content": "?"}], "tools": [tool]}
        known = _PROBE.encode() in await call.services.ask(backend, "/apply-template", question)
        call.services.template_has_tools[backend.instance_id] = known
    return known


def _narrowed(fields: Fields, model: ServedModel, choice: ToolChoice) -> Fields:
    """llama.cpp takes no named choice: the one tool alone, and required, means the same."""
    if model.card.engine in _KEEPS_TOOL_CHOICE or model.card.engine is None:
        return fields
    kept = {name: value for name, value in fields.items() if name not in ("tools", "tool_choice")}
    if choice.tools:
        kept |= {"tools": list(choice.tools), "tool_choice": "required" if choice.forced else "auto"}
    return kept


async def _serve_by_grammar(call: Call, fields: Fields, choice: ToolChoice, send: Send) -> None:
    await apart(call.size, check_fields, CHAT_PATH, fields)  # also what the engine does not get
    collected = CollectedAnswer()
    await call.serve(CHAT_PATH, await apart(call.size, constrain, fields, choice), collected)
    if not collected.ok:
        await collected.pass_on(send)
        return
    try:
        answer = await apart(len(collected.body), lambda: read_call(collected.json()))
    except WRONG_SHAPES:
        raise EngineFailed("The engine's answer could not be understood.") from None
    headers = [header for header in collected.headers if header[0] not in (b"content-type", b"content-length")]
    if fields.get("stream"):
        include_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
        await _send_as_stream(send, answer, headers, include_usage=include_usage)
    else:
        await send_answer(send, collected.status, [(b"content-type", b"application/json"), *headers], orjson.dumps(answer))


async def _send_as_stream(send: Send, answer: Fields, headers: list[Header], *, include_usage: bool) -> None:
    head = {
        "id": answer.get("id"),
        "object": "chat.completion.chunk",
        "created": answer.get("created"),
        "model": answer.get("model"),
    }
    chunks: list[Fields] = []
    for choice in answer["choices"]:
        message = choice["message"]
        delta: Fields = {"role": "assistant", "content": message.get("content")}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{**one, "index": index} for index, one in enumerate(calls)]
        chunks.append({**head, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]})
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        chunks.append({**head, "choices": [last]})
    if include_usage:
        chunks.append({**head, "choices": [], "usage": answer.get("usage")})
    body = b"".join(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks) + b"data: [DONE]\n\n"
    head_headers = [(b"content-type", b"text/event-stream"), NO_STORE, *headers]
    await send({"type": "http.response.start", "status": 200, "headers": head_headers})
    await send({"type": "http.response.body", "body": body})


def wants_many(fields: Fields) -> bool:
    number: Any = fields.get("n")
    return isinstance(number, int) and number > 1


def model_name(fields: Fields) -> str:
    """Empty where it names none."""
    name = fields.get("model") or ""
    if not isinstance(name, str):
        raise InvalidRequest("'model' must name a model.", hint="GET /v1/models lists them.", param="model")
    return name
