"""Follows the objects of the cluster and keeps the route table equal to them."""

import asyncio
import logging
import time
from dataclasses import replace

from aimgpu.gateway.routes import RouteTable
from aimgpu.kubernetes.api_client import Client, Object, Resource
from aimgpu.kubernetes.custom_resources import GPU_SHARES, VERSION
from aimgpu.kubernetes.gateway.options import ClusterGatewayOptions
from aimgpu.kubernetes.gateway.pod_problems import PodProblems
from aimgpu.kubernetes.gateway.ranking_engines import RankingEngines
from aimgpu.kubernetes.gateway.served_models import (
    ClusterModel,
    ClusterState,
    ModelKey,
    ReplicaShare,
    devices_of,
    make_routes,
    model_key,
    read_model,
)
from aimgpu.kubernetes.names import GROUP
from aimgpu.kubernetes.serving.model_labels import SERVED_MODEL
from aimgpu.kubernetes.standard_resources import DEPLOYMENTS, ENDPOINT_SLICES, LEASES, PODS

log = logging.getLogger(__name__)

MODEL_NAMESPACE = f"{GROUP}/model-namespace"  # label of a Lease
_REFRESH_SECONDS = 1.0  # problems age, and starts take their time

Key = tuple[str, str]


class ClusterModels:
    """What is known of the models; `routes` is replaced whenever something changes."""

    def __init__(self, client: Client, options: ClusterGatewayOptions, routes: RouteTable) -> None:
        self._client = client
        self._options = options
        self._routes = routes
        self._deployments: dict[Key, Object] = {}
        self._slices: dict[Key, Object] = {}
        self._shares: dict[Key, Object] = {}
        self._own: dict[Key, Object] = {}
        self._pods = PodProblems()
        self._synced = dict.fromkeys(("deployments", "slices"), False)
        self._waking_since: dict[ModelKey, float] = {}
        self._start_seconds: dict[ModelKey, float] = {}
        self._problem_since: dict[ModelKey, float] = {}
        self.last_used: dict[ModelKey, tuple[str, float]] = {}  # what the Lease says, and since when it says so
        self._leases: dict[str, ModelKey] = {}
        self.ready_since: dict[ModelKey, float] = {}
        self.models: dict[str, ClusterModel] = {}  # by the name that callers use
        self._rankers = RankingEngines(self.refresh)

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            for namespace in self._options.namespaces or (None,):
                group.create_task(self._follow(DEPLOYMENTS, self._deployments, namespace, synced="deployments"))
                group.create_task(self._follow(ENDPOINT_SLICES, self._slices, namespace, synced="slices"))
                group.create_task(self._follow_pods(namespace))
                if await self._client.serves(f"{GROUP}/{VERSION}"):
                    group.create_task(self._follow(GPU_SHARES, self._shares, namespace, labels=""))
            group.create_task(self._follow_leases())
            own = f"kubernetes.io/service-name={self._options.service}"
            group.create_task(self._follow(ENDPOINT_SLICES, self._own, self._options.namespace, labels=own))
            group.create_task(self._refresh_now_and_then())
            group.create_task(self._rankers.run())

    def woke(self, model: ClusterModel) -> None:
        """A request for more than nothing was sent."""
        self._waking_since.setdefault(model.key, _now())

    def refresh(self) -> None:
        """Make the routes again."""
        if not all(self._synced.values()):
            return
        read = (read_model(item) for item in self._deployments.values())
        models = [replace(model, problem=model.problem or self._pods.of(model.key)) for model in read]
        self._note_times(models)
        state = ClusterState(
            models=models,
            slices=tuple(self._slices.values()),
            devices=devices_of(self._shares.values()),
            share=self.share(),
            start_seconds=self._start_seconds,
            waking_since=self._waking_since,
            problem_since=self._problem_since,
            rankers=self._rankers.found,
            now=_now(),
        )
        routes = make_routes(state)
        now = _now()
        by_key = {model.key: model for model in models}
        self.models = {route.name: model for route, model in routes}
        for route, model in routes:
            if route.backends:
                began = self._waking_since.pop(model.key, None)
                if began is not None:
                    self._start_seconds[model.key] = now - began
                self.ready_since.setdefault(model.key, now)
            else:
                self.ready_since.pop(model.key, None)
        for known in (self._waking_since, self._start_seconds, self.ready_since, self.last_used):
            for key in [each for each in known if each not in by_key]:
                del known[key]
        self._routes.replace(route for route, _ in routes)
        self._rankers.look(route for route, _ in routes)

    def _note_times(self, models: list[ClusterModel]) -> None:
        now = _now()
        for model in models:
            if model.problem is None:
                self._problem_since.pop(model.key, None)
            else:
                self._problem_since.setdefault(model.key, now)
            if model.replicas > 0 and model.key not in self.ready_since:
                self._waking_since.setdefault(model.key, now)
            if model.replicas == 0:
                self._waking_since.pop(model.key, None)

    def share(self) -> ReplicaShare:
        """Which of the replicas that are ready this one is."""
        names = {
            str((endpoint.get("targetRef") or {}).get("name"))
            for item in self._own.values()
            for endpoint in item.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False
        } | {self._options.pod}
        ordered = sorted(names)
        return ReplicaShare(index=ordered.index(self._options.pod), count=len(ordered))

    async def _follow(
        self,
        resource: Resource,
        into: dict[Key, Object],
        namespace: str | None,
        *,
        labels: str = SERVED_MODEL,
        synced: str = "",
    ) -> None:
        async for event in self._client.watch(resource, namespace, labels=labels):
            if event.type == "SYNCED":
                if synced:
                    self._synced[synced] = True
            elif event.type == "DELETED":
                into.pop(_key(event.object), None)
            else:
                into[_key(event.object)] = event.object
            self.refresh()

    async def _follow_pods(self, namespace: str | None) -> None:
        """Routes are made again by the change of a Deployment or EndpointSlice that comes with it, or within a second."""
        async for event in self._client.watch(PODS, namespace, labels=SERVED_MODEL):
            if event.type == "DELETED":
                self._pods.remove(event.object)
            elif event.type != "SYNCED":
                self._pods.put(event.object)

    def own_service(self) -> list[Object]:
        """An owner reference to the gateway's Service: what it owns goes when the chart is uninstalled."""
        owners = (owner for item in self._own.values() for owner in item["metadata"].get("ownerReferences") or ())
        return [{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")} for owner in owners][:1]

    def abandoned_leases(self) -> list[str]:
        """Of models that are gone."""
        if not all(self._synced.values()):
            return []
        known = {model_key(item) for item in self._deployments.values()}
        return [name for name, key in self._leases.items() if key not in known]

    async def _follow_leases(self) -> None:
        """When a model was last used, as any of the gateways noted; clocks of machines are not compared."""
        async for event in self._client.watch(LEASES, self._options.namespace, labels=SERVED_MODEL):
            if event.type == "SYNCED":
                continue
            name = event.object["metadata"]["name"]
            if event.type == "DELETED":
                self._leases.pop(name, None)
                continue
            marks = event.object["metadata"]["labels"]
            key = (marks.get(MODEL_NAMESPACE, ""), marks[SERVED_MODEL])
            self._leases[name] = key
            said = str((event.object.get("spec") or {}).get("renewTime"))
            if self.last_used.get(key, ("", 0.0))[0] != said:
                self.last_used[key] = (said, _now())

    async def _refresh_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            self.refresh()


def _now() -> float:
    return time.monotonic()


def _key(item: Object) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]
