"""The control API as far as a cluster has it, at the paths and in the shapes of the daemon's, on the cluster's objects."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aimgpu.control.events import Event, EventKind
from aimgpu.control.stack.overrides import unmask
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.domain import Deployment
from aimgpu.errors import AimGpuError, ClusterFailed, InvalidInput, NotAllowed, NotAuthenticated, UnknownDeployment
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, PODS
from aimgpu.kubernetes.models.gateway.served_models import read_model
from aimgpu.kubernetes.models.page.callers import Callers
from aimgpu.kubernetes.models.page.cluster_resize import Strategy, apply_rollout, finish_rollout, wait_for_rollout
from aimgpu.kubernetes.models.page.follower import ClusterFollower
from aimgpu.kubernetes.models.page.layout_plans import plan_layout, preview_layout
from aimgpu.kubernetes.models.page.share_rollout import ShareRollout, plan_rollout
from aimgpu.kubernetes.models.serving.applier import StackApplier
from aimgpu.kubernetes.models.serving.cluster_view import engine_container_of, find_media_domains
from aimgpu.kubernetes.models.serving.engine_container import ServingImages
from aimgpu.kubernetes.models.serving.key_secret import gateway_namespace_or
from aimgpu.kubernetes.models.serving.manifests import USUAL_NAMESPACE, Manifest, RenderOptions, render_stack
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.kubernetes.vocabulary.custom_resources import PARTITION_PLANS
from aimgpu.units import format_duration_ms
from aimgpu.web.assets import SAFETY_HEADERS
from aimgpu.web.error_answers import make_error_handlers
from aimgpu.web.request_body import read_json
from aimgpu.web.routes import read_change

log = logging.getLogger(__name__)

_LARGEST_BODY = 1 << 20
_MOST_LOG_LINES = 10_000
_UNAUTHORIZED, _FORBIDDEN = 401, 403
_CHANGES = ("/api/v1/apply", "/api/v1/release", "/api/v1/partition", "/api/v1/resize", "/api/v1/models/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplySettings:
    """What a stack is applied with where the request names nothing else."""

    image: str | None  # of this project, for the embedded engine
    namespace: str
    check_shares: Callable[[Client, Sequence[Manifest], str], Awaitable[None]]  # raises for what the GPUs cannot hold
    pull_policy: str | None = None


class ClusterControl:
    """An ASGI application for what `handles` names; each request has the rights of its caller."""

    def __init__(self, callers: Callers, follower: ClusterFollower, settings: ApplySettings) -> None:
        self._callers = callers
        self._follower = follower
        self._settings = settings
        self._finishing: set[asyncio.Task[None]] = set()
        self.application = Starlette(
            routes=[
                Route("/api/v1/apply", self._apply, methods=["POST"]),
                Route("/api/v1/release", self._release, methods=["POST"]),
                Route("/api/v1/partition", self._partition, methods=["POST"]),
                Route("/api/v1/resize", self._resize, methods=["POST"]),
                Route("/api/v1/models/{name:path}/sleep", self._sleep, methods=["POST"]),
                Route("/api/v1/models/{name:path}/wake", self._wake, methods=["POST"]),
                Route("/api/v1/models/{name:path}", self._change, methods=["PATCH"]),
                Route("/api/v1/instances/{name}/log", self._log, methods=["GET"]),
            ],
            exception_handlers=make_error_handlers(SAFETY_HEADERS),
        )

    @staticmethod
    def handles(method: str, path: str) -> bool:
        """Everything that changes something, and logs."""
        if path.startswith("/api/v1/instances/"):
            return True
        return method in ("POST", "PATCH") and path.startswith(_CHANGES)

    async def _apply(self, request: Request) -> Response:
        body = await read_json(request, most_bytes=_LARGEST_BODY)
        text, namespace = body.get("stack"), body.get("namespace") or self._settings.namespace
        if not isinstance(text, str) or not isinstance(namespace, str):
            raise InvalidInput("apply needs {stack: text, namespace: text}")
        deployments = unmask(parse_stack(text, source="the form").deployments, self._follower.look().deployments)
        for one in deployments:
            _refuse_programs(one)
            _refuse_references(one)
        async with self._rights(request) as client:
            applier = StackApplier(client, namespace)
            await applier.check_cluster()
            images = ServingImages(
                own=self._settings.image,
                vendor=await applier.find_vendor(),
                pull_policy=self._settings.pull_policy,
                media_domains=await find_media_domains(self._callers.own),
            )
            place = await gateway_namespace_or(self._callers.own, USUAL_NAMESPACE)
            manifests = render_stack(deployments, RenderOptions(images=images, gateway_namespace=place))
            await self._settings.check_shares(client, manifests, namespace)
            changes = [one async for one in applier.apply(manifests)]
        steps = [Event(kind=EventKind.STEP, text=f"{one.kind.lower()}/{one.name} {one.change.value}") for one in changes]
        return _lines([*steps, Event(kind=EventKind.DONE, text="done")])

    async def _release(self, request: Request) -> Response:
        names = (await read_json(request, most_bytes=_LARGEST_BODY)).get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidInput("release needs {names: [...]}")
        models = [self._find(name) for name in names]
        async with self._rights(request) as client:
            for model in models:
                _check_ours(model)
                found = read_model(model)
                async for _ in StackApplier(client, found.key[0]).remove([found.name]):
                    pass
        return _json({"released": names})

    async def _partition(self, request: Request) -> Response:
        body = await read_json(request, most_bytes=_LARGEST_BODY)
        device, layout = body.get("device"), body.get("layout")
        if not isinstance(device, str) or not isinstance(layout, str):
            raise InvalidInput("partition needs {device: id, layout: name}")
        seen = self._follower.look()
        if request.query_params.get("dry_run") in ("1", "true"):
            self._callers.authority.check_read(request.scope)
            return _json(preview_layout(seen, device, layout).to_json())
        plan = plan_layout(self._follower.nodes(), seen, device, layout)
        async with self._rights(request) as client:
            await client.create(PARTITION_PLANS, plan)
        text = f"PartitionPlan {plan['metadata']['name']} was made; the operator drains the node and changes the layout"
        return _lines([Event(kind=EventKind.STEP, text=text), Event(kind=EventKind.DONE, text="done")])

    async def _resize(self, request: Request) -> Response:
        """Seen before by anyone here; done by rolling the model's Deployment or InferenceService out with the new share."""
        body = await read_json(request, most_bytes=_LARGEST_BODY)
        name, size = body.get("model"), body.get("memory_bytes")
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool):
            raise InvalidInput("resize needs {model: name, memory_bytes: whole number}")
        self._callers.authority.check_read(request.scope)
        item = self._find(name)
        rollout = plan_rollout(self._follower.look(), item, name, size)
        dry_run = request.query_params.get("dry_run") in ("1", "true")
        if not dry_run and rollout.changed:
            async with self._rights(request) as client:
                before = await apply_rollout(client, item, rollout)
            task = asyncio.create_task(self._finish(request, item, rollout, before))
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)
        return _json({**rollout.to_json(), "dry_run": dry_run})

    async def _finish(self, request: Request, item: Object, rollout: ShareRollout, before: Strategy) -> None:
        """With the rights of the one who asked, and only while this page runs."""
        try:
            async with self._rights(request) as client:
                await wait_for_rollout(client, item, rollout)
                await finish_rollout(client, item, before)
        except (AimGpuError, OSError) as error:  # a TimeoutError is one
            data = {"model": rollout.wanted.name, "reason": str(error) or "its pods were not replaced in time"}
            log.warning("resize.strategy_kept", extra={"data": data})

    async def close(self) -> None:
        """What waits for pods is left as it is."""
        for task in self._finishing:
            task.cancel()
        await asyncio.gather(*self._finishing, return_exceptions=True)

    async def _sleep(self, request: Request) -> Response:
        return await self._scale(request, awake=False)

    async def _wake(self, request: Request) -> Response:
        return await self._scale(request, awake=True)

    async def _scale(self, request: Request, *, awake: bool) -> Response:
        model = read_model(self._find(request.path_params["name"]))
        body = {"spec": {"replicas": model.wanted_replicas if awake else 0}}
        async with self._rights(request) as client:
            await client.patch(DEPLOYMENTS, model.object_name, body, model.key[0], subresource="scale")
        return _json({"done": True})

    async def _change(self, request: Request) -> Response:
        """As annotations of the Deployment itself: the gateway follows them, and no pod is restarted."""
        change = read_change(await read_json(request, most_bytes=_LARGEST_BODY))
        annotations: dict[str, str | None] = {}
        if change.priority is not None:
            annotations[labels.PRIORITY] = change.priority.value
        if change.pinned:
            annotations[labels.KEEP] = None
        elif change.keep_seconds is not None:
            annotations[labels.KEEP] = format_duration_ms(change.keep_seconds * 1000)
        model = read_model(self._find(request.path_params["name"]))
        body = {"metadata": {"annotations": annotations}}
        async with self._rights(request) as client:
            changed = read_model(await client.patch(DEPLOYMENTS, model.object_name, body, model.key[0]))
        return _json({"name": model.name, "priority": changed.priority.value, "keep_seconds": changed.keep_seconds})

    async def _log(self, request: Request) -> Response:
        name = request.path_params["name"]
        pod = next((one for one in self._follower.pods() if one["metadata"]["name"] == name), None)
        if pod is None:
            raise UnknownDeployment(f"no pod {name!r} serves a model now", hint="It may have ended just now.")
        wanted = request.query_params.get("lines", "100")
        lines = min(int(wanted), _MOST_LOG_LINES) if wanted.isascii() and wanted.isdecimal() else 100
        follow = request.query_params.get("follow") in ("1", "true")
        query = {"tailLines": str(lines), "follow": str(follow).lower(), "container": engine_container_of(pod)}
        path = PODS.path(pod["metadata"]["namespace"], name, "log")
        rights = self._rights(request)
        client = await rights.__aenter__()
        stream = client.read_lines(path, query)
        try:
            first = await anext(stream, None)  # a refusal is an answer of its own, not a log that ends at once
        except BaseException as error:
            await rights.__aexit__(type(error), error, error.__traceback__)
            raise

        async def body() -> AsyncIterator[bytes]:
            try:
                if first is not None:
                    yield first.encode() + b"\n"
                async for line in stream:
                    yield line.encode() + b"\n"
            finally:
                await rights.__aexit__(None, None, None)

        return StreamingResponse(body(), media_type="text/plain; charset=utf-8", headers=SAFETY_HEADERS)

    @asynccontextmanager
    async def _rights(self, request: Request) -> AsyncIterator[Client]:
        try:
            async with self._callers.client_of(request.scope) as client:
                yield client
        except ClusterFailed as error:
            if error.status == _UNAUTHORIZED:
                raise NotAuthenticated("The API server does not know this token.", hint="It may have expired.") from error
            if error.status == _FORBIDDEN:
                raise NotAllowed(error.message, hint=error.hint or "Ask for the role that this needs.") from error
            raise

    def _find(self, name: str) -> Object:
        models = dict(self._follower.models())
        if name not in models:
            raise UnknownDeployment.of(name, known=models)
        return models[name]


def _refuse_programs(deployment: Deployment) -> None:
    """The page follows models only."""
    if deployment.overrides.program is not None:
        raise InvalidInput(
            f"{deployment.name}: the page of a cluster applies models, not programs",
            hint="Apply it with `aimgpu up --on kubernetes`.",
        )


def _refuse_references(deployment: Deployment) -> None:
    """They would be read where the page runs, which is not where the user's files are."""
    if deployment.overrides.secrets:
        raise InvalidInput(
            f"{deployment.name}: `env` refers to files or variables of the machine that applies it",
            hint="Apply it with `aimgpu up --on kubernetes` there.",
        )


def _check_ours(model: Object) -> None:
    if labels.MANAGED.items() <= (model["metadata"].get("labels") or {}).items():
        return
    place = f"{model['metadata']['namespace']}/{model['metadata']['name']}"
    raise NotAllowed(f"Deployment {place} was not made by aimgpu", hint="Remove it with what made it.")


def _lines(events: Sequence[Event]) -> Response:
    body = "".join(json.dumps(event.to_json()) + "\n" for event in events)
    return Response(body, media_type="application/x-ndjson", headers=SAFETY_HEADERS)


def _json(content: Mapping[str, Any]) -> Response:
    return JSONResponse(content, headers={"cache-control": "no-store", **SAFETY_HEADERS})
