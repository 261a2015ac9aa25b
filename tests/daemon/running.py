"""Start, drive, kill and look at the test daemon."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from aimgpu.cli.client import DaemonClient
from aimgpu.control.plan.prepared import revision_of
from aimgpu.domain import Grant, Instance
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.home import Home
from aimgpu.ledger import Ledger

ROOT = Path(__file__).parent.parent.parent
PATIENCE_SECONDS = 300.0
SETTLED = {"ready", "failed", "sleeping"}
T = TypeVar("T")


class TestDaemon:
    __test__ = False
    program = "tests.programs.daemon"
    arguments: tuple[str, ...] = ()
    port = "0"

    def __init__(
        self,
        home: Path,
        *,
        engines: Mapping[str, tuple[str, ...]] | None = None,
        vllm: Path | None = None,
        **timing: float,
    ) -> None:
        self.home = Home(home)
        self.launcher = ProcessLauncher(home)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "AIMGPU_TEST_ENGINES": json.dumps({name: list(flags) for name, flags in (engines or {}).items()}),
            "AIMGPU_TEST_VLLM": str(vllm or "no-vllm"),
            "AIMGPU_TEST_TIMING": json.dumps({"poll_seconds": 0.02, **timing}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.log = home / "daemon.log"

    def set(self, **variables: str) -> None:
        """Of its environment, before it starts."""
        self._environment |= variables

    def start(self) -> DaemonClient:
        self.home.create()
        self.spawn()
        return self.wait_until_it_answers()

    def spawn(self) -> None:
        command = [sys.executable, "-m", self.program, "--home", str(self.home.path), "--port", self.port, *self.arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, cwd=ROOT)

    def wait_until_it_answers(self) -> DaemonClient:
        assert self.process is not None
        process = self.process

        def look() -> DaemonClient | None:
            assert process.poll() is None, self.log.read_text()[-3000:]
            record = self.home.read_daemon()
            return DaemonClient(record.url, self.home.read_token()) if record and record.pid == process.pid else None

        return wait_for(look, "the daemon answers")

    def kill(self) -> None:
        """kill -9: no handler runs."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Release everything, then end; whatever a failed test left is ended too."""
        if self.process is not None and self.process.poll() is None:
            record = self.home.read_daemon()
            if record is not None:
                DaemonClient(record.url, self.home.read_token()).stop()
            else:
                self.process.terminate()
            self.process.wait(PATIENCE_SECONDS)
        for process in self.launcher.find_started().values():
            self.launcher.stop(process, grace_seconds=0)

    def runs_what_is_wanted(self) -> bool:
        """Whether no instance is left that a daemon started from an earlier revision of its deployment and still replaces."""
        ledger = Ledger.open(self.home.path / "ledger.sqlite3")
        try:
            revisions = {deployment.name: revision_of(deployment) for deployment in ledger.deployments()}
            return all(one.revision == revisions.get(one.deployment) for one in ledger.instances())
        finally:
            ledger.close()

    def books(self) -> tuple[tuple[Instance, ...], tuple[Grant, ...]]:
        """What the file says, read by another connection."""
        ledger = Ledger.open(self.home.path / "ledger.sqlite3")
        try:
            return ledger.instances(), ledger.grants()
        finally:
            ledger.close()


def wait_for(look: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {PATIENCE_SECONDS:.0f} s in vain: {what}")


def wait_until_settled(client: DaemonClient) -> list[dict[str, Any]]:
    """Until the daemon has repaired what it found, and every wanted instance is ready or failed."""

    def look() -> dict[str, Any] | None:
        status = client.read_status()
        found = status["instances"]
        wanted = {(item["name"], replica) for item in status["deployments"] for replica in range(item["replicas"])}
        there = {(instance["name"], instance["replica"]) for instance in found}
        quiet = all(instance["state"] in SETTLED for instance in found)
        alone = len(found) == len(there)  # a replica that is replaced has two instances for a moment
        return status if status["reconciled"] and quiet and alone and there == wanted else None

    instances: list[dict[str, Any]] = wait_for(look, "every wanted instance is ready or failed")["instances"]
    return instances


def stack(**models: Mapping[str, Any]) -> str:
    return json.dumps({"gpus": "auto", "models": {name: {"model": "a/model", **fields} for name, fields in models.items()}})


def apply(client: DaemonClient, text: str, *, dry_run: bool = False) -> list[dict[str, Any]]:
    return list(client.apply(text, "/", dry_run=dry_run))
