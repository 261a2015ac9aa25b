"""Our gateway in front of one real engine, with the queue of a policy; in the process of the benchmark."""

import asyncio
from typing import Self

import uvicorn

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.application import GatewaySettings, create_gateway
from aimgpu.gateway.directory import Backend, ServedModel
from aimgpu.gateway.server import CallerProtocol
from aimgpu.qos.policy import QueuePolicy


class OneEngine:
    def __init__(self, backend: Backend, promise_seconds: float | None) -> None:
        """`promise_seconds` None: nothing is promised, so nothing presses on low work."""
        self._model = ServedModel(
            name="m",
            model="m",
            state="ready",
            reason=None,
            simulated=True,
            backends=(backend,),
            created=1,
            priority=Priority.MEDIUM,
            objective=ServiceObjective(ttft_p95_ms=round(promise_seconds * 1000)) if promise_seconds is not None else None,
        )

    def find(self, name: str) -> ServedModel | None:
        return self._model if name == "m" else None

    def list(self) -> tuple[ServedModel, ...]:
        return (self._model,)


class LiveGateway:
    def __init__(
        self, queue: QueuePolicy, engine_url: str, engine_key: str, *, slots: int, promise_seconds: float | None
    ) -> None:
        backend = Backend(instance_id="m-0", url=engine_url, api_key=engine_key, slots=slots, device_id="cpu")
        gateway = create_gateway(OneEngine(backend, promise_seconds), settings=GatewaySettings(queue=queue))
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
