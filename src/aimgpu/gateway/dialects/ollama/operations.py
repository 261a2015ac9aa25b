"""What each path under /api does."""

from datetime import UTC, datetime

from aimgpu.errors import InvalidRequest, NotAllowed
from aimgpu.gateway.apart import apart
from aimgpu.gateway.dialects.call import Call, Fields, Operation, simulated_header
from aimgpu.gateway.dialects.ollama.answers import OllamaEmbeddings, OllamaSend
from aimgpu.gateway.dialects.ollama.models import list_loaded, list_tags, show
from aimgpu.gateway.dialects.ollama.pulling import pull
from aimgpu.gateway.dialects.ollama.requests import chat_request, embed_request, generate_request, raw_request, read_flag
from aimgpu.gateway.dialects.openai.chat import serve_chat
from aimgpu.gateway.http.asgi import send_json
from aimgpu.gateway.routes import ServedModel

_COMPLETIONS, _EMBEDDINGS = "/v1/completions", "/v1/embeddings"
_ENDS_WITH_ANSWER = (0, "0", "0s", "0m", "0h")  # keep_alive


async def chat(call: Call) -> None:
    fields = await call.read_fields()
    model = _find(call, fields)
    if not fields.get("messages"):
        await _load_or_unload(call, fields, model, {"message": {"role": "assistant", "content": ""}})
        return
    stream = read_flag(fields, "stream", default=True)
    send = OllamaSend(call.send, str(fields["model"]), stream=stream, chat=True)
    await serve_chat(call, await apart(call.size, chat_request, fields, model), send)
    await _unload_after(call, fields, model)


async def generate(call: Call) -> None:
    fields = await call.read_fields()
    model = _find(call, fields)
    if not fields.get("prompt"):
        await _load_or_unload(call, fields, model, {"response": ""})
        return
    stream = read_flag(fields, "stream", default=True)
    send = OllamaSend(call.send, str(fields["model"]), stream=stream, chat=False)
    if read_flag(fields, "raw", default=False):
        await call.serve(_COMPLETIONS, await apart(call.size, raw_request, fields, model), send)
    else:
        await serve_chat(call, await apart(call.size, generate_request, fields, model), send)
    await _unload_after(call, fields, model)


async def embed(call: Call) -> None:
    fields = await call.read_fields()
    model = _find(call, fields)
    send = OllamaEmbeddings(call.send, str(fields["model"]), legacy=call.path == "/api/embeddings")
    await call.serve(_EMBEDDINGS, await apart(call.size, embed_request, fields, model), send)


async def tags(call: Call) -> None:
    models = call.visible()
    await send_json(call.send, list_tags(models), simulated_header(models))


async def loaded(call: Call) -> None:
    models = call.visible()
    await send_json(call.send, list_loaded(models), simulated_header(models))


async def show_one(call: Call) -> None:
    model = _find(call, await call.read_fields())
    await send_json(call.send, show(model), simulated_header((model,)))


async def version(call: Call) -> None:
    await send_json(call.send, {"version": call.services.version})


async def refuse_change(_call: Call) -> None:
    raise NotAllowed(
        "Models are not changed over this API.", hint="They come from the stack file: `aimgpu up`, `aimgpu down NAME`."
    )


async def _load_or_unload(call: Call, fields: Fields, model: ServedModel, empty: Fields) -> None:
    unload = _wants_unload(fields)
    if unload:
        _sleep(call, model)
    else:
        await call.services.load(model, None)
    line = {"model": fields["model"], "created_at": datetime.now(UTC).isoformat(), **empty}
    answer = line | {"done": True, "done_reason": "unload" if unload else "load"}
    await send_json(call.send, answer, simulated_header((model,)))


async def _unload_after(call: Call, fields: Fields, model: ServedModel) -> None:
    if _wants_unload(fields) and call.caller.unrestricted:
        call.services.sleeper.sleep(model.owner)


def _sleep(call: Call, model: ServedModel) -> None:
    if not call.caller.unrestricted:
        raise NotAllowed("This API key may not unload models.", hint="Its models, priority or rate are restricted.")
    call.services.sleeper.sleep(model.owner)


def _wants_unload(fields: Fields) -> bool:
    return fields.get("keep_alive") in _ENDS_WITH_ANSWER and fields.get("keep_alive") is not False


def _find(call: Call, fields: Fields) -> ServedModel:
    name = fields.get("model") or fields.get("name") or ""
    if not isinstance(name, str):
        raise InvalidRequest("'model' must name a model.", hint="GET /api/tags lists them.", param="model")
    model = call.find(name)
    fields["model"] = name or model.name
    return model


OPERATIONS = (
    Operation(method="POST", path="/api/chat", handle=chat, summary="Chat, as Ollama's clients ask."),
    Operation(method="POST", path="/api/generate", handle=generate, summary="Complete a prompt; without one, load or unload."),
    Operation(method="POST", path="/api/embed", handle=embed, summary="Embed texts."),
    Operation(method="POST", path="/api/embeddings", handle=embed, summary="Embed one text (Ollama's older form)."),
    Operation(method="GET", path="/api/tags", handle=tags, summary="List the models.", reads_body=False),
    Operation(method="GET", path="/api/ps", handle=loaded, summary="List the models that are loaded.", reads_body=False),
    Operation(method="GET", path="/api/version", handle=version, summary="The version of this gateway.", reads_body=False),
    Operation(method="POST", path="/api/show", handle=show_one, summary="One model in detail."),
    Operation(method="POST", path="/api/pull", handle=pull, summary="Fetch a model's files, with progress."),
    Operation(method="POST", path="/api/copy", handle=refuse_change, summary="Refused: models come from the stack file."),
    Operation(method="POST", path="/api/create", handle=refuse_change, summary="Refused: models come from the stack file."),
    Operation(method="POST", path="/api/push", handle=refuse_change, summary="Refused: models come from the stack file."),
    Operation(method="DELETE", path="/api/delete", handle=refuse_change, summary="Refused: models come from the stack file."),
)
