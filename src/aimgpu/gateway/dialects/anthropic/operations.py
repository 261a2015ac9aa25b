"""What each path of Anthropic's API does."""

from contextlib import suppress

from aimgpu.errors import EngineFailed
from aimgpu.gateway.apart import apart
from aimgpu.gateway.dialects.anthropic.answers import MessageSend
from aimgpu.gateway.dialects.anthropic.requests import to_chat
from aimgpu.gateway.dialects.call import Call, Fields, Operation
from aimgpu.gateway.dialects.openai.chat import model_name
from aimgpu.gateway.dialects.openai.stop_sequences import serve_naming_stop
from aimgpu.gateway.dialects.openai.tokens import count_prompt
from aimgpu.gateway.dialects.translate import CollectedAnswer
from aimgpu.gateway.http.asgi import send_json

_LLAMACPP, _OLLAMA, _VLLM = "llamacpp", "ollama", "vllm"


async def messages(call: Call) -> None:
    fields = await call.read_fields()
    name = _model(call, fields)
    model = call.find(name)
    chat, send = await apart(call.size, to_chat, fields, name), MessageSend(call.send, name)
    counts_late = (chat.get("stream") is True or bool(chat.get("stop"))) and model.card.engine == _LLAMACPP
    if counts_late or (chat.get("stop") and model.card.engine == _OLLAMA):  # these count the prompt at the end of an answer
        prompt = await apart(call.size, to_chat, fields, name, counting=True)
        with suppress(EngineFailed):  # an engine that does not count says what is wrong with the request itself
            send.input_tokens = await count_prompt(call, prompt, CollectedAnswer()) or 0
    elif chat.get("stream") and model.card.engine == _VLLM:
        chat["stream_options"] |= {"continuous_usage_stats": True}
    await serve_naming_stop(call, chat, send)


async def count_tokens(call: Call) -> None:
    fields = await call.read_fields()
    name = _model(call, fields)
    call.find(name)
    chat = await apart(call.size, to_chat, fields, name, counting=True)
    count = await count_prompt(call, chat, MessageSend(call.send, name))
    if count is not None:
        await send_json(call.send, {"input_tokens": count})


def _model(call: Call, fields: Fields) -> str:
    """As it was named, or of the model that serves callers who name none."""
    return model_name(fields) or call.find("").name


OPERATIONS = (
    Operation(method="POST", path="/v1/messages", handle=messages, summary="Chat, as Anthropic's clients ask."),
    Operation(method="POST", path="/v1/messages/count_tokens", handle=count_tokens, summary="Count the tokens of a prompt."),
)
