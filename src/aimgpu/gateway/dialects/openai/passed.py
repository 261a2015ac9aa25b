"""What engines offer themselves or not: passed on as it is, and refused in words by those that do not."""

from email.parser import BytesParser
from email.policy import HTTP

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.body import parse_body
from aimgpu.gateway.dialects.call import Call, Fields
from aimgpu.gateway.dialects.openai.chat import model_name

_FORM = b"multipart/form-data"
_LONGEST_FIELD = 4096


async def rerank(call: Call) -> None:
    fields = parse_body(call.body)
    if not isinstance(fields.get("query"), str) or not isinstance(fields.get("documents"), list):
        raise InvalidRequest("'query' must be a string and 'documents' an array.", param="query")
    model_name(fields)
    await call.serve("/v1/rerank", fields, call.send)


async def transcribe(call: Call) -> None:
    """The form goes on as it came; only the name of its model is read here."""
    content_type = call.head.get(b"content-type", b"")
    if not content_type.lower().startswith(_FORM):
        raise InvalidRequest("Send a form (multipart/form-data) with 'file' and 'model'.", param="file")
    fields = read_form(content_type, call.body)
    if fields.get("stream") == "true":
        fields["stream"] = True
    else:
        fields.pop("stream", None)
    await call.serve(call.path, {"model": model_name(fields)} | _only_stream(fields), call.send, (call.body, content_type))


def read_form(content_type: bytes, body: bytes) -> Fields:
    """The short text fields of a form; files are left alone."""
    message = BytesParser(policy=HTTP).parsebytes(b"content-type: " + content_type + b"\r\n\r\n" + body)
    if not message.is_multipart():
        raise InvalidRequest("The form cannot be read.", param="file")
    found: Fields = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        payload = part.get_payload(decode=True)
        is_text = isinstance(payload, bytes) and part.get_filename() is None and len(payload) <= _LONGEST_FIELD
        if isinstance(name, str) and is_text and isinstance(payload, bytes):
            found[name] = payload.decode("utf-8", "replace").rstrip("\r\n")
    return found


def _only_stream(fields: Fields) -> Fields:
    return {"stream": True} if fields.get("stream") is True else {}
