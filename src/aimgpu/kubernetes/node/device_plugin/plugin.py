"""One extended resource, served to the kubelet."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.node.cdi import ContainerEdits
from aimgpu.kubernetes.node.device_plugin.allocation import check_request, choose_replicas
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, PluginReplica
from aimgpu.kubernetes.node.grpc_server import Method, SocketServer
from aimgpu.kubernetes.node.kubelet_api import device_plugin_v1beta1_pb2 as pb
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig

log = logging.getLogger(__name__)

VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
_REGISTER_SECONDS = 10.0
# Makes the grant true and returns what the container needs, and the names of CDI devices where those are used.
Give = Callable[[str, Sequence[PluginReplica]], tuple[ContainerEdits, tuple[str, ...]]]


class ResourcePlugin:
    def __init__(self, resource: NodeResource, *, folder: Path, config: SharingConfig, give: Give) -> None:
        self.resource = resource
        self._folder = folder
        self._config = config
        self._give = give
        self._changed = asyncio.Condition()
        self._socket = folder / f"aimgpu-{resource.name.replace('/', '_')}.sock"
        self._server = SocketServer(self._socket, {"v1beta1.DevicePlugin": self._methods()})

    @property
    def lost(self) -> bool:
        """A kubelet that starts removes every socket of the folder: every plugin must register again."""
        return not self._socket.exists()

    async def start(self) -> None:
        """Serve first, then register: the kubelet calls back before it answers."""
        await self._server.start()
        options = [("grpc.default_authority", "localhost")]
        async with grpc.aio.insecure_channel(f"unix://{self._folder / KUBELET_SOCKET}", options=options) as channel:
            register = channel.unary_unary(
                "/v1beta1.Registration/Register",
                request_serializer=pb.RegisterRequest.SerializeToString,
                response_deserializer=pb.Empty.FromString,
            )
            request = pb.RegisterRequest(
                version=VERSION, endpoint=self._socket.name, resource_name=self.resource.name, options=_options()
            )
            await register(request, timeout=_REGISTER_SECONDS)
        log.info("plugin.registered", extra={"data": {"resource": self.resource.name, "devices": len(self.resource.replicas)}})

    async def stop(self) -> None:
        await self._server.stop()

    async def update(self, resource: NodeResource, config: SharingConfig) -> None:
        """Other replicas, or other health: the kubelet is informed at once."""
        self._config = config
        async with self._changed:
            if resource != self.resource:
                self.resource = resource
                self._changed.notify_all()

    def _methods(self) -> dict[str, Method]:
        return {
            "GetDevicePluginOptions": Method(request=pb.Empty, unary=self._get_options),
            "ListAndWatch": Method(request=pb.Empty, stream=self._list),
            "GetPreferredAllocation": Method(request=pb.PreferredAllocationRequest, unary=self._prefer),
            "Allocate": Method(request=pb.AllocateRequest, unary=self._allocate),
            "PreStartContainer": Method(request=pb.PreStartContainerRequest, unary=self._pre_start),
        }

    async def _get_options(self, _request: pb.Empty, _context: Any) -> pb.DevicePluginOptions:  # noqa: ANN401 - gRPC's
        return _options()

    async def _pre_start(self, _request: pb.PreStartContainerRequest, _context: Any) -> pb.PreStartContainerResponse:  # noqa: ANN401
        return pb.PreStartContainerResponse()

    async def _list(self, _request: pb.Empty, _context: Any) -> AsyncIterator[pb.ListAndWatchResponse]:  # noqa: ANN401
        sent: NodeResource | None = None
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.resource != sent)  # noqa: B023 - awaited before it changes
                sent = self.resource
            yield pb.ListAndWatchResponse(devices=[_device(replica) for replica in sent.replicas])

    async def _prefer(self, request: pb.PreferredAllocationRequest, _context: Any) -> pb.PreferredAllocationResponse:  # noqa: ANN401
        return pb.PreferredAllocationResponse(
            container_responses=[
                pb.ContainerPreferredAllocationResponse(
                    deviceIDs=choose_replicas(
                        self.resource,
                        one.available_deviceIDs,
                        one.must_include_deviceIDs,
                        one.allocation_size,
                        self._config,
                    )
                )
                for one in request.container_requests
            ]
        )

    async def _allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: ANN401
        answer = pb.AllocateResponse()
        for one in request.container_requests:
            try:
                replicas = check_request(self.resource, list(one.devices_ids), self._config)
                edits, cdi = await asyncio.to_thread(self._give, self.resource.name, replicas)
            except AimGpuError as error:
                log.warning("plugin.refused", extra={"data": {"resource": self.resource.name, "reason": error.message}})
                text = f"{error.message}. {error.hint}" if error.hint else error.message
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
                raise
            answer.container_responses.append(_container(edits, cdi))
        return answer


def _options() -> pb.DevicePluginOptions:
    return pb.DevicePluginOptions(get_preferred_allocation_available=True)


def _device(replica: PluginReplica) -> pb.Device:
    topology = None if replica.numa_node is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=replica.numa_node)])
    return pb.Device(ID=replica.id, health="Unhealthy" if replica.unhealthy else "Healthy", topology=topology)


def _container(edits: ContainerEdits, cdi: tuple[str, ...]) -> pb.ContainerAllocateResponse:
    if cdi:
        return pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=name) for name in cdi])
    return pb.ContainerAllocateResponse(
        envs=dict(edits.environment),
        mounts=[
            pb.Mount(container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only)
            for mount in edits.mounts
        ],
        devices=[pb.DeviceSpec(container_path=path, host_path=path, permissions="rw") for path in edits.device_nodes],
    )
