"""Asks for the key on every path of vLLM but /health.

vLLM itself asks under /v1 alone: /invocations answers prompts, and in sleep mode /sleep and /collective_rpc do what they are
asked. It is loaded by `vllm serve --middleware aimgpu_vllm_door.AskKey`.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
_BODY = b'{"error": {"message": "This engine needs its key.", "type": "authentication_error", "code": 401}}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]


class AskKey:
    """An ASGI middleware. Without a key in its environment the server does not start."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._wanted = b"Bearer " + os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or scope["path"] == "/health"
            or any(name == b"authorization" and hmac.compare_digest(value, self._wanted) for name, value in scope["headers"])
        ):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})
