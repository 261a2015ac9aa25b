"""The shapes of ASGI that this room uses, and whole answers."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from aimgpu.errors import AimGpuError, MethodNotAllowed, ModelNotFound, RequestRefused

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
Head = Mapping[bytes, bytes]  # a request's headers by name in lower case; of several with one name the last

JSON: Header = (b"content-type", b"application/json")
NO_STORE: Header = (b"cache-control", b"no-store")
CLOSE: Header = (b"connection", b"close")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}
_COME_BACK = frozenset({429, 503})
_RETRY_SECONDS = 5  # where nothing better is known
_SERVER_ERROR = 500


async def send_answer(send: Send, status: int, headers: list[Header], body: bytes) -> None:
    """A whole answer; the length is added."""
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: object, headers: tuple[Header, ...] = (), status: int = 200) -> None:
    """A whole answer in JSON."""
    await send_answer(send, status, [JSON, *headers], orjson.dumps(value))


async def send_error(send: Send, error: AimGpuError, headers: tuple[Header, ...] = ()) -> None:
    """The error in OpenAI's shape, with the headers that go with its status."""
    retry = error.retry_after_seconds if isinstance(error, RequestRefused) else None
    if retry is None and error.http_status in _COME_BACK:
        retry = _RETRY_SECONDS
    extra: list[Header] = [JSON, NO_STORE, *headers]
    if retry is not None:
        extra.append((b"retry-after", b"%d" % retry))
    if isinstance(error, MethodNotAllowed) and error.allowed is not None:
        extra.append((b"allow", error.allowed.encode()))
    await send_answer(send, error.http_status, extra, orjson.dumps(error_body(error)))


def error_body(error: AimGpuError) -> Mapping[str, object]:
    """The error as OpenAI's clients read it."""
    default = "server_error" if error.http_status >= _SERVER_ERROR else "invalid_request_error"
    message = error.message if error.hint is None else f"{error.message} {error.hint}"
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(error.http_status, default),
            "param": "model" if isinstance(error, ModelNotFound) else getattr(error, "param", None),
            "code": error.code,
        }
    }
