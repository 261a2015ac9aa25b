"""The gateway's process: callers on one port; probes, metrics and scores for the cluster on another."""

import asyncio
import importlib.metadata
import logging
import signal
import time
from collections.abc import Coroutine

import uvicorn
from aiohttp import web

from aimgpu.control.observation import Observation
from aimgpu.domain import Ask, Auto, Deployment
from aimgpu.gateway.application import GatewayDependencies, GatewaySettings, create_gateway
from aimgpu.gateway.http.server import caller_config
from aimgpu.gateway.routes import RouteTable
from aimgpu.kubernetes.api_client import Client
from aimgpu.kubernetes.gateway.cluster_models import ClusterModels
from aimgpu.kubernetes.gateway.followed_queue import FollowedQueue
from aimgpu.kubernetes.gateway.model_scaler import ModelScaler
from aimgpu.kubernetes.gateway.options import ClusterGatewayOptions
from aimgpu.kubernetes.gateway.secret_keys import SecretKeys
from aimgpu.monitoring.exporter import CONTENT_TYPE, Exporter, MetricSources
from aimgpu.monitoring.traces import make_traces
from aimgpu.qos.slo.activity import ActivityLog

log = logging.getLogger(__name__)

_MOST_REPORTED = 500


class ClusterGateway:
    """One replica. SIGTERM: not ready at once, serves on until every node knows, then ends when its answers have."""

    def __init__(self, client: Client, options: ClusterGatewayOptions) -> None:
        self._options = options
        self._routes = RouteTable()
        self._keys = SecretKeys(client, options.namespace, options.secret)
        self._activity = ActivityLog(time.time)
        dependencies = GatewayDependencies(
            keys=self._keys.table if options.keys_required else None, observer=make_traces(self._activity) or self._activity
        )
        self._gateway = create_gateway(self._routes, settings=GatewaySettings(), dependencies=dependencies)
        self._models = ClusterModels(client, options, self._routes)
        self._scaler = ModelScaler(client, self._models, self._gateway, self._routes, options.namespace)
        self._queue = FollowedQueue(client, options.namespace, self._gateway, self._models)
        self._exporter = Exporter(
            MetricSources(
                look=self._look, version=importlib.metadata.version("aim-gpu-sharing"), counts=self._gateway.slo_monitor.counts
            )
        )
        self._stopping = asyncio.Event()
        self._server = uvicorn.Server(caller_config(self._gateway, host=options.host, port=options.port))

    async def run(self) -> None:
        """Until SIGTERM."""
        loop = asyncio.get_running_loop()
        following = [asyncio.ensure_future(work) for work in self._work()]
        internal = await self._serve_internal()
        serving = asyncio.ensure_future(self._server.serve())
        await self._started(serving)
        for number in (signal.SIGTERM, signal.SIGINT):  # in place of uvicorn's own, which would refuse connections at once
            loop.add_signal_handler(number, self._stopping.set)
        log.info("gateway.listening", extra={"data": {"port": self._options.port}})
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({serving, stopping, *following}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                await asyncio.sleep(self._options.drain_seconds)
            self._server.should_exit = True
            await serving
        finally:
            for task in (*following, stopping):
                task.cancel()
            results = await asyncio.gather(*following, return_exceptions=True)
            await internal.cleanup()
            await self._gateway.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _work(self) -> list[Coroutine[None, None, None]]:
        keys = [self._keys.run()] if self._options.keys_required else []
        return [self._models.run(), self._scaler.run(), self._queue.run(), *keys]

    async def _started(self, serving: "asyncio.Future[None]") -> None:
        while not self._server.started and not serving.done():  # noqa: ASYNC110 - uvicorn offers a flag and no event
            await asyncio.sleep(0.01)

    async def _serve_internal(self) -> web.AppRunner:
        application = web.Application()
        application.router.add_get("/healthz", self._healthy)
        application.router.add_get("/readyz", self._ready)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/scores", self._scores)
        application.router.add_get("/activity", self._finished)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self._options.host, self._options.internal_port).start()
        return runner

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        """Once the models are known, and until it is to end."""
        ready = self._routes.filled and self._server.started and not self._stopping.is_set()
        return web.Response(text="ok\n" if ready else "not ready\n", status=200 if ready else 503)

    async def _scores(self, _request: web.Request) -> web.Response:
        return web.json_response(self._gateway.slo_monitor.report())

    async def _finished(self, request: web.Request) -> web.Response:
        """Requests after a number, as far as they are still known; all where the number is of a gateway before this one."""
        given = request.query.get("after", "0")
        after = int(given) if given.isascii() and given.isdecimal() else 0
        known = self._activity.requests()
        latest = known[-1].number if known else 0
        found = [entry.to_json() for entry in known if entry.number > after or after > latest]
        return web.json_response({"latest": latest, "requests": found[-_MOST_REPORTED:]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        scores = self._gateway.slo_monitor.report(windows=0, every_class=False)
        return web.Response(body=self._exporter.render(scores), headers={"Content-Type": CONTENT_TYPE})

    def _look(self, *, max_age_seconds: float = 0.0, layouts_age_seconds: float = 0.0) -> Observation:  # noqa: ARG002 - a protocol
        """A gateway sees no GPUs; the node agents report those."""
        deployments = tuple(
            Deployment(name=one.name, model=one.model, ask=Ask(name=one.name, want=Auto())) for one in self._routes.list()
        )
        return Observation(node=self._options.pod, deployments=deployments)
