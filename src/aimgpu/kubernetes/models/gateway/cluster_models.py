"""Follows the objects of the cluster and keeps the route table equal to them."""

import asyncio
import logging
import time
from dataclasses import replace

from aimgpu.gateway.routes import RouteTable
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.foreign_objects import leaving_out
from aimgpu.kubernetes.api.mirror import Key, Mirror, as_it_is
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, ENDPOINT_SLICES, LEASES, PODS, SECRETS
from aimgpu.kubernetes.models.gateway.model_pods import ModelPods
from aimgpu.kubernetes.models.gateway.options import ClusterGatewayOptions
from aimgpu.kubernetes.models.gateway.ranking_engines import RankingEngines
from aimgpu.kubernetes.models.gateway.served_models import (
    ClusterModel,
    ClusterState,
    ModelKey,
    ReplicaShare,
    devices_of,
    make_routes,
    read_model,
)
from aimgpu.kubernetes.models.serving.engine_keys import ENGINE_KEYS, read_engine_keys
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_SHARES
from aimgpu.kubernetes.vocabulary.model_labels import SERVED_MODEL
from aimgpu.kubernetes.vocabulary.names import GROUP

log = logging.getLogger(__name__)

MODEL_NAMESPACE = f"{GROUP}/model-namespace"  # label of a Lease
_REFRESH_SECONDS = 1.0  # problems age, and starts take their time
_NO_ROOM_SECONDS = 3.0  # a pod without a node for this long has no room; before, a share may just be given back


class ClusterModels:
    """What is known of the models; `routes` is replaced whenever something changes."""

    def __init__(self, client: Client, options: ClusterGatewayOptions, routes: RouteTable) -> None:
        self._options = options
        self._routes = routes
        places, own = options.namespaces, f"kubernetes.io/service-name={options.service}"
        self._read = Mirror(client, DEPLOYMENTS, read_model, namespaces=places, labels=SERVED_MODEL, on_change=self._saw)
        self._slices = Mirror(client, ENDPOINT_SLICES, as_it_is, namespaces=places, labels=SERVED_MODEL, on_change=self._saw)
        keys = f"metadata.name={ENGINE_KEYS}"
        self._engine_keys = Mirror(client, SECRETS, read_engine_keys, namespaces=places, fields=keys, on_change=self._saw)
        self._shares = Mirror(client, GPU_SHARES, as_it_is, namespaces=places, on_change=self._saw)
        self._own = Mirror(client, ENDPOINT_SLICES, as_it_is, namespaces=(options.namespace,), labels=own, on_change=self._saw)
        self._leases = Mirror(
            client, LEASES, _read_lease, namespaces=(options.namespace,), labels=SERVED_MODEL, on_change=self._saw_lease
        )
        # Routes are made again by the change of a Deployment or EndpointSlice that comes with a pod's, or within a second.
        self._pod_mirror = Mirror(client, PODS, as_it_is, namespaces=places, labels=SERVED_MODEL, on_change=self._saw_pod)
        self._pods = ModelPods()
        self._starting_since: dict[ModelKey, float] = {}
        self._no_room_since: dict[ModelKey, float] = {}
        self._problem_since: dict[ModelKey, float] = {}
        self.last_used: dict[ModelKey, tuple[str, float]] = {}  # what the Lease says, and since when it says so
        self.ready_since: dict[ModelKey, float] = {}
        self.models: dict[str, ClusterModel] = {}  # by the name that callers use
        self._rankers = RankingEngines(self.refresh)
        self._synced = False

    async def run(self) -> None:
        """For ever."""
        needed = (self._read, self._slices, self._engine_keys)
        others = (self._shares, self._own, self._leases, self._pod_mirror)
        async with asyncio.TaskGroup() as group:
            for mirror in (*needed, *others):
                group.create_task(mirror.run())
            group.create_task(self._rankers.run())
            for mirror in needed:
                await mirror.synced.wait()
            self._synced = True
            self.refresh()
            group.create_task(self._refresh_now_and_then())

    def refresh(self) -> None:
        """Make the routes again; where that fails, what was known stays."""
        if self._synced:
            with leaving_out({"kind": "Routes", "metadata": {}}):
                self._refresh()

    def _refresh(self) -> None:
        models = [self._with_pods(model) for model in self._read.kept.values()]
        keys = {(place, model): key for (place, _), found in self._engine_keys.kept.items() for model, key in found.items()}
        state = ClusterState(
            models=models,
            slices=tuple(self._slices.kept.values()),
            devices=devices_of(self._shares.kept.values()),
            share=self.share(),
            start_seconds=self._pods.start_seconds,
            starting_since=self._starting_since,
            problem_since=self._problem_since,
            short_names=self._options.short_names,
            rankers=self._rankers.found,
            engine_keys=keys,
            now=_now(),
        )
        routes = make_routes(state)
        now = _now()
        by_key = {model.key: model for model in models}
        self.models = {route.name: model for route, model in routes}
        for route, model in routes:
            if route.backends:
                self.ready_since.setdefault(model.key, now)
            else:
                self.ready_since.pop(model.key, None)
        times = (self._starting_since, self._no_room_since, self._problem_since, self.ready_since)
        for known in (*times, self._pods.start_seconds, self.last_used):
            for key in [each for each in known if each not in by_key]:
                del known[key]
        self._routes.replace(route for route, _ in routes)
        self._rankers.look(route for route, _ in routes)

    def _with_pods(self, model: ClusterModel) -> ClusterModel:
        """What its pods report, and since when; one that sleeps has none, and what kept it from starting last is over."""
        key, no_room = model.key, self._pods.no_room_of(model.key)
        problem = None if model.sleeps else model.problem or self._pods.problem_of(key)
        _note(self._problem_since, key, holds=problem is not None)
        _note(self._starting_since, key, holds=self._pods.is_starting(key))
        _note(self._no_room_since, key, holds=no_room is not None)
        lasts = _now() - self._no_room_since.get(key, _now()) >= _NO_ROOM_SECONDS
        return replace(model, problem=problem, no_room=no_room if lasts else None)

    def share(self) -> ReplicaShare:
        """Which of the replicas that are ready this one is."""
        names = {
            str((endpoint.get("targetRef") or {}).get("name"))
            for item in self._own.kept.values()
            for endpoint in item.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False
        } | {self._options.pod}
        ordered = sorted(names)
        return ReplicaShare(index=ordered.index(self._options.pod), count=len(ordered))

    def _saw(self, *_: object) -> None:
        self.refresh()

    def _saw_pod(self, _key: Key, before: Object | None, now: Object | None) -> None:
        (self._pods.remove if now is None else self._pods.put)(now or before or {})

    def own_service(self) -> list[Object]:
        """An owner reference to the gateway's Service: what it owns goes when the chart is uninstalled."""
        owners = (owner for item in self._own.kept.values() for owner in item["metadata"].get("ownerReferences") or ())
        return [{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")} for owner in owners][:1]

    def abandoned_leases(self) -> list[str]:
        """Of models that are gone."""
        if not self._synced:
            return []
        known = {model.key for model in self._read.kept.values()}
        return [name for (_, name), (key, _) in self._leases.kept.items() if key not in known]

    def _saw_lease(self, _key: Key, _before: object, now: tuple[ModelKey, str] | None) -> None:
        """When a model was last used, as any of the gateways noted; clocks of machines are not compared."""
        if now is not None and self.last_used.get(now[0], ("", 0.0))[0] != now[1]:
            self.last_used[now[0]] = (now[1], _now())

    async def _refresh_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            self.refresh()


def _note(since: dict[ModelKey, float], key: ModelKey, *, holds: bool) -> None:
    if holds:
        since.setdefault(key, _now())
    else:
        since.pop(key, None)


def _now() -> float:
    return time.monotonic()


def _read_lease(lease: Object) -> tuple[ModelKey, str]:
    """Of which model it is, and what it says."""
    marks = lease["metadata"]["labels"]
    return (marks.get(MODEL_NAMESPACE, ""), marks[SERVED_MODEL]), str((lease.get("spec") or {}).get("renewTime"))
