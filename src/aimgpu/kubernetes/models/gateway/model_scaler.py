"""Scales models that requests wait for from zero, and idle ones back to it. Any replica may do either: both are idempotent."""

import asyncio
import datetime as dt
import hashlib
import logging
import time

from aimgpu.errors import AimGpuError, NotFoundInCluster
from aimgpu.gateway.application import Gateway
from aimgpu.gateway.routes import RouteTable
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, LEASES
from aimgpu.kubernetes.models.gateway.cluster_models import MODEL_NAMESPACE, ClusterModels
from aimgpu.kubernetes.models.gateway.served_models import ClusterModel, ModelKey
from aimgpu.kubernetes.vocabulary.model_labels import MANAGED, SERVED_MODEL

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_LEAST_NOTE_SECONDS, _LONGEST_NOTE_SECONDS = 1.0, 15.0
_NOTES_PER_KEEP = 4
_AGAIN_SECONDS = 5.0


def note_interval(keep_seconds: float) -> float:
    """How often use is noted: often enough that a model in use is never taken for idle, seldom enough to cost nothing."""
    return min(max(keep_seconds / _NOTES_PER_KEEP, _LEAST_NOTE_SECONDS), _LONGEST_NOTE_SECONDS)


class ModelScaler:
    """Looks five times a second at what the gateway's callers wait for and what was used."""

    def __init__(self, client: Client, models: ClusterModels, gateway: Gateway, routes: RouteTable, namespace: str) -> None:
        """`namespace`: of the gateway, where the Leases are."""
        self._namespace = namespace
        self._client = client
        self._models = models
        self._gateway = gateway
        self._routes = routes
        self._now = time.monotonic
        self._noted: dict[ModelKey, float] = {}
        self._tried: dict[tuple[ModelKey, int], float] = {}

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._forget_removed()
            for name, model in list(self._models.models.items()):
                if model.keep_seconds is None:
                    continue
                try:
                    await self._look_at(name, model, model.keep_seconds)
                except (AimGpuError, OSError) as error:
                    log.warning("scale.failed", extra={"data": {"model": name, "reason": str(error)}})
            await asyncio.sleep(_LOOK_SECONDS)

    async def _forget_removed(self) -> None:
        for name in self._models.abandoned_leases():
            try:
                await self._client.delete(LEASES, name, self._namespace)
            except (AimGpuError, OSError) as error:
                log.warning("lease.kept", extra={"data": {"lease": name, "reason": str(error)}})

    async def _look_at(self, name: str, model: ClusterModel, keep_seconds: float) -> None:
        slots = self._gateway.slots
        waits = slots.queued(name) > 0 or any(wanted.model == name for wanted in slots.wake_requests.read())
        if model.replicas == 0:
            if waits:
                await self._scale(model, model.wanted_replicas)
            return
        used = self._last_used_here(name)
        if waits or used is not None:
            await self._note(model, used if used is not None else self._now(), note_interval(keep_seconds))
        idle_since = self._idle_since(model)
        if not waits and idle_since is not None and self._now() - idle_since > keep_seconds + note_interval(keep_seconds):
            await self._scale(model, 0)

    def _last_used_here(self, name: str) -> float | None:
        """By the steady clock; None: not since this gateway started."""
        route = self._routes.find(name)
        if route is not None and any(self._gateway.slots.in_flight(each.instance_id) for each in route.backends):
            return self._now()
        activity = self._gateway.slo_monitor.read_activity().get(name)
        return activity.last_request if activity is not None else None

    def _idle_since(self, model: ClusterModel) -> float | None:
        """The last use that any gateway noted, but never before it was ready here; None: it is not ready."""
        ready = self._models.ready_since.get(model.key)
        if ready is None:
            return None
        return max(ready, self._models.last_used.get(model.key, ("", 0.0))[1], self._noted.get(model.key, 0.0))

    async def _note(self, model: ClusterModel, used: float, interval: float) -> None:
        if used <= self._noted.get(model.key, 0.0) or self._now() - self._noted.get(model.key, 0.0) < interval:
            return
        self._noted[model.key] = self._now()
        namespace, label = model.key
        name = f"aim-gpu-model-{hashlib.sha256('/'.join(model.key).encode()).hexdigest()[:16]}"
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": name,
                "labels": {SERVED_MODEL: label, MODEL_NAMESPACE: namespace, **MANAGED},
                "ownerReferences": self._models.own_service(),
            },
            "spec": {"renewTime": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")},
        }
        await self._client.patch(LEASES, name, body, self._namespace, kind="apply", manager="aimgpu-gateway")

    async def _scale(self, model: ClusterModel, replicas: int) -> None:
        """Again only after a while: the watch brings the change in a moment, and another gateway may have done it."""
        last = self._tried.get((model.key, replicas))
        if last is not None and self._now() - last < _AGAIN_SECONDS:
            return
        self._tried[model.key, replicas] = self._now()
        body = {"spec": {"replicas": replicas}}
        try:
            await self._client.patch(DEPLOYMENTS, model.object_name, body, model.key[0], subresource="scale")
        except NotFoundInCluster:
            return
        data = {"model": model.name, "namespace": model.key[0], "replicas": replicas}
        log.info("model.scaled", extra={"data": data})
