"""What engines offer themselves or not: passed on as it is, and refused in words by those that do not."""

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.apart import apart
from aimgpu.gateway.dialects.call import Call, Fields
from aimgpu.gateway.dialects.openai.chat import model_name
from aimgpu.gateway.forms import read_form

_FORM = b"multipart/form-data"


async def rerank(call: Call) -> None:
    fields = await call.read_fields()
    if not isinstance(fields.get("query"), str) or not isinstance(fields.get("documents"), list):
        raise InvalidRequest("'query' must be a string and 'documents' an array.", param="query")
    model_name(fields)
    await call.serve("/v1/rerank", fields, call.send)


async def pass_on(call: Call) -> None:
    """Speech and images: the answer may be bytes of any kind, in one piece."""
    fields = await call.read_fields()
    model_name(fields)
    await call.serve(call.path, fields, call.send)


async def pass_form(call: Call) -> None:
    """The form goes on as it came, but for the name of its model."""
    content_type = call.head.get(b"content-type", b"")
    if not content_type.lower().startswith(_FORM):
        raise InvalidRequest("Send a form (multipart/form-data) with a file and 'model'.", param="file")
    form = await apart(call.size, read_form, content_type, call.body)
    fields: Fields = {"model": form.get("model", "")}
    if form.get("stream") == "true":
        fields["stream"] = True
    await call.serve(call.path, fields, call.send, (call.body, content_type))
