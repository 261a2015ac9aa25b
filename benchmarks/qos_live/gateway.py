"""Our gateway in front of real engines, with the queue of a policy; in the process of the benchmark."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import uvicorn

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.application import GatewaySettings, create_gateway
from aimgpu.gateway.http.server import CallerProtocol
from aimgpu.gateway.routes import Backend, RouteTable, ServedModel
from aimgpu.qos.queueing.policy import QueuePolicy

DEVICE_ID = "device"


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests for a model go: its engine, or the gateway before all of them."""

    url: str
    key: str


def make_routes(places: Mapping[str, Place], slots: int, promise_seconds: float | None) -> RouteTable:
    """All on one device. `promise_seconds` None: nothing is promised, so nothing presses on low work."""
    objective = ServiceObjective(ttft_p95_ms=round(promise_seconds * 1000)) if promise_seconds is not None else None
    return RouteTable(
        ServedModel(
            name=name,
            model=name,
            state="ready",
            reason=None,
            simulated=True,
            backends=(Backend(instance_id=name, url=place.url, api_key=place.key, slots=slots, device_id=DEVICE_ID),),
            created=1,
            priority=Priority.MEDIUM,
            objective=objective,
        )
        for name, place in places.items()
    )


class LiveGateway:
    def __init__(self, queue: QueuePolicy, places: Mapping[str, Place], *, slots: int, promise_seconds: float | None) -> None:
        gateway = create_gateway(make_routes(places, slots, promise_seconds), settings=GatewaySettings(queue=queue))
        config = uvicorn.Config(
            gateway, port=0, http=CallerProtocol, log_level="error", lifespan="on", timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:  # noqa: ASYNC110  # uvicorn offers a flag and no event
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        assert self._task is not None  # noqa: S101  # it was entered
        await self._task
