"""A model that fails again and again: `ps` shows how often, up to AIMGPU_RESTART_LIMIT, and over restarts of the daemon."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import ROOT, TestDaemon, apply, stack, wait_for

DYING = json.dumps({"chat": ["--die-at-start", "3"]})


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    daemon = TestDaemon(tmp_path / "home", restart_delay_seconds=0.2)
    yield daemon
    daemon.stop()


def ps(daemon: TestDaemon) -> str:
    command = [sys.executable, "-m", "aimgpu.cli.main", "ps"]
    environment = os.environ | {"AIMGPU_HOME": str(daemon.home.path), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stderr


def test_ps_shows_failures_and_the_end_of_the_tries_over_a_restart_of_the_daemon(daemon: TestDaemon) -> None:
    daemon.set(AIMGPU_RESTART_LIMIT="2")
    client = daemon.start()
    apply(client, stack(chat={}))
    daemon.kill()
    for process in daemon.launcher.find_started().values():
        os.kill(process.pid, 9)
    daemon.set(AIMGPU_TEST_ENGINES=DYING)
    client = daemon.start()
    seen: set[int] = set()

    def gave_up() -> bool:
        instances = client.read_status()["instances"]  # for a moment the one that failed and the one that takes its place
        retries = [one["retry"] for one in instances if one["retry"]]
        seen.update(retry["failures"] for retry in retries)
        return any(retry["gave_up"] for retry in retries)

    wait_for(gave_up, "it is given up")
    assert max(seen) == 3
    assert "failed 3 times and is not tried again until it is applied again" in ps(daemon)
    daemon.kill()
    client = daemon.start()
    wait_for(lambda: client.read_status()["reconciled"], "the next daemon has looked")
    assert gave_up()
    assert "failed 3 times and is not tried again until it is applied again" in ps(daemon)
    daemon.kill()
    daemon.set(AIMGPU_TEST_ENGINES="{}")
    client = daemon.start()
    apply(client, stack(chat={}))
    (chat,) = client.read_status()["instances"]
    assert (chat["state"], chat["retry"]) == ("ready", None)
