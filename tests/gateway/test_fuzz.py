"""Schemathesis makes up requests from our own description, valid and not, and sends them to a real gateway."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.examples import TIMES, examples
from tests.gateway.calling import call
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import ScriptedEngine

from aimgpu.gateway.openapi import describe_gateway

Serve = Callable[..., Served]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_the_description_is_served(serve: Serve) -> None:
    served = serve()
    got = call(served.port, "GET", "/v1/openapi.json")
    assert got.json["paths"].keys() == describe_gateway("0")["paths"].keys()


@pytest.mark.hypothesis
def test_nothing_that_can_be_made_up_breaks_the_gateway(serve: Serve, engine: ScriptedEngine, tmp_path: Path) -> None:
    served = serve()
    served.routes.serve("chat", engine, simulated=True)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/v1/openapi.json"]
    options = [
        "--mode",
        "all",
        "--checks",
        CHECKS,
        "--max-examples",
        str(examples(40)),
        "--phases",
        "examples,coverage,fuzzing",
        *([] if TIMES > 1 else ["--seed", "1"]),
    ]
    done = subprocess.run(
        [*command, *options, "--no-color"], capture_output=True, text=True, check=False, timeout=900 * TIMES, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert len(engine.asked) > 50  # what was valid reached the engine
    assert call(served.port, "GET", "/v1/models").status == 200
