"""Probes of the daemon on a port of their own: answered by another thread than the one that answers callers."""

import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, wait_for


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_daemon_is_alive_and_ready_on_the_port_of_probes(tmp_path: Path) -> None:
    port = free_port()
    daemon = TestDaemon(tmp_path / "home")
    daemon.set(AIMGPU_PROBE_PORT=str(port))
    try:
        daemon.start()
        wait_for(lambda: status(port, "/readyz") == 200 or None, "the daemon is ready")
        assert status(port, "/healthz") == 200
        assert status(port, "/v1/models") == 404
    finally:
        daemon.stop()


@pytest.mark.parametrize("text", ["65536", "probes", "-1", "٣"])
def test_what_is_no_port_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    daemon = TestDaemon(tmp_path / "home")
    daemon.set(AIMGPU_PROBE_PORT=text)
    daemon.home.create()
    daemon.spawn()
    assert daemon.process is not None
    assert daemon.process.wait() == 2
    assert "AIMGPU_PROBE_PORT is" in daemon.log.read_text()


def test_a_port_of_probes_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon = TestDaemon(tmp_path / "home")
        daemon.set(AIMGPU_PROBE_PORT=str(taken.getsockname()[1]))
        daemon.home.create()
        daemon.spawn()
        assert daemon.process is not None
        assert daemon.process.wait() != 0
        assert "cannot answer probes on 127.0.0.1" in daemon.log.read_text()
