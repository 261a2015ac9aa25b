"""`aimgpu exporter` as a process, beside a daemon's ledger and without one."""

import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.daemon.running import TestDaemon, apply, stack, wait_for

from aimgpu.control.observation import Observation
from aimgpu.daemon.exporter import serve
from aimgpu.monitoring.exporter import Exporter, MetricSources
from aimgpu.monitoring.metrics import METRICS


@contextmanager
def running_exporter(home: Path) -> Iterator[str]:
    """Its address without the path."""
    command = [
        sys.executable,
        "-c",
        "from aimgpu.cli.main import main; main()",
        "exporter",
        "--port",
        "0",
        "--simulated",
        "MI300X",
    ]
    environment = {**os.environ, "AIMGPU_HOME": str(home)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline().startswith("SIMULATED GPU (1 x MI300X)")
        url = process.stdout.readline().strip().removesuffix("/metrics")
        wait_for(lambda: read(f"{url}/readyz")[0] == 200, "the GPUs have answered")  # a scrape does not wait for long
        yield url
        process.terminate()
        assert process.wait() == 0


def read(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url) as response:
            return int(response.status), response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def families(url: str) -> dict[str, list[dict[str, str]]]:
    status, text = read(f"{url}/metrics")
    assert status == 200
    return {one.name: [sample.labels for sample in one.samples] for one in text_string_to_metric_families(text)}


def test_without_a_daemon_it_shows_the_gpus(tmp_path: Path) -> None:
    with running_exporter(tmp_path / "home") as url:
        found = families(url)
        assert set(found) <= set(METRICS)
        assert [labels["product"] for labels in found["aim_gpu_total_memory_bytes"]] == ["MI300X"]
        assert "aim_model_memory_bytes" not in found
        assert read(f"{url}/healthz")[0] == read(f"{url}/readyz")[0] == 200
        assert read(f"{url}/elsewhere")[0] == 404


def test_it_is_ready_when_the_gpus_have_answered_once() -> None:
    seen = Observation()
    exporter = Exporter(MetricSources(look=lambda **_: seen))
    with serve(exporter, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert read(f"{url}/readyz") == (503, "the GPUs have not answered yet\n")
        assert read(f"{url}/healthz")[0] == 200
        seen = Observation(taken_at=1.0, device_error="a driver that failed later is scraped as aim_gpu_up 0")
        assert read(f"{url}/readyz")[0] == 200
        server.shutdown()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    daemon = TestDaemon(tmp_path / "home")
    yield daemon
    daemon.stop()


def test_beside_a_daemon_it_shows_what_the_ledger_grants_and_the_daemon_shows_the_same(daemon: TestDaemon) -> None:
    client = daemon.start()
    apply(client, stack(chat={}))
    record = daemon.home.read_daemon()
    assert record is not None
    wait_for(lambda: "aim_gpu_layout" in families(record.url), "the daemon has read its GPUs")
    with running_exporter(daemon.home.path) as url:
        found, by_daemon = families(url), families(record.url)
        assert [labels["model"] for labels in found["aim_model_memory_bytes"]] == ["chat"]
        for name in ("aim_model_memory_bytes", "aim_gpu_partition_memory_bytes", "aim_model_instances", "aim_gpu_layout"):
            assert found[name] == by_daemon[name], name
    assert read(f"{record.url}/healthz")[0] == 200
    assert read(f"{record.url}/readyz")[0] == 200
