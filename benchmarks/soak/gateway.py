"""The gateway of the soak as a program: three models, two of them with two engines; `/soak` tells what it holds."""

import sys
from pathlib import Path

import uvicorn

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.application import create_gateway
from aimgpu.gateway.http.asgi import Receive, Scope, Send, send_json
from aimgpu.gateway.http.server import CallerProtocol
from aimgpu.gateway.routes import Backend, RouteTable, ServedModel

PRIORITIES = {"chat": Priority.HIGH, "code": Priority.MEDIUM, "batch": Priority.LOW}


def make_routes(ports: list[int]) -> RouteTable:
    """Engines stay listed when they are killed: that the gateway must find out itself."""
    owners = ["chat", "chat", "code", "code", "batch"]
    return RouteTable(
        ServedModel(
            name=name,
            model=name,
            state="ready",
            reason=None,
            simulated=True,
            created=1,
            priority=priority,
            objective=ServiceObjective(ttft_p95_ms=250, availability_ppm=950_000),
            backends=tuple(
                Backend(instance_id=f"{name}-{port}", url=f"http://127.0.0.1:{port}", api_key="", slots=4, device_id="gpu0")
                for owner, port in zip(owners, ports, strict=True)
                if owner == name
            ),
        )
        for name, priority in PRIORITIES.items()
    )


def main() -> None:
    routes = make_routes([int(port) for port in sys.argv[2:]])
    gateway = create_gateway(routes)

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != "/soak":
            await gateway(scope, receive, send)
            return
        slots = gateway.slots
        held = {b.instance_id: slots.in_flight(b.instance_id) for model in routes.list() for b in model.backends}
        queued = {model.name: slots.queued(model.name) for model in routes.list()}
        recalls = sum(slots.dispatcher.recalls.counts.values())
        await send_json(send, {"in_flight": held, "queued": queued, "recalls": recalls, "rss_bytes": _read_rss()})

    uvicorn.run(
        front, port=int(sys.argv[1]), loop="uvloop", http=CallerProtocol, access_log=False, log_level="error", ws="none"
    )


def _read_rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
