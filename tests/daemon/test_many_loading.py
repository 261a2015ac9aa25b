"""Models that hang while they load: `ps`, `down` and the daemon's end do not wait for them; its log stays bounded meanwhile."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.daemon.cheap_engines import CheapDaemon, models
from tests.daemon.running import PATIENCE_SECONDS, TestDaemon, apply, stack, wait_for

from aimgpu.cli.client import DaemonClient
from aimgpu.engines.launchers.log_bound import LogBounds
from aimgpu.errors import AimGpuError

FOR_EVER_MS = 3_600_000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CheapDaemon]:
    daemon = CheapDaemon(tmp_path)
    yield daemon
    daemon.stop()


def begin_loading(daemon: CheapDaemon, client: DaemonClient, count: int) -> threading.Thread:
    """Returns once every engine runs."""

    def work() -> None:
        with suppress(AimGpuError):  # the daemon ends, or the models are released under it
            apply(client, models(count, load_ms=FOR_EVER_MS))

    applying = threading.Thread(target=work)
    applying.start()
    wait_for(lambda: len(daemon.launcher.find_started()) == count, "all engines run")
    return applying


def test_down_ends_fifty_models_that_load_and_leaves_a_daemon_that_can_be_used(daemon: CheapDaemon) -> None:
    client = daemon.start()
    with daemon.log.open("ab") as log:
        log.write(b"x" * (LogBounds().largest_bytes + 1))
    applying = begin_loading(daemon, client, 50)
    status = client.read_status()
    assert {one["state"] for one in status["instances"]} == {"loading"}
    client.release([one["name"] for one in status["deployments"]])
    applying.join(PATIENCE_SECONDS)
    assert not applying.is_alive()
    assert daemon.launcher.find_started() == {}
    assert daemon.books() == ((), ())
    apply(client, models(1, load_ms=0))
    assert [one["state"] for one in client.read_status()["instances"]] == ["ready"]
    wait_for(lambda: daemon.log.stat().st_size <= LogBounds().largest_bytes, "the daemon's log is cut while it runs")


def test_sigterm_ends_the_daemon_while_models_load_and_the_next_one_adopts_them(daemon: CheapDaemon) -> None:
    client = daemon.start()
    applying = begin_loading(daemon, client, 20)
    before = daemon.launcher.find_started()
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(PATIENCE_SECONDS) == 0  # the engines would load for an hour
    applying.join(PATIENCE_SECONDS)
    assert daemon.launcher.find_started() == before
    client = daemon.start()
    wait_for(lambda: client.read_status()["reconciled"], "the next daemon has looked")
    assert daemon.launcher.find_started() == before
    assert {one["state"] for one in client.read_status()["instances"]} == {"loading"}
    assert len(client.read_status()["instances"]) == len(before)


def test_sigterm_ends_the_daemon_while_a_wake_hangs(tmp_path: Path) -> None:
    daemon = TestDaemon(tmp_path / "home", quiet_seconds=0.05)
    try:
        client = daemon.start()
        apply(client, stack(chat={"keep": "10m"}))
        client._json("POST", "/models/chat/sleep", {})
        wait_for(lambda: not daemon.launcher.find_started(), "it sleeps")
        daemon.kill()
        daemon.set(AIMGPU_TEST_ENGINES=json.dumps({"chat": ["--never-ready"]}))
        client = daemon.start()
        wait_for(lambda: client.read_status()["reconciled"], "the daemon has looked")
        client._json("POST", "/models/chat/wake", {})
        wait_for(daemon.launcher.find_started, "its engine runs")
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE_SECONDS) == 0
    finally:
        daemon.stop()
