"""One port for all: models under /v1 (and Ollama's /api), control under /api/v1, the page at /, metrics at /metrics."""

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.responses import JSONResponse, Response

from aimgpu.errors import AimGpuError, NotAllowed
from aimgpu.gateway.application import Gateway
from aimgpu.gateway.auth import Keys, identify
from aimgpu.gateway.records import RequestRecord
from aimgpu.monitoring.exporter import CONTENT_TYPE, Exporter
from aimgpu.web.page import PAGE_HEADERS, render_status_page
from aimgpu.web.view import StatusView

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ReadView = Callable[[Mapping[str, Any]], StatusView]  # with the gateway's scores
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_KEYLESS = ("/", "/metrics")  # callers on this machine need no key for these even where there are keys
_READING = ("GET", "HEAD")


class Router:
    def __init__(self, gateway: Gateway, api: Application, exporter: Exporter, keys: Keys | None, read_view: ReadView) -> None:
        self._gateway = gateway
        self._api = api
        self._exporter = exporter
        self._keys = keys
        self._read_view = read_view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else None
        if (self._keys is None or not self._keys.required or path in _KEYLESS) and not names_this_machine(_read_host(scope)):
            await _refuse_host()(scope, receive, send)
        elif path in _KEYLESS and scope["method"] not in _READING:
            await Response(status_code=405, headers={"allow": ", ".join(_READING)})(scope, receive, send)
        elif path in _KEYLESS:
            response = await (self._page(scope) if path == "/" else self._metrics(scope))
            await response(scope, receive, send)
        elif path is not None and path.startswith("/api/v1/"):
            await self._api(scope, receive, send)
        else:
            await self._gateway(scope, receive, send)

    async def _page(self, scope: Scope) -> Response:
        """For people on this machine: a browser sends no API key."""
        if not is_loopback((scope.get("client") or ("", 0))[0]):
            text = "This page is shown on the machine itself only; reach it through an SSH tunnel.\n"
            return Response(text, status_code=403, media_type="text/plain")
        view = await asyncio.to_thread(self._read_view, self._gateway.board.report())
        return Response(render_status_page(view), headers=PAGE_HEADERS)

    async def _metrics(self, scope: Scope) -> Response:
        """For a Prometheus on this machine, or one that sends an API key as its bearer token."""
        if not is_loopback((scope.get("client") or ("", 0))[0]):
            try:
                identify(self._keys, dict(scope["headers"]))
            except AimGpuError as error:
                return Response(f"{error.message}\n", status_code=error.http_status, media_type="text/plain")
        text = await asyncio.to_thread(self._exporter.render, self._gateway.board.report())
        return Response(text, headers={"content-type": CONTENT_TYPE})


@functools.lru_cache(maxsize=64)
def names_this_machine(host: bytes) -> bool:
    """Whether a Host header may come from this machine: an address, localhost, its own name, or none at all.

    Another name is how a web page that somebody reads here gets past the browser: its own name, resolved to 127.0.0.1.
    """
    name = host.decode("latin-1").strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name in ("", "localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _read_host(scope: Scope) -> bytes:
    return next((bytes(value) for name, value in scope["headers"] if name == b"host"), b"")


def _refuse_host() -> Response:
    error = NotAllowed(
        "without an API key the models answer to this machine's own names only",
        hint="Call http://127.0.0.1, or make a key with `aimgpu keys add NAME` and send it.",
    )
    return JSONResponse({"error": {**error.to_json(), "type": "invalid_request_error", "param": None}}, status_code=403)


class RequestMetrics:
    """An Observer of the gateway that feeds the exporter."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def finished(self, record: RequestRecord) -> None:
        self._exporter.observe(record.model, record.status, record.seconds, record.ttft_seconds, record.tpot_seconds)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
