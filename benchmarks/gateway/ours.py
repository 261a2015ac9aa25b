"""Our gateway as a program for the benchmark, with everything on: a key, the queue, SLO windows, metrics."""

import sys

import uvicorn

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.application import create_gateway
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.gateway.http.server import CallerProtocol
from aimgpu.gateway.routes import Backend, RouteTable, ServedModel
from aimgpu.keyfile import hash_key

KEY = "aimgpu-benchmark-key-that-is-long-enough"


def make_routes(upstream_port: int) -> RouteTable:
    backend = Backend(instance_id="m-0", url=f"http://127.0.0.1:{upstream_port}", api_key="engine", slots=512, device_id="gpu0")
    model = ServedModel(
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
    return RouteTable([model])


def main() -> None:
    keys = KeyTable({hash_key(KEY): Caller(name="bench", requests_per_second=1e9, concurrency=100_000)})
    gateway = create_gateway(make_routes(int(sys.argv[1])), keys=keys)
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
