"""The stand-alone exporter behind `aimgpu exporter`: GPUs and a ledger on disk, without a daemon.

`python -m aimgpu.daemon.exporter --home ...`. It serves what a daemon would, except what only a gateway knows: requests, queues
and promises.
"""

import argparse
import importlib.metadata
import logging
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from aimgpu import wiring
from aimgpu.control.instance.run_folder import read_api_key
from aimgpu.control.observation import MachineObserver, ObservedLedger
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.domain import InstanceState
from aimgpu.engines.ownership import EngineOwner
from aimgpu.errors import AimGpuError
from aimgpu.home import Home
from aimgpu.ledger.read_only import read_deployments, read_instances
from aimgpu.logs import configure_logging
from aimgpu.monitoring.engine_metrics import EngineMetrics, EngineTarget
from aimgpu.monitoring.exporter import CONTENT_TYPE, Exporter, MetricSources

log = logging.getLogger(__name__)


def make_standalone(home: Home, gpus: GpuChoice) -> Exporter:
    """Raises HardwareUnavailable where there is a GPU that cannot be used."""
    hardware = wiring.choose_hardware(gpus, home)
    simulated = [device.product for device in hardware.read_devices() if device.simulated]
    if simulated:
        sys.stderr.write(f"SIMULATED GPU ({len(simulated)} x {simulated[0]}): nothing here is on real hardware.\n")
    ledger = home.ledger_file
    observer = MachineObserver(
        hardware,
        ObservedLedger(instances=partial(read_instances, ledger), deployments=partial(read_deployments, ledger)),
        node=socket.gethostname(),
        read_tenants=wiring.make_interposer(home).read_tenants,
    )
    version = importlib.metadata.version("aimgpu")
    engines = EngineMetrics(partial(_engine_targets, home))
    return Exporter(MetricSources(look=observer.look, version=version, read_engines=engines.read))


def _engine_targets(home: Home) -> Sequence[EngineTarget]:
    return [
        EngineTarget(
            instance_id=one.id,
            model=one.deployment,
            engine=one.engine,
            url=one.endpoint,
            api_key=read_api_key(home.path / "runs", one.id) or "",
            owner=EngineOwner.of(one),
        )
        for one in read_instances(home.ledger_file)
        if one.state is InstanceState.READY and one.endpoint
    ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    exporter: Exporter

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/metrics":
            self._answer(200, self.exporter.render({}), CONTENT_TYPE)
        elif self.path == "/readyz" and not self.exporter.has_seen_devices():
            self._answer(503, b"the GPUs have not answered yet\n", "text/plain")
        elif self.path in ("/healthz", "/readyz"):
            self._answer(200, b"ok\n", "text/plain")
        else:
            self._answer(404, b"metrics are at /metrics\n", "text/plain")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, body: bytes, media_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the library's name
        """A line for every scrape would fill the log."""


def serve(exporter: Exporter, host: str, port: int) -> ThreadingHTTPServer:
    """Listens; call `serve_forever` on it. Port 0: any that is free."""
    handler = type("Handler", (_Handler,), {"exporter": exporter})
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server_class = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
    server: ThreadingHTTPServer = server_class((host, port), handler)
    return server


def main() -> int:
    parser = argparse.ArgumentParser(prog="aimgpu.daemon.exporter", description="Metrics without a daemon.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9400)
    parser.add_argument("--simulate", metavar="PRODUCT")
    parser.add_argument("--count", type=int, default=1)
    given = parser.parse_args()
    configure_logging()
    try:
        exporter = make_standalone(Home(given.home), GpuChoice(simulated=given.simulate, count=given.count))
        server = serve(exporter, given.host, given.port)
    except AimGpuError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_status
    except OSError as error:
        sys.stderr.write(f"error: cannot listen on {given.host}:{given.port}: {error.strerror}\n")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    host, port = server.server_address[:2]
    sys.stdout.write(f"http://{host!s}:{port}/metrics\n")
    sys.stdout.flush()
    server.serve_forever()
    server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
