"""Real engines without a GPU, behind a real daemon with a simulated one: `make test-wide ARGS=engines`."""

import contextlib
import http.client
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from benchmarks.engines_h200.daemon import PORT, BenchmarkDaemon

Call = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchmarkDaemon]:
    """One for the tests of a module, with the engine that the module installs: it takes minutes to start."""
    folder = tmp_path_factory.mktemp("engines")
    path = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join([str(request.module.install()), path])
    os.environ["OLLAMA_MODELS"] = str(folder / "ollama")
    out = folder / "out"
    out.mkdir()
    made = BenchmarkDaemon(folder, out, simulate="MI300X", tiny=True)
    made.start()
    try:
        yield made
    finally:
        made.stop()
        del os.environ["OLLAMA_MODELS"]
        os.environ["PATH"] = path
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def call() -> Call:
    """POST to the gateway; the status, and the JSON or the lines of a stream."""

    def post(path: str, body: dict[str, Any], *, stream: bool = False) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=300)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        if stream and response.status == 200:
            return response.status, [line for line in data.decode().splitlines() if line]
        return response.status, json.loads(data)

    return post


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 600.0) -> None:
    """These are slow on a loaded machine: the bound only ends what hangs."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)
