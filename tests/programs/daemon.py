"""The real daemon with fake_engine.py for an engine, so that tests can start and kill it many times.

AIMGPU_TEST_ENGINES: JSON, deployment -> flags of fake_engine.py. AIMGPU_TEST_TIMING: JSON, fields of Timing.
AIMGPU_TEST_VLLM: what to start for the engine `vllm`. AIMGPU_TEST_PATIENCE: seconds, for what it gives up after 15 or 30.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

from tests.programs.engine import ScriptedEngine

from aimgpu.control.dependencies import Dependencies, read_timing
from aimgpu.control.sizing_inputs.sizing_basis import unsized_footprint
from aimgpu.daemon import assembly
from aimgpu.domain import Deployment, Exactness, Footprint, Term
from aimgpu.engines.command.engine import CommandEngine
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.protocols import LocalModel
from aimgpu.engines.vllm.engine import VllmEngine
from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.http.server import caller_config
from aimgpu.gateway.slots import HoldingLimits
from aimgpu.hardware.protocols import Hardware
from aimgpu.home import Home
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger
from aimgpu.units import GIB


def make_dependencies(home: Home, hardware: Hardware, in_flight: Callable[[str], int]) -> Dependencies:
    flags = json.loads(os.environ.get("AIMGPU_TEST_ENGINES", "{}"))
    timing = json.loads(os.environ.get("AIMGPU_TEST_TIMING", "{}"))
    engine = ScriptedEngine("llamacpp", by_deployment={name: tuple(given) for name, given in flags.items()})
    return Dependencies(
        hardware=hardware,
        ledger=Ledger.open(home.path / "ledger.sqlite3"),
        isolator=MechanismChooser(),
        engines={
            "llamacpp": engine,
            "vllm": VllmEngine(program=os.environ.get("AIMGPU_TEST_VLLM", "vllm")),
            "command": CommandEngine(),
        },
        launchers={"process": ProcessLauncher(home.path)},
        models=LocalModelStore(home.path / "models"),
        size=size_one_gib,
        runs=home.path / "runs",
        node=socket.gethostname(),
        in_flight=in_flight,
        timing=replace(read_timing(os.environ), **timing),
    )


def size_one_gib(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
    """For vLLM 10 GiB of weights and 1 GiB of context."""
    if engine == "command":
        return unsized_footprint(deployment, engine)
    sizes = {"weights": 10 * GIB, "context": GIB} if engine == "vllm" else {"weights": GIB}
    terms = tuple(
        Term(name=name, memory_bytes=size, exactness=Exactness.EXACT, formula="given") for name, size in sizes.items()
    )
    concurrency = deployment.concurrency or 1
    return Footprint(
        model=deployment.model, engine=engine, precision="-", context_tokens=1, concurrency=concurrency, terms=terms
    )


def have_patience(seconds: int) -> AbstractContextManager[object]:
    """With answers under way when it ends, and with callers of a model that does not start: a busy machine takes long."""
    if not seconds:
        return nullcontext()
    settings = partial(GatewaySettings, holding=HoldingLimits(longest_blocked_seconds=seconds))
    return mock.patch.multiple(
        assembly, caller_config=partial(caller_config, shutdown_seconds=seconds), GatewaySettings=settings
    )


if __name__ == "__main__":
    with have_patience(int(os.environ.get("AIMGPU_TEST_PATIENCE", "0"))):
        sys.exit(assembly.main(make_dependencies))
