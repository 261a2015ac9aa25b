"""Metrics of a program in a pod, and what the kubelet's probes ask, over HTTP."""

from collections.abc import Callable

from aiohttp import web

from aimgpu.monitoring.exposition import CONTENT_TYPE


class MetricsServer:
    """``/metrics`` and ``/healthz``, 503 while there is nothing to show, and ``/livez``, which answers while the loop runs.

    `collect`: the metrics; None: what they are about was not read yet.
    """

    def __init__(self, port: int, collect: Callable[[], bytes | None]) -> None:
        self._port = port
        self._collect = collect
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/livez", _alive)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, None, self._port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = self._collect()
        if text is None:
            return web.Response(status=503, text="nothing was read yet\n")
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._collect() is not None else 503)


async def _alive(_request: web.Request) -> web.Response:
    return web.Response()
