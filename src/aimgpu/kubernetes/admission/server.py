"""The HTTPS server that the API server asks about pods and InferenceServices."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from aimgpu.errors import AimGpuError, ClusterConflict, ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.admission.certificate_keeper import CertificateKeeper
from aimgpu.kubernetes.admission.claims import UNUSED_SINCE
from aimgpu.kubernetes.admission.inventory import PublishedGpus
from aimgpu.kubernetes.admission.options import AdmissionOptions
from aimgpu.kubernetes.admission.replicas import OfferedReplicas
from aimgpu.kubernetes.admission.review import Admitted, Cluster, answer, review_pod, review_service
from aimgpu.kubernetes.api_client import Client, Object, Resource
from aimgpu.kubernetes.custom_resources import GPU_NODES
from aimgpu.kubernetes.names import DRIVER
from aimgpu.kubernetes.standard_resources import CLAIM_TEMPLATES, RESOURCE_SLICES
from aimgpu.sizing import Catalogue, built_in, combine, read_rows

log = logging.getLogger(__name__)

_LARGEST_REVIEW = 8 << 20  # the API server's own limit of an object is 3 MiB; old and new come together
_RETRY_SECONDS = 1.0


class AdmissionServer:
    """Answers reviews. What it knows of GPUs follows the ResourceSlices; without it nothing but fractions is refused."""

    def __init__(self, client: Client, options: AdmissionOptions) -> None:
        self._client = client
        self._options = options
        self._gpus, self._replicas = PublishedGpus(), OfferedReplicas()
        self._unlisted = {RESOURCE_SLICES, GPU_NODES}
        self._known_templates: set[tuple[str, str]] = set()
        self._cluster = Cluster(gpus=self._gpus, replicas=self._replicas, catalogue=_read_catalogue(options))
        self.certificates = CertificateKeeper(client, options)

    async def run(self) -> None:
        """Serve until cancelled."""
        await self.certificates.obtain()
        runner = web.AppRunner(self.application(), access_log=None)
        await runner.setup()
        background = [asyncio.ensure_future(self._follow_cluster()), asyncio.ensure_future(self.certificates.keep())]
        try:
            site = web.TCPSite(runner, self._options.host, self._options.port, ssl_context=self.certificates.context)
            await site.start()
            log.info("admission.listening", extra={"data": {"port": self._options.port}})
            await asyncio.gather(*background)
        finally:
            for task in background:
                task.cancel()
            await runner.cleanup()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=_LARGEST_REVIEW)
        application.router.add_post("/mutate/pods", self._mutate_pod)
        application.router.add_post("/validate/inferenceservices", self._validate_service)
        application.router.add_post("/validate/llminferenceservices", self._validate_llm_service)
        application.router.add_get("/healthz", self._healthy)
        application.router.add_get("/readyz", self._ready)
        return application

    async def _mutate_pod(self, request: web.Request) -> web.Response:
        review = await _read_review(request)
        pod, namespace = review.get("object") or {}, str(review.get("namespace") or "default")
        try:
            admitted = review_pod(pod, namespace, self._cluster)
            if admitted.template is not None and not review.get("dryRun"):
                await self._ensure_template(admitted.template, namespace)
        except AimGpuError as error:
            return _respond(review, error)
        return _respond(review, admitted)

    async def _validate_service(self, request: web.Request) -> web.Response:
        review = await _read_review(request)
        return self._respond_service(review, review.get("object") or {})

    async def _validate_llm_service(self, request: web.Request) -> web.Response:
        """An LLMInferenceService names its model and its pod in other places."""
        review = await _read_review(request)
        return self._respond_service(review, _as_service(review.get("object") or {}))

    def _respond_service(self, review: Mapping[str, Any], service: Mapping[str, Any]) -> web.Response:
        try:
            warnings = review_service(service, self._cluster)
        except AimGpuError as error:
            return _respond(review, error)
        return _respond(review, Admitted(patch=[], warnings=warnings))

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        if not self._unlisted:
            return web.Response(text="ok\n")
        return web.Response(status=503, text="the GPUs of the cluster are not listed yet\n")

    async def _ensure_template(self, template: Object, namespace: str) -> None:
        """Equal requests share a template, so that most pods find theirs; one that was removed is made again."""
        name = template["metadata"]["name"]
        if (namespace, name) in self._known_templates:
            return
        try:
            await self._client.create(CLAIM_TEMPLATES, template, namespace)
        except ClusterConflict:  # it is there, and its content is in its name; it may be about to be removed as unused
            try:
                await self._client.patch(CLAIM_TEMPLATES, name, {"metadata": {"annotations": {UNUSED_SINCE: None}}}, namespace)
            except NotFoundInCluster:
                await self._client.create(CLAIM_TEMPLATES, template, namespace)
        self._known_templates.add((namespace, name))

    async def _follow_cluster(self) -> None:
        """What the API server does not know is not followed: before 1.34 there are no claims, only the device plugin."""
        claims = await self._serves(RESOURCE_SLICES)
        async with asyncio.TaskGroup() as group:
            if claims:
                group.create_task(self._watch_gpus(RESOURCE_SLICES, self._gpus, f"spec.driver={DRIVER}"))
                group.create_task(self._watch_templates())
            if await self._serves(GPU_NODES):
                group.create_task(self._watch_replicas())

    async def _serves(self, resource: Resource) -> bool:
        while True:
            try:
                served = await self._client.serves(f"{resource.group}/{resource.version}")
            except ClusterFailed as error:
                log.warning("admission.waiting", extra={"data": {"resource": resource.plural, "reason": error.message}})
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if not served:
                self._unlisted.discard(resource)
            return served

    async def _watch_replicas(self) -> None:
        """The role of a chart of before does not let it list GpuNodes: it is ready without them, and goes on trying."""
        try:
            await self._client.list(GPU_NODES)
        except ClusterFailed as error:
            if error.status == HTTPStatus.FORBIDDEN:
                self._unlisted.discard(GPU_NODES)
        await self._watch_gpus(GPU_NODES, self._replicas)

    async def _watch_gpus(self, resource: Resource, known: PublishedGpus | OfferedReplicas, fields: str = "") -> None:
        async for event in self._client.watch(resource, fields=fields):
            if event.type == "SYNCED":
                self._unlisted.discard(resource)
            elif event.type == "DELETED":
                known.remove(event.object)
            else:
                known.put(event.object)

    async def _watch_templates(self) -> None:
        labels = "app.kubernetes.io/managed-by=aim-gpu-sharing"
        async for event in self._client.watch(CLAIM_TEMPLATES, labels=labels):
            if event.type != "SYNCED":
                metadata = event.object["metadata"]
                key = metadata["namespace"], metadata["name"]
                unused = event.type == "DELETED" or UNUSED_SINCE in (metadata.get("annotations") or {})
                (self._known_templates.discard if unused else self._known_templates.add)(key)


@contextlib.asynccontextmanager
async def running_server(client: Client, options: AdmissionOptions) -> AsyncIterator[AdmissionServer]:
    """For programs that embed it."""
    server = AdmissionServer(client, options)
    task = asyncio.ensure_future(server.run())
    try:
        yield server
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _read_review(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
        review: dict[str, Any] = body["request"]
        review["uid"] = str(review["uid"])
    except (ValueError, KeyError, TypeError) as error:
        raise web.HTTPBadRequest(text="not an AdmissionReview\n") from error
    return review


def _respond(review: Mapping[str, Any], decided: Admitted | AimGpuError) -> web.Response:
    def decide() -> Admitted:
        if isinstance(decided, AimGpuError):
            raise decided
        return decided

    return web.json_response(answer(str(review["uid"]), decide))


def _as_service(service: Mapping[str, Any]) -> dict[str, Any]:
    spec = service.get("spec") or {}
    template = dict(spec.get("template") or {})
    uri = (spec.get("model") or {}).get("uri")
    predictor: dict[str, Any] = {**template, "annotations": spec.get("annotations") or {}}
    if uri:
        main: dict[str, Any] = next(iter(template.get("containers") or ()), {})
        predictor["model"] = {"storageUri": uri, **{key: main[key] for key in ("args", "env", "resources") if key in main}}
        predictor.pop("containers", None)
    return {"metadata": service.get("metadata") or {}, "spec": {"predictor": predictor}}


def _read_catalogue(options: AdmissionOptions) -> Catalogue:
    if options.catalogue is None:
        return built_in()
    return combine(built_in().rows, tuple(read_rows(options.catalogue.read_text(encoding="utf-8"))))
