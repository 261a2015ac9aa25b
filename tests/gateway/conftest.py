import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import uvicorn
from tests.gateway.scripted_engine import ScriptedEngine

from aimgpu.gateway.application import Gateway, GatewaySettings, create_gateway
from aimgpu.gateway.directory import Backend, ServedModel
from aimgpu.gateway.keys import Keys
from aimgpu.gateway.records import RequestRecord


@dataclass
class MapDirectory:
    """A directory that a test fills by hand."""

    models: dict[str, ServedModel] = field(default_factory=dict)

    def find(self, name: str) -> ServedModel | None:
        return self.models.get(name)

    def list(self) -> tuple[ServedModel, ...]:
        return tuple(self.models.values())

    def serve(self, name: str, *engines: ScriptedEngine, slots: int = 4, simulated: bool = False) -> None:
        backends = tuple(
            Backend(instance_id=f"{name}-{index}", url=engine.url, api_key="engine-key", slots=slots)
            for index, engine in enumerate(engines)
        )
        self.put(name, "ready", backends=backends, simulated=simulated)

    def put(
        self,
        name: str,
        state: str,
        *,
        reason: str | None = None,
        backends: tuple[Backend, ...] = (),
        simulated: bool = False,
    ) -> None:
        self.models[name] = ServedModel(
            name=name, model="org/m", state=state, reason=reason, simulated=simulated, backends=backends, created=1
        )


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
    directory: MapDirectory
    observer: KeepingObserver

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

        def start(*, keys: Keys | None = None, settings: GatewaySettings | None = None) -> Served:
            directory, observer = MapDirectory(), KeepingObserver()
            gateway = create_gateway(directory, keys=keys, observer=observer, settings=settings)
            port = stack.enter_context(_running(gateway))
            return Served(port, gateway, directory, observer)

        yield start


@contextlib.contextmanager
def _running(gateway: Gateway) -> Iterator[int]:
    config = uvicorn.Config(
        gateway, host="127.0.0.1", port=0, loop="uvloop", http="httptools", log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)  # uvicorn tells nobody that it has started
    assert server.started
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
