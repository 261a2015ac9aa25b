"""Callers who hold up what they may ask for hold up nothing else: the control plane answers, and SIGTERM ends the daemon."""

import http.client
import http.server
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import PATIENCE_SECONDS, TestDaemon, wait_for

PAGE = {"x-aimgpu-page": "1", "content-type": "application/json"}


class SilentHub(http.server.BaseHTTPRequestHandler):
    """A hub that takes requests and never answers."""

    asked = 0
    over = threading.Event()

    def do_GET(self) -> None:
        type(self).asked += 1
        self.over.wait()

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    SilentHub.over.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SilentHub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    SilentHub.over.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    made = TestDaemon(tmp_path / "home")
    yield made
    made.stop()


def call(daemon: TestDaemon, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    record = daemon.home.read_daemon()
    assert record is not None
    connection = http.client.HTTPConnection("127.0.0.1", record.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), headers or PAGE)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def send(daemon: TestDaemon, path: str, body: object) -> http.client.HTTPConnection:
    """Without waiting for the answer."""
    record = daemon.home.read_daemon()
    assert record is not None
    connection = http.client.HTTPConnection("127.0.0.1", record.port, timeout=PATIENCE_SECONDS)
    connection.request("POST", path, json.dumps(body), PAGE)
    return connection


def test_sizing_opens_no_file_fifo_or_variable_that_a_caller_names(daemon: TestDaemon, tmp_path: Path) -> None:
    """Each would be told apart by its answer, and a FIFO would hold a thread for ever."""
    daemon.set(SECRET_OF_THE_DAEMON="hunter2")
    daemon.start()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "there").write_text("hunter2")
    sources = [{"from_file": str(tmp_path / name)} for name in ("fifo", "there", "missing")]
    sources += [{"from_file": "/dev/zero"}, {"from_file": "/etc/shadow"}]
    sources += [{"from_variable": name} for name in ("SECRET_OF_THE_DAEMON", "NOT_THERE")]
    answers = set()
    for source in sources:
        fields: dict[str, Any] = {"model": "org/model", "env": {"X": source}}
        size = call(daemon, "/api/v1/size", {"name": "a", "fields": fields})
        what_if = call(daemon, "/api/v1/what-if", {"add": [{"name": "a", "fields": fields}]})
        assert (size[0], what_if[0]) == (200, 200), (source, size[1])
        answers.add(json.dumps([size[1]["footprint"], what_if[1]["fits"]]))
    assert len(answers) == 1
    for path in (tmp_path / "there", tmp_path / "missing", "/dev/zero", "./x", "~root", "/etc/shadow"):
        for name, body in (("size", {"name": "a", "fields": {"model": str(path)}}), ("what-if", None)):
            given: object = body or {"add": [{"name": "a", "fields": {"model": str(path)}}]}
            status, answer = call(daemon, f"/api/v1/{name}", given)
            assert (status, answer["error"]["code"]) == (403, "not_allowed")
            assert "path" in answer["error"]["message"]
    status, answer = call(daemon, "/api/pull", {"model": str(tmp_path / "there")})
    assert (status, "by path" in str(answer)) == (403, True)


@pytest.mark.parametrize("path", ["/api/v1/size", "/api/v1/what-if"])
def test_sizing_is_refused_to_a_page_of_another_site(daemon: TestDaemon, path: str) -> None:
    daemon.start()
    for headers in (
        {"origin": "http://evil.example", **PAGE},
        {"content-type": "text/plain"},
        {"host": "rebound.evil.example", **PAGE},
    ):
        assert call(daemon, path, {}, headers)[0] == 403


def test_full_pools_refuse_more_and_leave_the_control_plane_and_sigterm_alone(daemon: TestDaemon, hub: str) -> None:
    daemon.set(HF_ENDPOINT=hub, NO_PROXY="*")
    client = daemon.start()
    held = [send(daemon, "/api/pull", {"model": f"org/model-{number}"}) for number in range(10)]
    wait_for(lambda: SilentHub.asked >= 2, "pulls ask the hub")

    def refused() -> bool:
        status, _ = call(daemon, "/api/pull", {"model": "org/one-more"})
        return status == 503

    wait_for(refused, "a pull beyond the pool is refused")
    assert client.read_status()["reconciled"] in (True, False)
    assert client.read_state()["models"] == []
    assert call(daemon, "/api/v1/size", {"name": "a", "fields": {"model": "org/model"}})[0] == 200
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(PATIENCE_SECONDS) == 0
    for connection in held:
        connection.close()
