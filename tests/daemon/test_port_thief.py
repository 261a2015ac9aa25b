"""A neighbour that takes an engine's port before the engine binds it gets nothing, and is reported."""

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import ROOT, TestDaemon, apply, stack, wait_for

from aimgpu.domain import InstanceState


class Thief:
    """Takes the port of the first engine that notes one, and answers as vLLM would."""

    def __init__(self, runs: Path) -> None:
        self.heard: list[str] = []
        self._runs = runs
        self._over = threading.Event()
        self._server: http.server.ThreadingHTTPServer | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def listens(self) -> bool:
        return self._server is not None

    def _run(self) -> None:
        noted: list[Path] = []
        while not noted and not self._over.wait(0.005):
            noted = [log.with_name("endpoint.json") for log in self._runs.glob("*/engine.log")]  # its process begins
        if not noted:
            return
        heard = self.heard

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                heard.append(f"{self.path} {self.headers.get('authorization')}")
                body = json.dumps({"data": [{"id": "chat"}], "choices": [{"text": "answer of the thief"}]}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 - http.server's name

        port = int(json.loads(noted[0].read_text())["url"].rpartition(":")[2])
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.serve_forever()

    def stop(self) -> None:
        self._over.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}:$PYTHONPATH exec {sys.executable} -m tests.programs.fake_vllm "$@"\n')
    program.chmod(0o755)
    made = TestDaemon(tmp_path / "home", vllm=program, restart_limit=1.0, restart_delay_seconds=600.0)
    yield made
    made.stop()


def test_a_thief_of_the_port_hears_neither_key_nor_prompt_and_is_named(daemon: TestDaemon) -> None:
    client = daemon.start()
    thief = Thief(daemon.home.path / "runs")
    try:
        # The engine loads for half a minute before it binds its port.
        apply(client, stack(chat={"model": "org/m+slow", "engine": "vllm"}))
        assert thief.listens
        (instance,) = wait_for(lambda: daemon.books()[0], "the instance is in the ledger")
        assert instance.state is InstanceState.FAILED
        assert f"another program (user {os.geteuid()}) listens at port" in (instance.reason or "")
        assert thief.heard == []
    finally:
        thief.stop()
