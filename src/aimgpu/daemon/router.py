"""What the daemon answers beside the models: control under /api/v1, the page at /, metrics at /metrics.

The gateway is the outer application and passes on what is not a model request, so none of this runs per request.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from aimgpu.errors import AimGpuError, NoSuchPath
from aimgpu.gateway.auth import KeyTable, identify
from aimgpu.gateway.hosts import check_host, is_local
from aimgpu.gateway.http.asgi import Receive, Scope, Send, send_error
from aimgpu.monitoring.exporter import CONTENT_TYPE, Exporter
from aimgpu.web.routes import PageApplication

Report = Callable[[], Mapping[str, Any]]  # the gateway's scores

_METRICS = "/metrics"  # callers on this machine need no key for it even where there are keys
_PROBES = ("/healthz", "/readyz")  # for everyone: they show nothing of what runs
_READING = ("GET", "HEAD")


class Router:
    """The gateway's fallback application."""

    def __init__(
        self,
        page: PageApplication,
        exporter: Exporter,
        keys: KeyTable,
        report: Report,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._page = page
        self._exporter = exporter
        self._keys = keys
        self._report = report
        self._is_ready = is_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = scope["path"]
        head = dict(scope["headers"])
        try:
            if path == _METRICS or (not self._keys.required and path not in _PROBES):
                check_host(head)
            if path in _PROBES:
                await self._probe(path)(scope, receive, send)
            elif path == _METRICS:
                response = await self._metrics(scope, head)
                await response(scope, receive, send)
            elif path.startswith("/api/v1/") or self._page.is_asset(path):
                await self._page(scope, receive, send)
            else:
                raise NoSuchPath(f"There is nothing at {path[:100]}.", hint="Models answer under /v1.")
        except AimGpuError as error:
            await send_error(send, error)

    def _probe(self, path: str) -> Response:
        """Alive as long as it answers; ready once what runs is known, and models can be changed."""
        if path == "/readyz" and not self._is_ready():
            return Response(
                "reconciling: what ran before is still being taken over\n", status_code=503, media_type="text/plain"
            )
        return Response("ok\n", media_type="text/plain")

    async def _metrics(self, scope: Scope, head: Mapping[bytes, bytes]) -> Response:
        """For a Prometheus on this machine, or one that sends an API key; a key for some models sees those only."""
        if scope["method"] not in _READING:
            return Response(status_code=405, headers={"allow": ", ".join(_READING)})
        only: frozenset[str] | None = None
        if b"authorization" in head or not is_local(scope, head):
            try:
                only = identify(self._keys, head).models
            except AimGpuError as error:
                return Response(f"{error.message}\n", status_code=error.http_status, media_type="text/plain")
        text = await asyncio.to_thread(self._exporter.render, self._report(), only)
        return Response(text, headers={"content-type": CONTENT_TYPE})
