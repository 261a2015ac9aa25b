"""`aimgpu top` shows what the page shows."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.daemon.running import wait_for
from tests.web.scene import QUICK, PageDaemon, ask, put_foreign_process, show

from aimgpu.cli.views.gpu_bar import draw_gpu
from aimgpu.units import GIB

MODEL = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "engine": "llamacpp", "context": 2048, "concurrency": 4}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageDaemon]:
    daemon = PageDaemon(tmp_path_factory.mktemp("top") / "home", engines={"chat": QUICK}, grace_seconds=0.5)
    client = daemon.start()
    promises = {"ttft_p95": "60s", "classes": {"low": {"latency_p99": "1ms"}}}
    show(client, {"chat": {**MODEL, "slo": promises, "priority": "low", "keep": "1h"}, "idle": MODEL})
    for _ in range(13):
        assert ask(daemon.url, "chat") == 200
    yield daemon
    daemon.stop()


def run(daemon: PageDaemon, *arguments: str, command: str = "top") -> str:
    program = [sys.executable, "-c", "from aimgpu.cli.main import main; main()", command, *arguments]
    environment = {**os.environ, "AIMGPU_HOME": str(daemon.home.path), "COLUMNS": "220"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpus_models_promises_and_their_budgets_are_shown(busy: PageDaemon) -> None:
    lines = run(busy, "--count", "1").splitlines()
    assert lines[0].startswith("SIMULATED")
    assert any(line.startswith("gpu0  AMD Instinct MI300X  SPX/NPS1") for line in lines)
    row = next(line for line in lines if line.startswith("chat "))
    assert "0/4" in row
    assert "100.0x" in row, "the worst burn of all its promises"
    assert "-9900%" in row, "what it left of the budget"
    assert 30 <= int(row.split()[-1].partition("m")[0]) <= 60, "when it is unloaded"


def test_each_look_is_one_line_of_json(busy: PageDaemon) -> None:
    looks = run(busy, "--count", "2", "--interval", "0.1", "--json").splitlines()
    assert [json.loads(line)["models"]["chat"]["windows"][-1]["requests"] for line in looks] == [13, 13]
    assert json.loads(looks[0])["gpus"][0]["partitions"][0]["shares"]


def test_a_bar_is_as_long_as_its_parts() -> None:
    part = {"memory_bytes": 96, "foreign_bytes": 12, "shares": [{"model": "chat", "memory_bytes": 48}]}
    gpu = {
        "index": 0,
        "name": "X",
        "layout": "DPX",
        "utilization_percent": None,
        "measured_bytes": None,
        "granted_bytes": 48,
        "free_bytes": 36,
        "partitions": [part, {"memory_bytes": 96, "foreign_bytes": 0, "shares": []}],
    }
    _, bar = draw_gpu(gpu, colour=False)
    first, second = bar.strip()[1:-1].rsplit("|", 1)
    assert (len(first), len(second)) == (36, 36)
    assert first.startswith("chat=")
    assert "|oth|" in first


def test_the_page_the_status_and_gpus_have_one_figure_for_what_is_free(busy: PageDaemon) -> None:
    """With memory that another process holds; last, as it stays on the GPU."""
    before = json.loads(run(busy, "--count", "1", "--json"))["gpus"][0]
    granted, expected = before["granted_bytes"], before["memory_bytes"] - before["granted_bytes"] - 6 * GIB
    put_foreign_process(busy.home.path, "sim-mi300x-0", pid=os.getpid(), memory_bytes=6 * GIB)

    def noticed() -> dict[str, Any] | None:  # the daemon reads its devices every second
        page: dict[str, Any] = json.loads(run(busy, "--count", "1", "--json"))["gpus"][0]
        return page if page["free_bytes"] == expected else None

    page = wait_for(noticed, "the page shows what the other process holds")
    status = json.loads(run(busy, "--json", command="ps"))["gpus"][0]
    listed = json.loads(run(busy, "--json", command="gpus"))["gpus"][0]
    assert granted > 0
    assert [one["partitions"][0]["free_bytes"] for one in (page, status, listed)] == [expected] * 3
    assert (page["free_bytes"], status["free_bytes"]) == (expected, expected)
