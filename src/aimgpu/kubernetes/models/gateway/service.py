"""The gateway's process: callers on one port; metrics and scores for the cluster on another, and probes on a third."""

import asyncio
import importlib.metadata
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Mapping

from aiohttp import web

from aimgpu.control.observation import Observation
from aimgpu.domain import Ask, Auto, Deployment
from aimgpu.gateway.application import GatewayDependencies, GatewaySettings, create_gateway
from aimgpu.gateway.http.server import caller_config
from aimgpu.gateway.http.tls import CallerServer, ServerCertificate, TlsListener
from aimgpu.gateway.liveness import LoopWatch, ProbeServer
from aimgpu.gateway.media import parse_media_domains
from aimgpu.gateway.routes import RouteTable
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.models.gateway.cluster_models import ClusterModels
from aimgpu.kubernetes.models.gateway.followed_queue import FollowedQueue
from aimgpu.kubernetes.models.gateway.model_scaler import ModelScaler
from aimgpu.kubernetes.models.gateway.options import ClusterGatewayOptions
from aimgpu.kubernetes.models.gateway.secret_keys import SecretKeys
from aimgpu.monitoring.exporter import CONTENT_TYPE, Exporter, MetricSources
from aimgpu.monitoring.traces import make_traces
from aimgpu.qos.slo.activity import ActivityLog

log = logging.getLogger(__name__)

_MOST_REPORTED = 500


def _read_settings(environment: Mapping[str, str]) -> GatewaySettings:
    return GatewaySettings(
        separate_caches=environment.get("AIMGPU_SEPARATE_CACHES") != "0",
        media_domains=parse_media_domains(environment.get("AIMGPU_MEDIA_DOMAINS", "")),
    )


def _listen(options: ClusterGatewayOptions) -> TlsListener | None:
    if options.tls_cert is None:
        return None
    certificate = ServerCertificate(options.tls_cert, options.tls_key or options.tls_cert)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    return TlsListener(socket.create_server((options.host, options.tls_port), family=family), certificate)


class ClusterGateway:
    """One replica. SIGTERM: not ready at once, serves on until every node knows, then ends when its answers have."""

    def __init__(self, client: Client, options: ClusterGatewayOptions) -> None:
        self._options = options
        self._routes = RouteTable()
        self._models = ClusterModels(client, options, self._routes)
        self._keys = SecretKeys(client, options.namespace, options.secret, self._models.share)
        self._activity = ActivityLog(time.time)
        dependencies = GatewayDependencies(
            keys=self._keys.table if options.keys_required else None, observer=make_traces(self._activity) or self._activity
        )
        self._gateway = create_gateway(self._routes, settings=_read_settings(os.environ), dependencies=dependencies)
        self._scaler = ModelScaler(client, self._models, self._gateway, self._routes, options.namespace)
        self._queue = FollowedQueue(client, options.namespace, self._gateway, self._models)
        self._exporter = Exporter(
            MetricSources(
                look=self._look, version=importlib.metadata.version("aimgpu"), counts=self._gateway.slo_monitor.counts
            )
        )
        self._stopping = asyncio.Event()
        self._server = CallerServer(caller_config(self._gateway, host=options.host, port=options.port), _listen(options))

    async def run(self) -> None:
        """Until SIGTERM."""
        loop = asyncio.get_running_loop()
        following = [asyncio.ensure_future(work) for work in self._work()]
        watch = LoopWatch()
        following.append(asyncio.ensure_future(watch.run()))
        probes = ProbeServer(watch, self._is_ready, (self._options.host, self._options.probe_port))
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
            probes.close()
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
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/scores", self._scores)
        application.router.add_get("/activity", self._finished)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self._options.host, self._options.internal_port).start()
        return runner

    def _is_ready(self) -> bool:
        """Once the models are known, and until it is to end. In any thread."""
        return self._routes.filled and self._server.started and not self._stopping.is_set()

    async def _scores(self, _request: web.Request) -> web.Response:
        return web.json_response(self._gateway.slo_monitor.report())

    async def _finished(self, request: web.Request) -> web.Response:
        """Finished requests after this number that are still kept; all of them if the number is from an earlier gateway."""
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
