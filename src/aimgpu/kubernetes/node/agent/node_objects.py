"""The node's own objects, followed by watches: its Node, its GpuNode, and which drivers publish ResourceSlices for it."""

import asyncio
from collections.abc import Callable, Iterable

from aimgpu.errors import NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Key, Mirror, as_it_is
from aimgpu.kubernetes.api.resources import NODES, RESOURCE_SLICES
from aimgpu.kubernetes.node.agent.gpu_node import make_gpu_node
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES

_RESYNC_SECONDS = 600.0  # everything is listed again, whatever the watches reported


class NodeObjects:
    """Reads cost no request once the kind was listed; before that they are requests.

    While the API server is away, reads answer with what was seen last. `wake`: the layouts that are wanted have changed.
    `saw_slice` gets the name and the spec of each slice of the node that changed; None: it is gone.
    """

    def __init__(
        self, client: Client, node: str, *, wake: Callable[[], None], saw_slice: Callable[[str, Object | None], None]
    ) -> None:
        self._client = client
        self._name = node
        self._wake = wake
        self._saw_slice = saw_slice
        self._spec: object = None  # of the GpuNode as last read
        own, slices, often = f"metadata.name={node}", f"spec.nodeName={node}", _RESYNC_SECONDS
        self._nodes = Mirror(client, NODES, as_it_is, fields=own, resync_seconds=often)
        self._gpu_nodes = Mirror(client, GPU_NODES, as_it_is, fields=own, on_change=self._saw_gpu_node, resync_seconds=often)
        self._slices = Mirror(
            client, RESOURCE_SLICES, _spec_of, fields=slices, on_change=self._saw_any_slice, resync_seconds=often
        )

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            for mirror in (self._nodes, self._gpu_nodes, self._slices):
                group.create_task(mirror.run())

    async def node(self) -> Object:
        """Raises NotFoundInCluster where it was deleted."""
        if not self._nodes.synced.is_set():
            return await self._client.get(NODES, self._name)
        if (found := self._nodes.kept.get(("", self._name))) is None:
            raise NotFoundInCluster(f"the node {self._name} was deleted", status=404)
        return found

    async def gpu_node(self, node_uid: str | None) -> Object | None:
        """Made if it is not there; None where the cluster does not have this kind."""
        if self._gpu_nodes.absent:
            return None
        found = self._gpu_nodes.kept.get(("", self._name))
        if found is None and not self._gpu_nodes.synced.is_set():
            found = await self._client.find(GPU_NODES, self._name)
        if found is None:
            try:
                found = await make_gpu_node(self._client, self._name, node_uid)
            except NotFoundInCluster:  # the server does not know the kind
                return None
        self._spec = found.get("spec")
        return found

    async def drivers(self) -> frozenset[str]:
        """Those that publish devices of this node."""
        if self._slices.synced.is_set():
            return _drivers_of(self._slices.kept.values())
        try:
            items, _ = await self._client.list(RESOURCE_SLICES, fields=f"spec.nodeName={self._name}")
        except NotFoundInCluster:
            return frozenset()
        return _drivers_of(map(_spec_of, items))

    def wrote(self, before: Object, after: Object) -> None:
        """A write of ours changed an object that was read here."""
        for mirror in (self._nodes, self._gpu_nodes):
            if mirror.kept.get(("", self._name)) is before:
                mirror.wrote(before, after)

    def _saw_gpu_node(self, _key: Key, _before: object, now: Object | None) -> None:
        if now is not None and now.get("spec") != self._spec:
            self._wake()

    def _saw_any_slice(self, key: Key, _before: object, now: Object | None) -> None:
        self._saw_slice(key[1], now)


def _spec_of(resource_slice: Object) -> Object:
    spec: Object = resource_slice["spec"]
    return spec


def _drivers_of(specs: Iterable[Object]) -> frozenset[str]:
    return frozenset(str(spec["driver"]) for spec in specs if spec.get("devices"))
