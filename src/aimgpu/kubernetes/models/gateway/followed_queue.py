"""Keeps the gateway's queue within the bounds of the cluster's ConfigMap, divided among the replicas."""

import asyncio
import logging
from dataclasses import replace

from aimgpu.domain import ByClass, Priority, QueueSettings
from aimgpu.gateway.application import Gateway
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Key, Mirror, as_it_is
from aimgpu.kubernetes.api.resources import CONFIG_MAPS
from aimgpu.kubernetes.models.gateway.cluster_models import ClusterModels
from aimgpu.kubernetes.models.gateway.served_models import ReplicaShare
from aimgpu.kubernetes.models.serving.queue_bounds import QUEUE_MAP, read_bounds
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
        self._map = Mirror(
            client, CONFIG_MAPS, as_it_is, namespaces=(namespace,), fields=f"metadata.name={QUEUE_MAP}", on_change=self._saw
        )
        self._gateway = gateway
        self._models = models
        self._wanted = QueueSettings()
        self._in_force = QueueSettings()

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._map.run())
            group.create_task(self._follow_replicas())

    def _saw(self, _key: Key, _before: Object | None, now: Object | None) -> None:
        try:
            self._wanted = QueueSettings() if now is None else read_bounds(now)
        except (ValueError, ArithmeticError, RecursionError) as error:
            log.error("queue.unreadable", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it
            return
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
