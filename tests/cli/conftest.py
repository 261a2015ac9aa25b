import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cli.canned import CannedDaemon, canned_daemon

from aimgpu.home import Home

PROGRAM = str(Path(__file__).with_name("aimgpu_with_stand_in.py"))
STACK = "models:\n  chat: {model: org/m}\n  code: {model: org/m}\n"


@dataclass(frozen=True)
class CommandLine:
    """`aimgpu` in a folder and a home of its own, with a stand-in for the daemon."""

    folder: Path
    home: Home

    def run(self, *arguments: str, scenario: str = "ok", text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, PROGRAM, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=self.environment(scenario),
            input=text,
            timeout=120,
        )

    def start(self, *arguments: str, scenario: str = "ok") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment(scenario),
        )

    def environment(self, scenario: str) -> dict[str, str]:
        return os.environ | {"AIMGPU_HOME": str(self.home.path), "STAND_IN_SCENARIO": scenario, "AIMGPU_PORT": "0"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The home that commands run in this process use."""
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    return Home(tmp_path / "home")


@pytest.fixture
def daemon(home: Home) -> Iterator[CannedDaemon]:
    with canned_daemon(home) as found:
        yield found


@pytest.fixture
def aimgpu(tmp_path: Path) -> Iterator[CommandLine]:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "stack.yaml").write_text(STACK)
    home = Home(tmp_path / "home")
    yield CommandLine(folder, home)
    record = home.read_daemon()
    if record is not None:
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGKILL)
