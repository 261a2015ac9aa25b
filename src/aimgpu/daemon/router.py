"""What the daemon answers beside the models: control under /api/v1, the page at /, metrics at /metrics.

The gateway is the outer application and passes on what is not a model request, so none of this runs per request.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from aimgpu.errors import AimGpuError, NoSuchPath, NotAuthenticated
from aimgpu.gateway.auth import KeyTable, identify
from aimgpu.gateway.hosts import check_host, is_local
from aimgpu.gateway.http.asgi import Receive, Scope, Send, send_error
from aimgpu.monitoring.exporter import CONTENT_TYPE, Exporter
from aimgpu.pools import SmallPool
from aimgpu.web.authority import Authority, check_site
from aimgpu.web.routes import PageApplication

Report = Callable[[], Mapping[str, Any]]  # the gateway's scores

METRICS = "/metrics"
PROBES = ("/healthz", "/readyz")  # for everyone: they show nothing of what runs
_READING = ("GET", "HEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Who may come in."""

    keys: KeyTable
    authority: Authority
    hosts: Collection[str] = ()  # names of this machine beside its own


class Router:
    """The gateway's fallback application."""

    def __init__(
        self,
        page: PageApplication,
        exporter: Exporter,
        access: Admission,
        report: Report,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._page = page
        self._exporter = exporter
        self._keys = access.keys
        self._authority = access.authority
        self._hosts = access.hosts
        self._report = report
        self._is_ready = is_ready
        self._pool = SmallPool("metrics", at_once=2, waiting=16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = scope["path"]
        head = dict(scope["headers"])
        try:
            if path not in PROBES and not self._authority.has_credential(scope):  # which no browser sends unasked
                check_host(head, self._hosts)
                if not self._page.is_page(path):  # a link on another site may lead here
                    check_site(scope)
            if path in PROBES:
                await self._probe(path)(scope, receive, send)
            elif path == METRICS:
                response = await self._metrics(scope, head)
                await response(scope, receive, send)
            elif path.startswith("/api/v1/") or self._page.is_page(path):
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
        """For a Prometheus that sends an API key; a key for some models sees those only. Without keys: for this machine."""
        if scope["method"] not in _READING:
            return Response(status_code=405, headers={"allow": ", ".join(_READING)})
        only: frozenset[str] | None = None
        if not self._authority.may_change(scope):
            try:
                if not self._keys.required and not is_local(scope, head):
                    raise NotAuthenticated("From another machine the metrics need the daemon's token.")
                only = identify(self._keys, head).models
            except AimGpuError as error:
                return Response(f"{error.message}\n", status_code=error.http_status, media_type="text/plain")
        text = await self._pool.run(self._exporter.render, self._report(), only)
        return Response(text, headers={"content-type": CONTENT_TYPE})
