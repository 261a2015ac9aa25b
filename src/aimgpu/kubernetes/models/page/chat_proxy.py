"""Passes a chat of the page on to a gateway of the cluster, through the API server: a browser reaches no pod itself.

The API server reads `Authorization` as its own, so the caller's key goes to the gateway as `x-api-key`.
"""

import asyncio
import random

from aimgpu.errors import BodyTooLarge, ClusterFailed, MethodNotAllowed
from aimgpu.gateway.http.asgi import Receive, Send
from aimgpu.kubernetes.api.resources import PODS
from aimgpu.kubernetes.models.page.callers import Callers, read_token
from aimgpu.kubernetes.models.serving.cluster_view import ClusterView
from aimgpu.kubernetes.models.serving.model_status import pod_state
from aimgpu.web.authority import Scope, check_same_origin

CHAT = "/v1/chat/completions"
_PORT = 8080
_LARGEST_BODY = 8 << 20
_PASSED = ("content-type", "x-aimgpu-waited-ms", "x-aimgpu-instance", "retry-after")


class ChatProxy:
    def __init__(self, callers: Callers, view: ClusterView) -> None:
        self._callers = callers
        self._view = view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises NotAuthenticated, NotAllowed or ClusterFailed before anything was sent."""
        self._callers.authority.check_read(scope)
        check_same_origin(scope)
        if scope["method"] != "POST":
            raise MethodNotAllowed("POST is needed here.")
        body = await _read(receive)
        answering = asyncio.ensure_future(self._answer(body, read_token(scope), send))
        gone = asyncio.ensure_future(_wait_until_gone(receive))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            answering.cancel()  # where the caller left: the gateway notices it, and the engine stops
        await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()

    async def _answer(self, body: bytes, key: str | None, send: Send) -> None:
        headers = {"content-type": "application/json"} | ({"x-api-key": key} if key else {})
        path = await self._path()
        async with self._callers.own.open_proxied(path, body, headers) as (status, answered, chunks):
            passed = [(name.encode(), answered[name].encode()) for name in _PASSED if name in answered]
            await send({"type": "http.response.start", "status": status, "headers": [*passed, (b"cache-control", b"no-store")]})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _path(self) -> str:
        gateways = [pod for pod in await self._view.gateways() if pod_state(pod)[0] == "ready"]
        if not gateways:
            raise ClusterFailed("no gateway of AIM GPU Sharing runs here", hint="Install the chart with gateway.enabled=true.")
        chosen = random.choice(gateways)["metadata"]  # noqa: S311 - any of them will do
        return PODS.path(chosen["namespace"], f"{chosen['name']}:{_PORT}", f"proxy{CHAT}")


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > _LARGEST_BODY:
            raise BodyTooLarge(f"The request is larger than {_LARGEST_BODY >> 20} MiB.")
        if not message.get("more_body"):
            return body


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
