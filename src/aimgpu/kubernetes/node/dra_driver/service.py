"""The gRPC side of the driver: registration with the kubelet, prepare and unprepare, health of devices."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import RESOURCE_CLAIMS
from aimgpu.kubernetes.node.dra_driver.checkpoint import PreparedDevice
from aimgpu.kubernetes.node.dra_driver.claims import DraClaim, read_claim
from aimgpu.kubernetes.node.dra_driver.preparation import Preparation
from aimgpu.kubernetes.node.grpc_server import Method, SocketServer
from aimgpu.kubernetes.node.kubelet_api import dra_health_v1alpha1_pb2 as health_pb
from aimgpu.kubernetes.node.kubelet_api import dra_v1_pb2 as dra_pb
from aimgpu.kubernetes.node.kubelet_api import registration_v1_pb2 as registration_pb
from aimgpu.kubernetes.vocabulary.names import DRIVER

log = logging.getLogger(__name__)

_Context = Any  # grpc.aio.ServicerContext, which cannot be given its parameters at run time
Health = dict[str, str | None]  # devices with why they are unhealthy; None: healthy


class DraService:
    """What the kubelet calls. `refused` gets a claim that cannot be prepared, why, and its text; `changed` is called after."""

    def __init__(  # noqa: PLR0913 - what it is made of
        self,
        *,
        client: Client,
        preparation: Preparation,
        node: str,
        kubelet: Path,
        complete: Callable[[Object, DraClaim], Awaitable[DraClaim]] | None = None,
        refused: Callable[[Object, Exception, str], Awaitable[None]] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._preparation = preparation
        self._node = node
        self._complete = complete
        self._refused = refused
        self._changed = changed
        self._health: Health = {}
        self._health_changed = asyncio.Condition()
        self.registered = asyncio.Event()
        endpoint = kubelet / "plugins" / DRIVER / "dra.sock"
        self._servers = (
            SocketServer(endpoint, self._plugin_services()),
            SocketServer(
                kubelet / "plugins_registry" / f"{DRIVER}-reg.sock",
                {
                    "pluginregistration.Registration": {
                        "GetInfo": Method(request=registration_pb.InfoRequest, unary=self._info(endpoint)),
                        "NotifyRegistrationStatus": Method(
                            request=registration_pb.RegistrationStatus, unary=self._registration_status
                        ),
                    }
                },
            ),
        )

    async def start(self) -> None:
        for server in self._servers:
            await server.start()

    async def stop(self) -> None:
        for server in reversed(self._servers):
            await server.stop()

    async def report_health(self, health: Health) -> None:
        """Inform the kubelet, which shows it in the status of pods."""
        async with self._health_changed:
            if health != self._health:
                self._health = health
                self._health_changed.notify_all()

    def _plugin_services(self) -> dict[str, dict[str, Method]]:
        return {
            "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin": {
                "NodePrepareResources": Method(request=dra_pb.NodePrepareResourcesRequest, unary=self._prepare_all),
                "NodeUnprepareResources": Method(request=dra_pb.NodeUnprepareResourcesRequest, unary=self._unprepare_all),
            },
            "v1alpha1.DRAResourceHealth": {
                "NodeWatchResources": Method(request=health_pb.NodeWatchResourcesRequest, stream=self._watch_health),
            },
        }

    def _info(self, endpoint: Path) -> Callable[[Any, _Context], Awaitable[registration_pb.PluginInfo]]:
        async def answer(_request: registration_pb.InfoRequest, _context: _Context) -> registration_pb.PluginInfo:
            return registration_pb.PluginInfo(
                type="DRAPlugin", name=DRIVER, endpoint=str(endpoint), supported_versions=["v1.DRAPlugin"]
            )

        return answer

    async def _registration_status(
        self, status: registration_pb.RegistrationStatus, _context: _Context
    ) -> registration_pb.RegistrationStatusResponse:
        if status.plugin_registered:
            log.info("kubelet.registered")
            self.registered.set()
        else:
            log.error("kubelet.refused", extra={"data": {"reason": status.error}})
        return registration_pb.RegistrationStatusResponse()

    async def _prepare_all(
        self, request: dra_pb.NodePrepareResourcesRequest, _context: _Context
    ) -> dra_pb.NodePrepareResourcesResponse:
        answer = dra_pb.NodePrepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].CopyFrom(await self._prepare(claim))
        self._changed()
        return answer

    async def _prepare(self, asked: dra_pb.Claim) -> dra_pb.NodePrepareResourceResponse:
        label = f"{asked.namespace}/{asked.name}"
        found: Object | None = None
        try:
            found = await self._client.get(RESOURCE_CLAIMS, asked.name, asked.namespace)
            claim = read_claim(found, asked.uid, self._node)
            if self._complete is not None:
                claim = await self._complete(found, claim)
            devices = await asyncio.to_thread(self._preparation.prepare, claim)
        except (AimGpuError, OSError) as error:
            text = _reason(error)
            log.warning("claim.not_prepared", extra={"data": {"claim": label, "reason": text}})
            if self._refused is not None and found is not None:
                await self._refused(found, error, text)
            return dra_pb.NodePrepareResourceResponse(error=text)
        return dra_pb.NodePrepareResourceResponse(devices=[_device(device) for device in devices])

    async def _unprepare_all(
        self, request: dra_pb.NodeUnprepareResourcesRequest, _context: _Context
    ) -> dra_pb.NodeUnprepareResourcesResponse:
        answer = dra_pb.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            try:
                await asyncio.to_thread(self._preparation.unprepare, claim.uid)
                error = ""
            except (AimGpuError, OSError) as failure:
                error = _reason(failure)
                log.warning("claim.not_unprepared", extra={"data": {"claim": claim.name, "reason": error}})
            answer.claims[claim.uid].CopyFrom(dra_pb.NodeUnprepareResourceResponse(error=error))
        self._changed()
        return answer

    async def _watch_health(
        self, _request: health_pb.NodeWatchResourcesRequest, _context: _Context
    ) -> AsyncIterator[health_pb.NodeWatchResourcesResponse]:
        sent: Health | None = None
        while True:
            async with self._health_changed:
                await self._health_changed.wait_for(lambda: self._health != sent)  # noqa: B023 - awaited before it changes
                sent = dict(self._health)
            yield self._health_message(sent)

    def _health_message(self, health: Health) -> health_pb.NodeWatchResourcesResponse:
        now = int(time.time())
        return health_pb.NodeWatchResourcesResponse(
            devices=[
                health_pb.DeviceHealth(
                    device=health_pb.DeviceIdentifier(pool_name=self._node, device_name=name),
                    health=health_pb.UNHEALTHY if reason else health_pb.HEALTHY,
                    last_updated_time=now,
                    message=(reason or "")[:1000],
                )
                for name, reason in health.items()
            ]
        )


def _reason(error: AimGpuError | OSError) -> str:
    """For the events of the pod. The node's own files may fail: a full disk, a folder that is not one."""
    if isinstance(error, OSError):
        return f"the node cannot write its files: {error}"
    return f"{error.message}. {error.hint}" if error.hint else error.message


def _device(device: PreparedDevice) -> dra_pb.Device:
    return dra_pb.Device(
        request_names=device.requests,
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
        share_id=device.share_id,
    )
