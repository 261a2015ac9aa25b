"""Our gateway as a program for the benchmark, with everything on: a key, the queue, SLO windows, metrics."""

import sys

import uvicorn

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.application import create_gateway
from aimgpu.gateway.auth import Caller, HashedKeys, hash_key
from aimgpu.gateway.http.server import CallerProtocol
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.routes import Backend, ServedModel
from aimgpu.monitoring.requests import RequestCollector

KEY = "aimgpu-benchmark-key-that-is-long-enough"


class OneModel:
    def __init__(self, upstream_port: int) -> None:
        backend = Backend(
            instance_id="m-0", url=f"http://127.0.0.1:{upstream_port}", api_key="engine", slots=512, device_id="gpu0"
        )
        self._model = ServedModel(
            name="m",
            model="m",
            state="ready",
            reason=None,
            simulated=True,
            backends=(backend,),
            created=1,
            priority=Priority.HIGH,
            objective=ServiceObjective(ttft_p95_ms=500, tpot_p95_ms=50, latency_p95_ms=2000, availability_ppm=995_000),
        )

    def find(self, name: str) -> ServedModel | None:
        return self._model if name == "m" else None

    def list(self) -> tuple[ServedModel, ...]:
        return (self._model,)


class Metrics:
    """What the daemon's exporter keeps of each request."""

    def __init__(self) -> None:
        self._collector = RequestCollector()

    def finished(self, record: RequestRecord) -> None:
        self._collector.observe(record.model, record.status, record.seconds, record.first_byte_seconds, record.tpot_seconds)


def main() -> None:
    keys = HashedKeys({hash_key(KEY): Caller(name="bench", requests_per_second=1e9, concurrency=100_000)})
    gateway = create_gateway(OneModel(int(sys.argv[1])), keys=keys, observer=Metrics())
    uvicorn.run(
        gateway,
        port=int(sys.argv[2]),
        loop="uvloop",
        http=CallerProtocol,
        access_log=False,
        log_level="error",
        server_header=False,
        proxy_headers=False,
        ws="none",
    )


if __name__ == "__main__":
    main()
