import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from tests.gateway.scripted_engine import ScriptedEngine

from aimgpu.gateway.application import Gateway, GatewayDependencies, GatewaySettings, create_gateway
from aimgpu.gateway.auth import KeyTable
from aimgpu.gateway.http.asgi import Application
from aimgpu.gateway.http.server import CallerProtocol
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.routes import Backend, RouteTable, ServedModel
from aimgpu.qos.slo.pressure import Pressure


class TestRoutes(RouteTable):
    """A route table that a test fills by hand."""

    __test__ = False

    def serve(  # noqa: PLR0913 - what a test may choose
        self,
        name: str,
        *engines: ScriptedEngine,
        slots: int = 4,
        device: str | None = None,
        takes_priority: bool = False,
        signals: tuple[Any, ...] = (),
        instance: str | None = None,
        cache_field: str | None = None,
        names: tuple[str, ...] = (),
        **fields: Any,
    ) -> None:
        backends = tuple(
            Backend(
                instance_id=instance or f"{name}-{index}",
                url=engine.url,
                api_key="engine-key",
                slots=slots,
                device_id=device,
                takes_priority=takes_priority,
                signals=signals,
                cache_field=cache_field,
                name=names[0] if names else None,
                other_names={f"{name}:{other}": other for other in names[1:]},
            )
            for index, engine in enumerate(engines)
        )
        self.put(name, "ready", backends=backends, **fields)

    def put(self, name: str, state: str, **fields: Any) -> None:
        given = {"model": "org/m", "reason": None, "simulated": False, "backends": (), "created": 1} | fields
        others = [model for model in self.list() if model.name != name]
        self.replace([*others, ServedModel(name=name, state=state, **given)])

    def remove(self, name: str) -> None:
        self.replace([model for model in self.list() if model.name != name])


@dataclass
class KeepingObserver:
    records: list[RequestRecord] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def finished(self, record: RequestRecord) -> None:
        with self.changed:
            self.records.append(record)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[RequestRecord]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.records) >= count, timeout=30)
            return list(self.records)


@dataclass
class Served:
    port: int
    gateway: Gateway
    routes: TestRoutes
    observer: KeepingObserver
    pressures: list[tuple[str, Pressure]]
    server: uvicorn.Server

    def in_loop(self, function: Callable[[], Any]) -> Any:
        """Run something in the gateway's own loop."""

        async def run() -> Any:
            return function()

        loop: asyncio.AbstractEventLoop = self.server.servers[0].get_loop()
        return asyncio.run_coroutine_threadsafe(run(), loop).result(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


Serve = Callable[..., Served]


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as running:
        yield running


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a gateway on a real socket, as the daemon does."""
    with contextlib.ExitStack() as stack:

        def start(
            *, keys: KeyTable | None = None, settings: GatewaySettings | None = None, fallback: Application | None = None
        ) -> Served:
            routes, observer = TestRoutes(), KeepingObserver()
            pressures: list[tuple[str, Pressure]] = []
            dependencies = GatewayDependencies(
                keys=keys, observer=observer, fallback=fallback, on_pressure=lambda *change: pressures.append(change)
            )
            gateway = create_gateway(routes, settings=settings, dependencies=dependencies)
            server = stack.enter_context(_running(gateway))
            port = server.servers[0].sockets[0].getsockname()[1]
            return Served(port, gateway, routes, observer, pressures, server)

        yield start


@contextlib.contextmanager
def _running(gateway: Gateway) -> Iterator[uvicorn.Server]:
    config = uvicorn.Config(
        gateway, host="127.0.0.1", port=0, loop="uvloop", http=CallerProtocol, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)  # uvicorn tells nobody that it has started
    assert server.started
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
