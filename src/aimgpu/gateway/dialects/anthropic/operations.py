"""What each path of Anthropic's API does."""

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.body import parse_body
from aimgpu.gateway.dialects.anthropic.answers import MessageSend
from aimgpu.gateway.dialects.anthropic.requests import to_chat
from aimgpu.gateway.dialects.call import Call, Fields, Operation
from aimgpu.gateway.dialects.openai.chat import serve_chat
from aimgpu.gateway.dialects.openai.tokens import count_prompt
from aimgpu.gateway.http.asgi import send_json


async def messages(call: Call) -> None:
    fields = parse_body(call.body)
    name = _model(fields)
    call.find(name)
    await serve_chat(call, to_chat(fields, name), MessageSend(call.send, name))


async def count_tokens(call: Call) -> None:
    fields = parse_body(call.body)
    name = _model(fields)
    call.find(name)
    count = await count_prompt(call, to_chat(fields, name, counting=True), MessageSend(call.send, name))
    if count is not None:
        await send_json(call.send, {"input_tokens": count})


def _model(fields: Fields) -> str:
    name = fields.get("model")
    if not isinstance(name, str):
        raise InvalidRequest("'model' must name a model.", hint="GET /v1/models lists them.", param="model")
    return name


OPERATIONS = (
    Operation(method="POST", path="/v1/messages", handle=messages, summary="Chat, as Anthropic's clients ask."),
    Operation(method="POST", path="/v1/messages/count_tokens", handle=count_tokens, summary="Count the tokens of a prompt."),
)
