"""All extended resources of a node: kept registered, kept up to date, and their grants given back when their pods are gone."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from aimgpu.domain import Instance
from aimgpu.kubernetes.cdi import ContainerEdits, SpecFolder
from aimgpu.kubernetes.device_plugin.plugin import ResourcePlugin
from aimgpu.kubernetes.device_plugin.pod_replicas import TENANT_PREFIX, HeldReplica, match_grants, read_users
from aimgpu.kubernetes.device_plugin.resources import NodeResource, PluginReplica
from aimgpu.kubernetes.device_plugin.sharing_config import SharingConfig
from aimgpu.kubernetes.kai.granted import RESERVATIONS
from aimgpu.kubernetes.node.grants import NodeGrants, NodeSlot, PodTenant

log = logging.getLogger(__name__)

_UNSEEN_ROUNDS = 3  # a container that is being made is not listed yet


@dataclass(slots=True, kw_only=True)
class DevicePlugins:
    kubelet: Path
    config: SharingConfig
    grants: NodeGrants
    specs: SpecFolder
    turn: threading.RLock  # of the node's grants
    held: tuple[HeldReplica, ...] | None = None  # by pods, as last seen; None: the kubelet has not answered yet
    _running: dict[str, ResourcePlugin] = field(default_factory=dict)
    _unseen: dict[str, int] = field(default_factory=dict)

    async def update(self, resources: Sequence[NodeResource]) -> None:
        """Start, change and stop plugins so that these are advertised; register again after a restart of the kubelet."""
        wanted = {resource.name: resource for resource in resources}
        for name in [name for name in self._running if name not in wanted]:
            await self._running.pop(name).stop()
        for name, resource in wanted.items():
            running = self._running.get(name)
            if running is not None and not running.lost:
                await running.update(resource, self.config)
                continue
            if running is not None:
                log.info("kubelet.restarted", extra={"data": {"resource": name}})
                await running.stop()
            await self._start(resource)

    async def stop(self) -> None:
        for plugin in self._running.values():
            await plugin.stop()
        self._running.clear()

    async def collect(self) -> None:
        """Give back what replicas hold whose containers are gone: the kubelet does not say when, so it is asked."""
        held = {instance.id for instance in self._tenants()}
        if not held:
            self.held = ()
            return
        listed = await read_users(self.kubelet)
        if listed is None:
            return
        in_use = {name for user in listed for name in user.devices}
        # A pod that holds a GPU for KAI-Scheduler uses nothing of it: the pods that KAI lets share it are the tenants.
        reservations = (user.devices for user in listed if user.namespace == RESERVATIONS)
        reserved = {f"{TENANT_PREFIX}{name}" for names in reservations for name in names}
        for tenant in held & reserved:
            await asyncio.to_thread(self._give_back, tenant)
        for tenant in held - reserved:
            unseen = 0 if tenant.removeprefix(TENANT_PREFIX) in in_use else self._unseen.get(tenant, 0) + 1
            self._unseen[tenant] = unseen
            if unseen >= _UNSEEN_ROUNDS:
                await asyncio.to_thread(self._give_back, tenant)
                self._unseen.pop(tenant, None)
        self.held = match_grants(listed, self._tenants(), self.held or ())

    def give(self, resource: str, replicas: Sequence[PluginReplica]) -> tuple[ContainerEdits, tuple[str, ...]]:
        """The kubelet says that these replicas are free; whatever a former container held of them is over."""
        with self.turn:
            for replica in replicas:
                self._give_back(f"{TENANT_PREFIX}{replica.id}")
            return self._give(resource, replicas)

    def _give(self, resource: str, replicas: Sequence[PluginReplica]) -> tuple[ContainerEdits, tuple[str, ...]]:
        tenant = PodTenant(
            id=f"{TENANT_PREFIX}{replicas[0].id}",
            owner=resource,
            slots=tuple(
                NodeSlot(
                    device_id=replica.device_id,
                    partition_id=replica.partition_id,
                    memory_bytes=replica.memory_bytes,
                    compute_ppm=replica.compute_ppm,
                )
                for replica in replicas
            ),
            isolation=self.config.isolation,
        )
        self._unseen[tenant.id] = -_UNSEEN_ROUNDS  # it takes a while until its container is listed
        (instance,) = self.grants.charge([tenant])
        try:
            edits = self.grants.enforce(instance).edits
        except BaseException:
            self._give_back(tenant.id)
            raise
        if not self.config.cdi:
            return edits, ()
        self.specs.write(tenant.id, {"": edits})
        return edits, (self.specs.device_id(tenant.id, ""),)

    def _tenants(self) -> list[Instance]:
        return [instance for instance in self.grants.held() if instance.id.startswith(TENANT_PREFIX)]

    def _give_back(self, tenant: str) -> None:
        with self.turn:
            self.grants.release(tenant)
            self.specs.remove(tenant)

    async def _start(self, resource: NodeResource) -> None:
        plugin = ResourcePlugin(resource, folder=self.kubelet / "device-plugins", config=self.config, give=self.give)
        self._running[resource.name] = plugin
        try:
            await plugin.start()
        except (grpc.aio.AioRpcError, OSError) as error:
            # The kubelet is not there or is just ending: its folder is looked at again in the next round.
            log.warning("plugin.not_registered", extra={"data": {"resource": resource.name, "reason": str(error)[:300]}})
            await plugin.stop()
