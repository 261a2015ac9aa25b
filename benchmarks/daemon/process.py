"""The real daemon on simulated GPUs, with `engine.c` for an engine.

AIMGPU_BENCH_ENGINE: the built program. AIMGPU_BENCH_RECORD: where engines write down what they are asked.
AIMGPU_BENCH_TIMING: JSON, fields of Timing.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.daemon.assembly import main
from aimgpu.domain import Deployment, Exactness, Footprint, Term
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.protocols import Availability, Command, Health, HealthState, LaunchRequest, LocalModel
from aimgpu.hardware.protocols import Hardware
from aimgpu.home import Home
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger
from aimgpu.units import GIB

_OK = 200


class TinyEngine:
    """Loads for as many milliseconds as its model's name says: "any/250"."""

    name = "llamacpp"
    runs_without_gpu = True
    takes_priority = False
    starts_alone = False
    fetches_models = True
    formats = frozenset({"gguf"})

    def availability(self) -> Availability:
        return Availability(available=True, version="1")

    def command(self, request: LaunchRequest) -> Command:
        request.run_directory.mkdir(parents=True, exist_ok=True)
        (request.run_directory / "endpoint.json").unlink(missing_ok=True)
        load_ms = request.instance.model.rpartition("/")[2]
        argv: tuple[str, ...] = (os.environ["AIMGPU_BENCH_ENGINE"], str(request.run_directory.absolute()), load_ms)
        if record := os.environ.get("AIMGPU_BENCH_RECORD"):
            argv += (record,)
        return Command(argv=argv, environment=dict(request.environment), device_nodes=request.device_nodes)

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        endpoint = read_endpoint(run_directory / "endpoint.json")
        if endpoint is None or endpoint.url is None:
            return Health(state=HealthState.STARTING)
        answer = ask(f"{endpoint.url}/health", api_key=api_key, bound_seconds=2.0)
        ready = answer is not None and answer.status == _OK
        return Health(state=HealthState.READY if ready else HealthState.LOADING, endpoint=endpoint.url)

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        return last_lines[-1] if last_lines else None


def size_one_gib(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
    del local, vendor
    term = Term(name="weights", memory_bytes=GIB, exactness=Exactness.EXACT, formula="given")
    return Footprint(model=deployment.model, engine=engine, precision="-", context_tokens=1, concurrency=4, terms=(term,))


def make_dependencies(home: Home, hardware: Hardware, in_flight: Callable[[str], int]) -> Dependencies:
    return Dependencies(
        hardware=hardware,
        ledger=Ledger.open(home.ledger_file),
        isolator=MechanismChooser(),
        engines={"llamacpp": TinyEngine()},
        launchers={"process": ProcessLauncher(home.path)},
        models=LocalModelStore(home.path / "models"),
        size=size_one_gib,
        runs=home.path / "runs",
        node=socket.gethostname(),
        in_flight=in_flight,
        timing=Timing(**json.loads(os.environ.get("AIMGPU_BENCH_TIMING", "{}"))),
    )


if __name__ == "__main__":
    sys.exit(main(make_dependencies))
