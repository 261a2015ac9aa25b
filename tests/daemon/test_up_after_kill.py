"""`aimgpu up` itself, command and daemon as processes of their own, after the daemon was killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.daemon.running import PATIENCE_SECONDS, ROOT, wait_for

from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.errors import DaemonUnreachable
from aimgpu.home import Home

STACK = """\
gpus: {simulated: MI300X, count: 1}
models:
  large: {model: org/m, gpu: {memory: 100GiB}}
  small: {model: org/m, gpu: {memory: 4GiB}, compute: 10%}
"""


@dataclass(frozen=True)
class Machine:
    """A user's folder with a stack file, and a home."""

    folder: Path
    home: Home

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        timing = {"poll_seconds": 0.02, "grace_seconds": 1.0, "drain_seconds": 0.1}
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "AIMGPU_HOME": str(self.home.path),
            "AIMGPU_PORT": "0",
            "AIMGPU_TEST_TIMING": json.dumps(timing),
        }
        command = [sys.executable, "-m", "tests.programs.aimgpu", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=self.folder, env=environment)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            out, err = process.communicate()
        return process.returncode, out, err

    def must(self, *arguments: str) -> str:
        status, out, err = self.run(*arguments)
        assert status == 0, (arguments, out, err)
        return out

    def shown(self) -> dict[str, str]:
        status = json.loads(self.must("ps", "--json"))
        running = {item["name"]: item["state"] for item in status["instances"]}
        return {item["name"]: "queued" for item in status["waiting"]} | running

    def started(self) -> dict[str, int]:
        """The processes of models that run, by instance."""
        return {name: process.pid for name, process in ProcessLauncher(self.home.path).find_started().items()}

    def kill_daemon(self) -> None:
        record = self.home.read_daemon()
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        wait_for(lambda: self.home.read_daemon() is None, "the daemon is gone")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "stack.yaml").write_text(STACK)
    machine = Machine(folder, Home(tmp_path / "home"))
    yield machine
    machine.run("down")


def test_up_with_the_same_stack_brings_a_killed_daemon_back(machine: Machine) -> None:
    """What ran is adopted, what was queued is queued; meanwhile `ps` names what runs and what to do."""
    expected = {"large": "queued", "small": "ready"}
    assert "4GiB of gpu0/spx-0 with 10% of the GPU's compute" in machine.must("up", "-f", "stack.yaml", "--dry-run")
    machine.must("up", "-f", "stack.yaml", "--detach")
    machine.must("partition", "apply", "0", "CPX", "--yes")
    wait_for(lambda: machine.shown() == expected, "the large model waits")
    dry = machine.must("up", "-f", "stack.yaml", "--dry-run")
    assert "Queued, and still without room: large" in dry
    assert "runs as it should" not in dry
    planned = [line for line in machine.must("plan", "-f", "stack.yaml").splitlines() if line.startswith("  ")]
    assert [line.split()[1] for line in planned] == ["stop", "repartition", "start"], planned
    before = machine.started()
    assert len(before) == 1
    machine.kill_daemon()

    status, _, err = machine.run("ps")
    assert status == DaemonUnreachable.exit_status
    assert next(iter(before)) in err
    assert "aimgpu up" in err
    assert "aimgpu down" in err
    assert machine.started() == before

    machine.must("up", "-f", "stack.yaml", "--detach")
    assert machine.shown() == expected
    assert machine.started() == before
    (instance,) = json.loads(machine.must("ps", "--json"))["instances"]
    assert (instance["partition"], instance["compute"]) == ("cpx-0", "30 of 304 CUs (10%)")
    assert "Stopped." in machine.must("down")
    assert machine.started() == {}


def test_up_in_the_foreground_serves_what_a_killed_daemon_left(machine: Machine) -> None:
    machine.must("up", "-f", "stack.yaml", "--detach")
    before = machine.started()
    assert len(before) == 2
    machine.kill_daemon()
    with machine.start("up") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ctrl-C stops it." in line:
                break
        assert machine.started() == before
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert machine.started() == {}
