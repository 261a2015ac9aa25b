"""All extended resources of a node: kept registered, kept up to date, and their grants given back when their pods are gone."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from aimgpu.domain import Device, Instance
from aimgpu.errors import AimGpuError, Conflict
from aimgpu.kubernetes.node.cdi import ContainerEdits, SpecFolder
from aimgpu.kubernetes.node.device_plugin.plugin import ResourcePlugin
from aimgpu.kubernetes.node.device_plugin.pod_replicas import TENANT_PREFIX, HeldReplica, ReplicaUser, match_grants, read_users
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, PluginReplica, mark_what_cannot_be_given
from aimgpu.kubernetes.node.grants import NodeGrants, NodeSlot, PodTenant
from aimgpu.kubernetes.vocabulary.names import KAI_RESERVATIONS
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig

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
    _in_use: frozenset[tuple[str, str]] = frozenset()  # resources and replicas, as the kubelet lists them
    _forgotten: dict[str, HeldReplica] = field(default_factory=dict)  # by tenant: had before the kubelet started again
    _checked: bool = False  # that every replica which the kubelet lists is in the ledger, once after the start

    async def update(self, resources: Sequence[NodeResource], devices: Sequence[Device]) -> None:
        """Start, change and stop plugins so that these are advertised; register again after a restart of the kubelet."""
        held = self.grants.held()
        own = {(one.deployment, one.id.removeprefix(TENANT_PREFIX)) for one in held if one.id.startswith(TENANT_PREFIX)}
        grants = [grant for one in held for grant in one.grants]
        fitting = mark_what_cannot_be_given(resources, devices, grants, own | self._in_use)
        wanted = {resource.name: resource for resource in fitting}
        for name in [name for name in self._running if name not in wanted]:
            await self._running.pop(name).stop()
        for name, resource in wanted.items():
            running = self._running.get(name)
            if running is not None and not running.lost:
                await running.update(resource, self.config)
                continue
            if running is not None:
                log.info("kubelet.restarted", extra={"data": {"resource": name}})
                self._forgotten |= {one.grant.instance_id: one for one in self.held or ()}
                await running.stop()
            await self._start(resource)

    async def stop(self) -> None:
        for plugin in self._running.values():
            await plugin.stop()
        self._running.clear()

    async def collect(self) -> None:
        """Give back what replicas hold whose containers are gone: the kubelet does not say when, so it is asked."""
        held = {instance.id for instance in self._tenants()}
        unchecked = bool(self._running) and not self._checked
        if not held and not unchecked:
            self.held = ()
            return
        listed = await read_users(self.kubelet)
        if listed is None:
            return
        if unchecked:
            await asyncio.to_thread(self._adopt, listed)
            self._checked = True
            held = {instance.id for instance in self._tenants()}
        in_use = {name for user in listed for name in user.devices}
        self._in_use = frozenset((user.resource, name) for user in listed for name in user.devices)
        # A pod that holds a GPU for KAI-Scheduler uses nothing of it: the pods that KAI lets share it are the tenants.
        reservations = (user.devices for user in listed if user.namespace == KAI_RESERVATIONS)
        reserved = {f"{TENANT_PREFIX}{name}" for names in reservations for name in names}
        for tenant in held & reserved:
            await asyncio.to_thread(self._give_back, tenant)
        runs_on = self._still_running(listed)
        for tenant in held - reserved:
            seen = tenant.removeprefix(TENANT_PREFIX) in in_use or tenant in runs_on
            unseen = 0 if seen else self._unseen.get(tenant, 0) + 1
            self._unseen[tenant] = unseen
            if unseen >= _UNSEEN_ROUNDS:
                await asyncio.to_thread(self._give_back, tenant)
                self._unseen.pop(tenant, None)
        self.held = match_grants(listed, self._tenants(), self.held or ())

    def _still_running(self, listed: Sequence[ReplicaUser]) -> set[str]:
        """Tenants whose pods a kubelet that lost its checkpoint lists without devices: they run on with what they have."""
        idle = {(user.namespace, user.pod) for user in listed if not user.resource}
        return {tenant for tenant, one in self._forgotten.items() if (one.namespace, one.pod) in idle}

    def give(self, resource: str, replicas: Sequence[PluginReplica]) -> tuple[ContainerEdits, tuple[str, ...]]:
        """The kubelet says that these replicas are free; whatever a former container held of them is over."""
        with self.turn:
            for replica in replicas:
                self._give_back(f"{TENANT_PREFIX}{replica.id}")
            return self._give(resource, replicas)

    def _tenant(self, resource: str, replicas: Sequence[PluginReplica]) -> PodTenant:
        return PodTenant(
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

    def _give(self, resource: str, replicas: Sequence[PluginReplica]) -> tuple[ContainerEdits, tuple[str, ...]]:
        tenant = self._tenant(resource, replicas)
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

    def _adopt(self, listed: Sequence[ReplicaUser]) -> None:
        """Record what running containers hold and a ledger that was lost does not know; nothing of theirs is changed."""
        with self.turn:
            known = {instance.id for instance in self._tenants()}
            for user in listed:
                plugin = self._running.get(user.resource)
                ids = {f"{TENANT_PREFIX}{name}" for name in user.devices}
                if plugin is None or user.namespace == KAI_RESERVATIONS or ids & known:
                    continue
                replicas = [replica for replica in plugin.resource.replicas if replica.id in user.devices]
                # Its CDI file, if it has one, is named after the first that it was given.
                replicas.sort(key=lambda replica: not self.specs.exists(f"{TENANT_PREFIX}{replica.id}"))
                facts = {"pod": f"{user.namespace}/{user.pod}", "resource": user.resource}
                try:
                    if len(replicas) < len(user.devices):
                        raise Conflict(f"{user.resource} has other replicas now")
                    (instance,) = self.grants.charge([self._tenant(user.resource, replicas)])
                    self.grants.enforce(instance)
                except AimGpuError as error:
                    log.warning("replica.not_adopted", extra={"data": {**facts, "reason": error.message}})
                else:
                    log.warning("replica.adopted", extra={"data": facts})

    def _tenants(self) -> list[Instance]:
        return [instance for instance in self.grants.held() if instance.id.startswith(TENANT_PREFIX)]

    def _give_back(self, tenant: str) -> None:
        with self.turn:
            self._forgotten.pop(tenant, None)
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
