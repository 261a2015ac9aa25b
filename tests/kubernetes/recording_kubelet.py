"""The kubelet's side of device plugins: records which resources a plugin registers and which devices it lists."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from aimgpu.kubernetes.node.kubelet_api import device_plugin_v1beta1_pb2 as pb

LIST_SECONDS = 300.0


@dataclass(slots=True)
class RecordingKubelet:
    """`folder` is the kubelet's folder of device plugins, as this process sees it."""

    folder: Path
    registered: dict[str, tuple[str, ...]] = field(default_factory=dict)  # resources with the ids of their devices
    endpoints: dict[str, str] = field(default_factory=dict)
    numa_nodes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by device

    def register(self, request: pb.RegisterRequest, _context: Any) -> pb.Empty:
        self.endpoints[request.resource_name] = request.endpoint
        call = self._channel(request.resource_name).unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        first = next(iter(call(pb.Empty(), timeout=LIST_SECONDS)))
        self.numa_nodes |= {device.ID: tuple(node.ID for node in device.topology.nodes) for device in first.devices}
        self.registered[request.resource_name] = tuple(sorted(device.ID for device in first.devices))
        return pb.Empty()

    def allocate(self, resource: str, ids: list[str]) -> str:
        """The refusal, or nothing where the plugin allows it."""
        call = self._channel(resource).unary_unary(
            "/v1beta1.DevicePlugin/Allocate",
            request_serializer=pb.AllocateRequest.SerializeToString,
            response_deserializer=pb.AllocateResponse.FromString,
        )
        try:
            call(pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]), timeout=LIST_SECONDS)
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    def _channel(self, resource: str) -> grpc.Channel:
        options = [("grpc.default_authority", "localhost")]
        return grpc.insecure_channel(f"unix://{self.folder / self.endpoints[resource]}", options=options)


@contextmanager
def recording_kubelet(folder: Path) -> Iterator[RecordingKubelet]:
    kubelet = RecordingKubelet(folder)
    register = grpc.unary_unary_rpc_method_handler(
        kubelet.register,
        request_deserializer=pb.RegisterRequest.FromString,
        response_serializer=pb.Empty.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": register})])
    server.add_insecure_port(f"unix://{folder / 'kubelet.sock'}")
    server.start()
    try:
        yield kubelet
    finally:
        server.stop(None)
