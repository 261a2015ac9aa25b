"""The HTTPS server that the API server asks about pods and InferenceServices."""

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from aimgpu.errors import AimGpuError, ClusterConflict, ClusterFailed, NotAllowed, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Key, Mirror, OnChange, as_it_is
from aimgpu.kubernetes.api.resources import CLAIM_TEMPLATES, LEASES, RESOURCE_SLICES
from aimgpu.kubernetes.cluster.admission.certificate_keeper import CertificateKeeper
from aimgpu.kubernetes.cluster.admission.inventory import PublishedGpus
from aimgpu.kubernetes.cluster.admission.options import AdmissionOptions
from aimgpu.kubernetes.cluster.admission.replicas import OfferedReplicas
from aimgpu.kubernetes.cluster.admission.review import Admitted, Cluster, answer, gate_pod, review_pod, review_service
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES
from aimgpu.kubernetes.vocabulary.names import DRIVER, MANAGED_BY, PLACER_LEASE, UNUSED_SINCE
from aimgpu.sizing import Catalogue, built_in, combine, read_rows

log = logging.getLogger(__name__)

_PLACER_SECONDS = 10.0  # without a renewal of its Lease, which it renews every three
_LARGEST_REVIEW = 8 << 20  # the API server's own limit of an object is 3 MiB; old and new come together


class AdmissionServer:
    """Answers reviews. What it knows of GPUs follows the ResourceSlices; without it nothing but fractions is refused."""

    def __init__(self, client: Client, options: AdmissionOptions) -> None:
        self._client = client
        self._options = options
        self._gpus, self._replicas = PublishedGpus(), OfferedReplicas()
        ours = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
        self._mirrors = (
            Mirror(client, RESOURCE_SLICES, as_it_is, fields=f"spec.driver={DRIVER}", on_change=_into(self._gpus)),
            Mirror(client, GPU_NODES, as_it_is, on_change=_into(self._replicas)),
        )
        self._templates = Mirror(client, CLAIM_TEMPLATES, _is_unused, labels=ours, on_change=self._saw_template)
        name, place = f"metadata.name={PLACER_LEASE}", (options.namespace,)
        self._lease = Mirror(client, LEASES, _renewal, namespaces=place, fields=name, on_change=self._saw_lease)
        self._placed_until = 0.0  # of the event loop's clock: times of other machines are not compared
        self._known_templates: set[tuple[str, str]] = set()
        self._cluster = Cluster(gpus=self._gpus, replicas=self._replicas, catalogue=_read_catalogue(options))
        self.certificates = CertificateKeeper(client, options)

    async def run(self) -> None:
        """Serve until cancelled."""
        await self.certificates.obtain()
        runner = web.AppRunner(self.application(), access_log=None)
        await runner.setup()
        background = [asyncio.ensure_future(self.follow_cluster()), asyncio.ensure_future(self.certificates.keep())]
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
        application.router.add_post("/mutate/placement", self._gate_pod)
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

    async def _gate_pod(self, request: web.Request) -> web.Response:
        """Add the gate to a pod, if a placer runs that would remove it."""
        review = await _read_review(request)
        placed = asyncio.get_running_loop().time() < self._placed_until
        return _respond(review, gate_pod(review.get("object") or {}) if placed else Admitted(patch=[]))

    def _saw_lease(self, _key: Key, before: str | None, now: str | None) -> None:
        """The first sight of it is not a renewal: it may be old."""
        if now is None:
            self._placed_until = 0.0
        elif before is not None and before != now:
            self._placed_until = asyncio.get_running_loop().time() + _PLACER_SECONDS

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
        if all(mirror.synced.is_set() for mirror in self._mirrors):
            return web.Response(text="ok\n")
        return web.Response(status=503, text="the GPUs of the cluster are not listed yet\n")

    async def _ensure_template(self, template: Object, namespace: str) -> None:
        """Equal requests share a template, so that most pods find theirs; one that was removed is made again."""
        name = template["metadata"]["name"]
        if (namespace, name) in self._known_templates:
            return
        try:
            await self._client.create(CLAIM_TEMPLATES, template, namespace)
        except ClusterConflict:
            try:
                await self._keep_template(template, namespace)
            except NotFoundInCluster:
                await self._client.create(CLAIM_TEMPLATES, template, namespace)
        self._known_templates.add((namespace, name))

    async def _keep_template(self, template: Object, namespace: str) -> None:
        """One of this name is there. It may be about to be removed as unused, and whoever may write here may have made it.

        It is replaced by ours: a spec cannot change, so the API server refuses that where the content is another.
        """
        name = template["metadata"]["name"]
        found = await self._client.get(CLAIM_TEMPLATES, name, namespace)
        metadata = {key: value for key, value in found["metadata"].items() if key not in ("resourceVersion", "managedFields")}
        annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != UNUSED_SINCE}
        try:
            await self._client.replace(
                CLAIM_TEMPLATES, {**template, "metadata": {**metadata, "annotations": annotations}}, namespace
            )
        except ClusterFailed as error:
            if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            raise NotAllowed(
                f"ResourceClaimTemplate {namespace}/{name} has another content than its name says",
                hint=f"Remove it: kubectl -n {namespace} delete resourceclaimtemplate {name}",
            ) from error

    async def follow_cluster(self) -> None:
        """Until cancelled: which GPUs there are, and which of the templates that were made are still used."""
        async with asyncio.TaskGroup() as group:
            for mirror in self._mirrors:
                group.create_task(mirror.run())
            group.create_task(self._templates.run())
            group.create_task(self._lease.run())

    def _saw_template(self, key: Key, _before: object, unused: bool | None) -> None:  # noqa: FBT001 - what is kept
        if unused is not False:  # one that is only seen is not known: what is in it was not compared
            self._known_templates.discard(key)


def _into(known: PublishedGpus | OfferedReplicas) -> OnChange[Object]:
    def saw(_key: Key, before: Object | None, now: Object | None) -> None:
        (known.remove if now is None else known.put)(now or before or {})

    return saw


def _renewal(lease: Object) -> str:
    return str((lease.get("spec") or {}).get("renewTime") or "")


def _is_unused(template: Object) -> bool:
    return UNUSED_SINCE in (template["metadata"].get("annotations") or {})


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
