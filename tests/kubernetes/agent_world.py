"""The node agent in this process: simulated GPUs, an API server in memory, and this test as its kubelet, by real gRPC."""

import asyncio
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from tests.kubernetes.memory_api import MemoryApi, memory_api

from aimgpu.domain import Grant
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.api.client import Client, Object, Resource
from aimgpu.kubernetes.api.resources import NODES, RESOURCE_CLAIMS, RESOURCE_SLICES
from aimgpu.kubernetes.node.agent.agent import Agent
from aimgpu.kubernetes.node.agent.options import Options
from aimgpu.kubernetes.node.kubelet_api import dra_health_v1alpha1_pb2 as health_pb
from aimgpu.kubernetes.node.kubelet_api import dra_v1_pb2 as dra_pb
from aimgpu.kubernetes.node.kubelet_api import registration_v1_pb2 as registration_pb
from aimgpu.kubernetes.vocabulary.names import DRIVER
from aimgpu.ledger import read_grants

NODE = "node1"
GPU = "sim-mi300x-0"
GIB = 1 << 30
_PLUGIN = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_PATIENCE_SECONDS = float(
    os.environ.get("AIMGPU_TEST_PATIENCE", "300")
)  # for a machine with other work; nothing here takes a second


@dataclass(slots=True)
class AgentWorld:
    """One node. `start` and `stop` the agent as often as needed: its folders and the API server stay."""

    folder: Path
    api: MemoryApi
    options: dict[str, Any]
    agent: Agent | None = None
    _client: Client | None = None
    _task: "asyncio.Task[None] | None" = None
    _channels: list[grpc.aio.Channel] = field(default_factory=list)

    @property
    def kubelet(self) -> Path:
        return self.folder / "kubelet"

    def settings(self) -> Options:
        folders: dict[str, Any] = {name: self.folder / name for name in ("kubelet", "cdi", "state", "run", "sysfs", "dev")}
        default: dict[str, Any] = {"simulated": (("MI300X", 1),), "metrics_port": 0, "interval_seconds": 0.02, "node": NODE}
        return Options(**(folders | default | self.options))

    async def start(self, **options: Any) -> None:
        """Until it serves the kubelet, or raises what it ended with."""
        self.options |= options
        self._client = self.api.client()
        self.agent = Agent(self.settings(), self._client)
        self._task = asyncio.create_task(self.agent.run())
        socket = self.kubelet / "plugins_registry" / f"{DRIVER}-reg.sock"
        agent = self.agent
        if self.settings().dra:
            await self.until(socket.exists, "the driver's sockets")
        else:
            await self.until(lambda: agent.survey is not None, "the first look at the GPUs")

    async def stop(self) -> None:
        for channel in self._channels:
            await channel.close()
        self._channels.clear()
        if self._task is not None:
            self._task.cancel()
            ended, _ = await asyncio.wait([self._task], timeout=_PATIENCE_SECONDS)
            assert ended, "the agent goes on although it was cancelled"
            self._task = None
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def restart(self, **options: Any) -> None:
        await self.stop()
        await self.start(**options)

    async def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not done():
            if self._task is not None and self._task.done():
                await self._task
                raise AssertionError(f"the agent ended before {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not yet: {what}")
            await asyncio.sleep(0.005)

    async def rounds(self, count: int = 2) -> None:
        """Let it look at its GPUs so many times more."""
        assert self.agent is not None
        agent, before = self.agent, self.agent.rounds
        await self.until(lambda: agent.rounds > before + count, f"{count} rounds")

    async def watching(self, *resources: Resource) -> None:
        """Until it follows its own objects of these kinds."""
        await self.until(lambda: all(self.api.watched(each) for each in resources), "the watches")

    # What can be seen of it.

    def slices(self) -> list[Object]:
        return self.api.all(RESOURCE_SLICES)

    def devices(self) -> dict[str, Object]:
        return {device["name"]: device for found in self.slices() for device in found["spec"].get("devices") or ()}

    def grants(self) -> tuple[Grant, ...]:
        return tuple(read_grants(self.folder / "state" / "ledger.db"))

    def cdi(self) -> dict[str, dict[str, list[str]]]:
        """Devices of all CDI files, with their edits."""
        found = [json.loads(path.read_text()) for path in sorted((self.folder / "cdi").glob("*.json"))]
        return {f"{spec['kind']}={device['name']}": device["containerEdits"] for spec in found for device in spec["devices"]}

    def set_gpus(self, **state: Any) -> None:
        """`faults`, `foreign`, `devices` of the simulated GPUs."""
        path = self.folder / "state" / "simulated-gpus.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        fresh = path.with_suffix(".fresh")
        fresh.write_text(json.dumps({**known, **state}))
        fresh.rename(path)

    def set_layout(self, layout: str, gpu: str = GPU) -> None:
        path = self.folder / "state" / "simulated-gpus.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        SimulatedHardware(list(self.settings().simulated), path).apply_layout(gpu, layout)

    # What the kubelet does.

    async def call(self, socket: str, method: str, request: Message, answer: type[Message]) -> Any:
        ask: Any = self._channel(socket).unary_unary(
            f"/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return await ask(request, timeout=_PATIENCE_SECONDS)

    async def prepare(self, *claims: Object) -> dict[str, Any]:
        """Answers by the names of the claims."""
        request = dra_pb.NodePrepareResourcesRequest(claims=[_reference(claim) for claim in claims])
        method = f"{_PLUGIN}/NodePrepareResources"
        answer = await self.call(f"plugins/{DRIVER}/dra.sock", method, request, dra_pb.NodePrepareResourcesResponse)
        return {claim["metadata"]["name"]: answer.claims[claim["metadata"]["uid"]] for claim in claims}

    async def unprepare(self, *claims: Object) -> dict[str, str]:
        """Errors by the names of the claims."""
        request = dra_pb.NodeUnprepareResourcesRequest(claims=[_reference(claim) for claim in claims])
        method = f"{_PLUGIN}/NodeUnprepareResources"
        answer = await self.call(f"plugins/{DRIVER}/dra.sock", method, request, dra_pb.NodeUnprepareResourcesResponse)
        return {claim["metadata"]["name"]: answer.claims[claim["metadata"]["uid"]].error for claim in claims}

    async def registration(self) -> Any:
        method = "pluginregistration.Registration/GetInfo"
        socket = f"plugins_registry/{DRIVER}-reg.sock"
        return await self.call(socket, method, registration_pb.InfoRequest(), registration_pb.PluginInfo)

    async def report_registration(self, *, error: str = "") -> None:
        method = "pluginregistration.Registration/NotifyRegistrationStatus"
        status = registration_pb.RegistrationStatus(plugin_registered=not error, error=error)
        await self.call(f"plugins_registry/{DRIVER}-reg.sock", method, status, registration_pb.RegistrationStatusResponse)

    def watch_health(self) -> Any:
        """Messages as the kubelet gets them."""
        ask = self._channel(f"plugins/{DRIVER}/dra.sock").unary_stream(
            "/v1alpha1.DRAResourceHealth/NodeWatchResources",
            request_serializer=health_pb.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=health_pb.NodeWatchResourcesResponse.FromString,
        )
        return ask(health_pb.NodeWatchResourcesRequest())

    def _channel(self, socket: str) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(
            f"unix://{self.kubelet / socket}",
            options=[("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)],
        )
        self._channels.append(channel)
        return channel


@asynccontextmanager
async def agent_world(**options: Any) -> AsyncIterator[AgentWorld]:
    """A node whose agent runs, unless `running` is false. Its folder has a short path: those of sockets are limited."""
    running = options.pop("running", True)
    folder = Path(tempfile.mkdtemp(prefix="agent-"))
    try:
        async with memory_api() as api:
            api.add(NODES, {"metadata": {"name": NODE, "labels": {}}, "status": {"allocatable": {}}})
            world = AgentWorld(folder, api, options)
            try:
                if running:
                    await world.start()
                yield world
            finally:
                await world.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def add_claim(
    world: AgentWorld, name: str, *results: Object, config: list[Object] | None = None, pods: tuple[str, ...] = ("pod-1",)
) -> Object:
    """A claim as kube-scheduler leaves it: allocated and reserved."""
    devices = {"results": list(results), "config": config or []}
    reserved = [{"resource": "pods", "name": pod, "uid": f"{pod}-uid"} for pod in pods]
    body = {"metadata": {"name": name}, "status": {"allocation": {"devices": devices}, "reservedFor": reserved}}
    return world.api.add(RESOURCE_CLAIMS, body, "default")


def result(device: str = f"{GPU}-shared", gib: int | None = None, **more: Any) -> Object:
    found: Object = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device}
    if gib is not None:
        found |= {"consumedCapacity": {"memory": f"{gib}Gi"}, "shareID": f"share-{gib}"}
    return found | more


def parameters(*requests: str, source: str = "FromClaim", **values: str) -> Object:
    body = {"apiVersion": "gpu.aim.amd.com/v1alpha1", "kind": "GpuClaimParameters", **values}
    return {"source": source, "requests": list(requests), "opaque": {"driver": DRIVER, "parameters": body}}


def claim_devices(world: AgentWorld, name: str) -> list[Object]:
    """What the driver wrote into the status of a claim."""
    found: list[Object] = world.api.get(RESOURCE_CLAIMS, name, "default")["status"].get("devices") or []
    return found


def log_data(records: Iterable[logging.LogRecord], event: str) -> list[dict[str, Any]]:
    """The data of each time that this event was logged."""
    return [getattr(record, "data", {}) for record in records if record.getMessage() == event]


def _reference(claim: Object) -> dra_pb.Claim:
    metadata = claim["metadata"]
    return dra_pb.Claim(namespace=metadata["namespace"], uid=metadata["uid"], name=metadata["name"])
