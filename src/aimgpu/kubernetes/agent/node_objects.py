"""The node's own objects, followed by watches: its Node, its GpuNode, and which drivers publish ResourceSlices for it."""

import asyncio
import logging
from collections.abc import Callable

from aimgpu.errors import NotFoundInCluster
from aimgpu.kubernetes.agent.gpu_node import make_gpu_node
from aimgpu.kubernetes.api_client import Client, Object, Resource, WatchEvent
from aimgpu.kubernetes.custom_resources import GPU_NODES
from aimgpu.kubernetes.standard_resources import NODES, RESOURCE_SLICES

log = logging.getLogger(__name__)

_RESYNC_SECONDS = 600.0  # everything is listed again, whatever the watches reported
_Saw = Callable[[WatchEvent], None]


class NodeObjects:
    """Reads cost no request once the kind was listed; before that, and where the server lacks the kind, they are requests.

    While the API server is away, reads answer with what was seen last. `wake`: the layouts that are wanted have changed.
    `saw_slice` gets every change of the node's slices.
    """

    def __init__(self, client: Client, node: str, *, wake: Callable[[], None], saw_slice: _Saw) -> None:
        self._client = client
        self._name = node
        self._wake = wake
        self._saw_slice = saw_slice
        self._nodes: dict[str, Object] = {}
        self._gpu_nodes: dict[str, Object] = {}
        self._drivers: dict[str, str] = {}  # of slices that have devices
        self._listed: set[Resource] = set()
        self._served = {kind: asyncio.Event() for kind in (NODES, GPU_NODES, RESOURCE_SLICES)}
        self._served[NODES].set()
        self._spec: object = None  # of the GpuNode as last read

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(NODES, f"metadata.name={self._name}", self._saw_node))
            group.create_task(self._follow(GPU_NODES, f"metadata.name={self._name}", self._saw_gpu_node))
            group.create_task(self._follow(RESOURCE_SLICES, self._own_slices, self._saw_any_slice))

    async def node(self) -> Object:
        """Raises NotFoundInCluster where it was deleted."""
        if NODES not in self._listed:
            return await self._client.get(NODES, self._name)
        if self._name not in self._nodes:
            raise NotFoundInCluster(f"the node {self._name} was deleted", status=404)
        return self._nodes[self._name]

    async def gpu_node(self, node_uid: str | None) -> Object | None:
        """Made if it is not there; None where the cluster does not have this kind."""
        if GPU_NODES in self._listed:
            found = self._gpu_nodes.get(self._name)
        elif await self._serves(GPU_NODES):
            found = await self._client.find(GPU_NODES, self._name)
        else:
            return None
        if found is None:
            try:
                found = await make_gpu_node(self._client, self._name, node_uid)
            except NotFoundInCluster:  # the kind was removed
                return None
        self._spec = found.get("spec")
        return found

    async def drivers(self) -> frozenset[str]:
        """Those that publish devices of this node."""
        if RESOURCE_SLICES in self._listed:
            return frozenset(self._drivers.values())
        if not await self._serves(RESOURCE_SLICES):
            return frozenset()
        items, _ = await self._client.list(RESOURCE_SLICES, fields=self._own_slices)
        return frozenset(item["spec"]["driver"] for item in items if item["spec"].get("devices"))

    def follow_slices(self) -> None:
        """The server is known to have them."""
        self._served[RESOURCE_SLICES].set()

    def wrote(self, before: Object, after: Object) -> None:
        """A write of ours changed an object that was read here. Where something newer was seen meanwhile, that stays."""
        for known in (self._nodes, self._gpu_nodes):
            if known.get(self._name) is before:
                known[self._name] = after

    async def _serves(self, kind: Resource) -> bool:
        served = await self._client.serves(f"{kind.group}/{kind.version}")
        if served:
            self._served[kind].set()
        return served

    async def _follow(self, resource: Resource, fields: str, saw: _Saw) -> None:
        await self._served[resource].wait()
        async for event in self._client.watch(resource, fields=fields, resync_seconds=_RESYNC_SECONDS):
            if event.type == "SYNCED":
                if resource not in self._listed:
                    log.info("objects.followed", extra={"data": {"resource": resource.plural}})
                self._listed.add(resource)
            else:
                event.object["metadata"].pop("managedFields", None)  # half of an object, and never looked at
                saw(event)

    def _saw_node(self, event: WatchEvent) -> None:
        _keep(self._nodes, event)

    def _saw_gpu_node(self, event: WatchEvent) -> None:
        _keep(self._gpu_nodes, event)
        if event.type != "DELETED" and event.object.get("spec") != self._spec:
            self._wake()

    def _saw_any_slice(self, event: WatchEvent) -> None:
        name = event.object["metadata"]["name"]
        self._drivers.pop(name, None)
        if event.type != "DELETED" and event.object["spec"].get("devices"):
            self._drivers[name] = event.object["spec"]["driver"]
        self._saw_slice(event)

    @property
    def _own_slices(self) -> str:
        return f"spec.nodeName={self._name}"


def _keep(known: dict[str, Object], event: WatchEvent) -> None:
    name = event.object["metadata"]["name"]
    if event.type == "DELETED":
        known.pop(name, None)
    else:
        known[name] = event.object
