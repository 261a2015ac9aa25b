"""Follows the objects that the page shows, and the gateways' scores."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aimgpu.control.observation import Observation
from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Mirror, as_it_is
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, PODS
from aimgpu.kubernetes.models.page.cluster_activity import ClusterActivity
from aimgpu.kubernetes.models.page.layout_plans import describe_plans
from aimgpu.kubernetes.models.page.measured import NodeMeasures, read_measured
from aimgpu.kubernetes.models.page.observed import ClusterObjects, name_models, observe
from aimgpu.kubernetes.models.page.placement_reasons import explain_pods
from aimgpu.kubernetes.models.serving.cluster_view import ClusterView
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, GPU_SHARES, PARTITION_PLANS
from aimgpu.kubernetes.vocabulary.model_labels import SERVED_MODEL
from aimgpu.web.sources import Json

log = logging.getLogger(__name__)

_SCORES_SECONDS = 2.0
_AGENTS_SECONDS = 5.0
_AGENTS = "app.kubernetes.io/component=agent"
_GATEWAY = "aim-gpu-sharing-gateway"  # its Service
_NO_CRDS = "The cluster has no GpuNode and GpuShare objects: install the chart to see GPUs and shares."


class ClusterFollower:
    """Written on the event loop; read from any thread."""

    def __init__(self, client: Client, namespace: str | None = None) -> None:
        """`namespace`: whose models are shown; None: all."""
        self._client = client
        self._namespace = namespace
        self._view = ClusterView(client, namespace or "default")
        places = () if namespace is None else (namespace,)
        self._nodes = Mirror(client, GPU_NODES, as_it_is, on_change=self._saw)
        self._plans = Mirror(client, PARTITION_PLANS, as_it_is, on_change=self._saw)
        self._shares = Mirror(client, GPU_SHARES, as_it_is, namespaces=places, on_change=self._saw)
        self._models = Mirror(client, DEPLOYMENTS, as_it_is, namespaces=places, labels=SERVED_MODEL, on_change=self._saw)
        self._pods = Mirror(client, PODS, as_it_is, namespaces=places, labels=SERVED_MODEL, on_change=self._saw)
        self._scores: Mapping[str, Any] = {}
        self._measured = NodeMeasures()
        self._notes: dict[str, str] = {}
        self.activity = ClusterActivity()
        self.endpoint: str | None = None  # of the gateways, as pods call it
        self._changed = threading.Condition()
        self._version = 0

    @property
    def synced(self) -> bool:
        """Whether the models and their pods were listed once."""
        return self._models.synced.is_set() and self._pods.synced.is_set()

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            for mirror in (self._models, self._pods, self._nodes, self._plans, self._shares):
                group.create_task(mirror.run())
                group.create_task(self._saw_list(mirror))
            group.create_task(self._follow_scores())
            group.create_task(self._follow_agents())

    def look(self, *, max_age_seconds: float = 0.0, layouts_age_seconds: float = 0.0) -> Observation:  # noqa: ARG002 - a protocol
        """What the objects show now."""
        return self._observe(self._objects())

    def explain(self, name: str) -> list[Json]:
        """Why each pod of this model is where it is, and what the other GPUs lack."""
        objects = self._objects()
        return explain_pods(objects, self._observe(objects), name)

    def _objects(self) -> ClusterObjects:
        return ClusterObjects(
            nodes=tuple(self._nodes.kept.values()),
            shares=tuple(self._shares.kept.values()),
            models=tuple(self._models.kept.values()),
            pods=tuple(self._pods.kept.values()),
            measured=self._measured,
            one_namespace=self._namespace is not None,
        )

    def _observe(self, objects: ClusterObjects) -> Observation:
        return observe(objects, cluster=self._namespace or "all namespaces", taken_at=time.monotonic())

    def models(self) -> list[tuple[str, Object]]:
        """The Deployments, by the names that the page shows."""
        return list(name_models(tuple(self._models.kept.values())))

    def nodes(self) -> tuple[Object, ...]:
        """The GpuNodes."""
        return tuple(self._nodes.kept.values())

    def pods(self) -> tuple[Object, ...]:
        """Those that serve models."""
        return tuple(self._pods.kept.values())

    def read_scores(self) -> Mapping[str, Any]:
        """What the gateways measured last."""
        return self._scores

    def read_notes(self) -> tuple[str, ...]:
        """What is missing, for people."""
        crds = (_NO_CRDS,) if self._nodes.absent else ()
        return (*crds, *self._notes.values(), *describe_plans(tuple(self._plans.kept.values())))

    def wait_for_change(self, seconds: float) -> bool:
        """Wait until an object changes or the time is up; called in a thread."""
        with self._changed:
            seen = self._version
            return self._changed.wait_for(lambda: self._version != seen, seconds)

    async def _saw_list(self, mirror: Mirror[Object]) -> None:
        await mirror.synced.wait()
        self._saw()

    def _saw(self, *_: object) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def _follow_scores(self) -> None:
        while True:
            try:
                gateways = await self._view.gateways()
                self._scores = await self._view.read_scores(gateways)
                await self._read_activity(gateways)
                self.endpoint = f"http://{_GATEWAY}.{gateways[0]['metadata']['namespace']}.svc"
                self._notes.pop("gateway", None)
            except ClusterFailed as error:
                self._scores = {}
                self._notes["gateway"] = f"Requests and promises are not shown: {error.message}."
            except (KeyError, TypeError, ValueError) as error:  # of another version, as in an upgrade
                log.warning("gateway.unreadable", extra={"data": {"error": repr(error)}})
                self._scores = {}
                self._notes["gateway"] = "Requests and promises are not shown: a gateway of another version runs here."
            await asyncio.sleep(_SCORES_SECONDS)

    async def _follow_agents(self) -> None:
        """What cannot be read is not shown: a page without the right to do so shows all but what is measured, and why."""
        while True:
            texts, problem = await self._read_agents()
            self._measured = read_measured(texts)
            if problem is None:
                self._notes.pop("agents", None)
            else:
                self._notes["agents"] = f"Measured memory is not shown: {problem}."
            await asyncio.sleep(_AGENTS_SECONDS)

    async def _read_agents(self) -> tuple[list[str], str | None]:
        """The metrics of those that answer, and the reason where agents run and none does."""
        try:
            agents, _ = await self._client.list(PODS, labels=_AGENTS)
        except ClusterFailed as error:
            return [], error.message
        texts, problem = [], "the node agents have no metrics port (agent.metricsPort of the chart)"
        for path in (path for pod in agents for path in _metrics_paths(pod)):
            try:
                texts.append("\n".join([line async for line in self._client.read_lines(path)]))
            except ClusterFailed as error:  # it is just starting or ending, or we have no right to
                problem = error.message
        return texts, problem if agents and not texts else None

    async def _read_activity(self, gateways: Sequence[Object]) -> None:
        reports = {}
        for pod in gateways:
            name = str(pod["metadata"]["name"])
            with contextlib.suppress(ClusterFailed):  # it ends or starts; the next look finds out
                reports[name] = await self._view.read_activity(pod, self.activity.read_up_to(name))
        self.activity.take(reports)


def _metrics_paths(pod: Object) -> Iterator[str]:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == "metrics":
                place = f"{pod['metadata']['name']}:{port['containerPort']}"
                yield PODS.path(pod["metadata"]["namespace"], place, "proxy/metrics")
