"""Keeps the gateway's queue within the bounds of the cluster's ConfigMap, divided among the replicas."""

import asyncio
import logging
from dataclasses import replace

from aimgpu.domain import ByClass, Priority, QueueSettings
from aimgpu.gateway.application import Gateway
from aimgpu.kubernetes.api_client import Client
from aimgpu.kubernetes.gateway.cluster_models import ClusterModels
from aimgpu.kubernetes.gateway.served_models import ReplicaShare
from aimgpu.kubernetes.serving.queue_bounds import QUEUE_MAP, read_bounds
from aimgpu.kubernetes.standard_resources import CONFIG_MAPS
from aimgpu.qos.queueing.policy import policy_for

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


def own_part(settings: QueueSettings, share: ReplicaShare) -> QueueSettings:
    """What this replica may do of it: all together keep to the whole, and each may have one request of a kind."""

    def part(count: int | None) -> int | None:
        return None if count is None else max(1, share.of(count, 0))

    most = ByClass(**{priority.value: part(settings.most_queued.of(priority)) for priority in Priority})
    return replace(settings, per_gpu=part(settings.per_gpu), most_queued=most)


class FollowedQueue:
    """A ConfigMap that cannot be read leaves the bounds as they were; without one the defaults hold."""

    def __init__(self, client: Client, namespace: str, gateway: Gateway, models: ClusterModels) -> None:
        self._client = client
        self._namespace = namespace
        self._gateway = gateway
        self._models = models
        self._wanted = QueueSettings()
        self._in_force = QueueSettings()

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._follow_replicas())

    async def _follow(self) -> None:
        async for event in self._client.watch(CONFIG_MAPS, self._namespace, fields=f"metadata.name={QUEUE_MAP}"):
            if event.type == "SYNCED":
                continue
            try:
                self._wanted = QueueSettings() if event.type == "DELETED" else read_bounds(event.object)
            except ValueError as error:
                log.error("queue.unreadable", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it
                continue
            self._apply()

    async def _follow_replicas(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._apply()

    def _apply(self) -> None:
        """What waits keeps the bound that it was given."""
        settings = own_part(self._wanted, self._models.share())
        if settings != self._in_force:
            self._in_force = settings
            self._gateway.slots.change_policy(policy_for(settings))
            log.info("queue.changed", extra={"data": {"per_gpu": settings.per_gpu}})
