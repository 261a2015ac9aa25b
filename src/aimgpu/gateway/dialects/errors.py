"""Errors that the gateway itself raises, in the shape of the dialect that the caller speaks."""

import orjson

from aimgpu.errors import AimGpuError
from aimgpu.gateway.dialects.anthropic.answers import error_json
from aimgpu.gateway.dialects.translate import CollectedAnswer
from aimgpu.gateway.http.asgi import Header, Send, send_error


async def send_dialect_error(path: str, send: Send, error: AimGpuError, headers: tuple[Header, ...] = ()) -> None:
    if path.startswith(("/api/", "/v1/messages")):
        answer = CollectedAnswer()
        await send_error(answer, error, headers)
        shaped = answer.json()["error"]
        ollama = path.startswith("/api/")
        answer.body = orjson.dumps({"error": shaped["message"]} if ollama else error_json(error.http_status, shaped))
        answer.headers = [header for header in answer.headers if header[0] != b"content-length"]
        answer.headers.append((b"content-length", b"%d" % len(answer.body)))
        await answer.pass_on(send)
    else:
        await send_error(send, error, headers)
