"""What each path of the Responses API does."""

import orjson

from aimgpu.errors import EngineFailed, InvalidRequest
from aimgpu.gateway.apart import apart
from aimgpu.gateway.body import nested_too_deep
from aimgpu.gateway.dialects.call import Call, Fields, Operation
from aimgpu.gateway.dialects.openai.chat import model_name, serve_chat
from aimgpu.gateway.dialects.openai.tokens import count_response_input
from aimgpu.gateway.dialects.response_store import StoredResponse
from aimgpu.gateway.dialects.responses.answers import Finished, ResponseSend
from aimgpu.gateway.dialects.responses.requests import check, read_items, to_chat
from aimgpu.gateway.dialects.translate import EVENT_END, WRONG_SHAPES, read_event
from aimgpu.gateway.http.asgi import Header, Message, Send, send_json

_PATH = "/v1/responses"
_NATIVE = frozenset({"vllm"})
_LAST_EVENTS = ("response.completed", "response.incomplete")


async def create(call: Call) -> None:
    fields = await call.read_fields()
    model = call.find(model_name(fields))
    own, items = await _read_conversation(call, fields)
    previous = _previous(fields)

    def finished(response: Fields) -> None:
        if fields.get("store", True):
            stored = StoredResponse(
                caller=call.caller.name, response=response, input_items=own, input_bytes=len(call.body), previous=previous
            )
            call.services.responses.put(stored)

    if model.card.engine in _NATIVE:
        written_out = {name: value for name, value in fields.items() if name != "previous_response_id"}
        kept = {"previous_response_id": previous, "store": bool(fields.get("store", True))}
        send = _NativeSend(call.send, kept, finished)
        await call.serve(_PATH, written_out | {"input": items, "store": False}, send)
    else:
        await serve_chat(call, await apart(call.size, to_chat, fields, items), ResponseSend(call.send, fields, finished))


async def count_input(call: Call) -> None:
    fields = await call.read_fields()
    _, items = await _read_conversation(call, fields)
    await count_response_input(call, await apart(call.size, to_chat, fields, items))


async def read(call: Call) -> None:
    stored = call.services.responses.find(_identity(call), call.caller.name)
    await send_json(call.send, stored.response)


async def delete(call: Call) -> None:
    identity = _identity(call)
    call.services.responses.delete(identity, call.caller.name)
    await send_json(call.send, {"id": identity, "object": "response", "deleted": True})


async def list_input(call: Call) -> None:
    identity = _identity(call)
    items = call.services.responses.find(identity, call.caller.name).input_items
    shown = [{"id": f"{identity}_{index}", "type": "message", **item} for index, item in enumerate(items)]
    edges = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    await send_json(call.send, {"object": "list", "data": shown, "has_more": False, **edges})


async def _read_conversation(call: Call, fields: Fields) -> tuple[list[Fields], list[Fields]]:
    """This turn's items, and those of the turns before with them."""
    previous = _previous(fields)
    before: list[Fields] = []
    if previous is not None:
        before, size = call.services.responses.history(previous, call.caller.name)
        call.size += size
    return await apart(call.size, _join_items, fields, before)


def _join_items(fields: Fields, before: list[Fields]) -> tuple[list[Fields], list[Fields]]:
    check(fields)
    own = read_items(fields.get("input"))
    try:
        orjson.dumps(own)  # as `list_input` will, whatever of it the engine is given
    except orjson.JSONEncodeError:
        raise nested_too_deep() from None
    return own, [*before, *own]


def _previous(fields: Fields) -> str | None:
    previous = fields.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise InvalidRequest("'previous_response_id' must be a string.", param="previous_response_id")
    return previous


def _identity(call: Call) -> str:
    return call.path.removeprefix(_PATH + "/").partition("/")[0]


class _NativeSend:
    """Passes an engine's own answer on; in it, what the gateway keeps in the engine's place."""

    def __init__(self, send: Send, kept: Fields, finished: Finished) -> None:
        self._send = send
        self._kept = kept
        self._finished = finished
        self._streaming = False
        self._head: Message = {}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Header] = message["headers"]
            self._streaming = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
            self._head = message
            if self._streaming:
                await self._send(message)
        elif self._streaming:
            body = message.get("body", b"")
            await self._send({**message, "body": await apart(len(body), self._events, body)})
        else:
            await self._whole(message.get("body", b""))

    async def _whole(self, body: bytes) -> None:
        if self._head["status"] == 200:  # noqa: PLR2004
            try:
                body = await apart(len(body), self._patch_whole, body)
            except WRONG_SHAPES:
                raise EngineFailed("The engine's answer could not be understood.") from None
        headers = [header for header in self._head["headers"] if header[0] != b"content-length"]
        await self._send({**self._head, "headers": [*headers, (b"content-length", b"%d" % len(body))]})
        await self._send({"type": "http.response.body", "body": body})

    def _patch_whole(self, body: bytes) -> bytes:
        answer = self._patch(orjson.loads(body))
        self._finished(answer)
        return orjson.dumps(answer)

    def _events(self, body: bytes) -> bytes:
        return EVENT_END.join(map(self._event, body.split(EVENT_END)))

    def _event(self, event: bytes) -> bytes:
        if b'"response"' not in event:
            return event
        try:
            parsed = orjson.loads(read_event(event) or b"")
            self._patch(parsed["response"])
        except WRONG_SHAPES:
            return event
        if parsed.get("type") in _LAST_EVENTS:
            self._finished(parsed["response"])
        return b"event: %b\ndata: %b" % (str(parsed.get("type")).encode(), orjson.dumps(parsed))

    def _patch(self, response: Fields) -> Fields:
        if not isinstance(response["id"], str):
            raise TypeError(response["id"])
        response |= self._kept
        return response


OPERATIONS = (
    Operation(method="POST", path=_PATH, handle=create, summary="Answer, with a conversation that is kept here."),
    Operation(method="POST", path=f"{_PATH}/input_tokens", handle=count_input, summary="Count the tokens of an input."),
    Operation(method="GET", path=f"{_PATH}/{{id}}", handle=read, summary="A response that is kept.", reads_body=False),
    Operation(method="DELETE", path=f"{_PATH}/{{id}}", handle=delete, summary="Forget a response.", reads_body=False),
    Operation(method="GET", path=f"{_PATH}/{{id}}/input_items", handle=list_input, summary="Its input.", reads_body=False),
)
