"""Ctrl-C, SIGTERM and a closed terminal at bad moments, and streams that are closed: nothing is left half done."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from aimgpu.cli import daemon_process
from aimgpu.cli.commands.serve import run as run_command
from aimgpu.cli.main import cli
from aimgpu.cli.signals import ENDING, signals_answered, signals_as_interrupt, signals_held
from aimgpu.home import Home

pytestmark = pytest.mark.usefixtures("home")


class Arrived(Exception):
    pass


@pytest.fixture(autouse=True)
def _survive() -> Iterator[None]:
    """A signal that is not handled fails the test instead of ending all of them."""

    def arrived(number: int, _frame: object) -> None:
        raise Arrived(number)

    before = {number: signal.signal(number, arrived) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_the_daemon_is_being_started_leaves_no_daemon(
    home: Home, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        signal.raise_signal(number)
        return started[0]

    monkeypatch.setattr(daemon_process, "PROGRAM", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(subprocess, "Popen", start)
    try:
        with signals_as_interrupt(), pytest.raises(KeyboardInterrupt):
            daemon_process.start_daemon(home, daemon_process.DaemonOptions(port=0))
        assert started[0].returncode == -signal.SIGTERM
    finally:
        started[0].kill()
        started[0].wait()


@pytest.mark.parametrize("number", ENDING)
def test_run_stops_the_daemon_that_it_started_when_it_is_ended(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    stops: list[bool] = []
    client = SimpleNamespace(read_status=lambda: signal.raise_signal(number))
    daemon = SimpleNamespace(client=client, stop=lambda: stops.append(True))
    monkeypatch.setattr(run_command, "start_daemon", lambda *_: daemon)
    outcome = CliRunner().invoke(cli, ["run", "smollm2", "hi"])
    assert stops == [True]
    assert "Aborted" in outcome.stderr


def test_signals_that_are_held_come_at_the_end_and_those_that_are_answered_never() -> None:
    seen: list[str] = []

    def hold() -> None:
        with signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append("held")

    with pytest.raises(Arrived):
        hold()
    for number in ENDING:
        with signals_answered(lambda: seen.append("answered")):
            os.kill(os.getpid(), number)
    assert seen == ["held", "answered", "answered", "answered"]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_as_interrupt():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_command_whose_streams_are_closed_works_and_writes_into_nothing_else(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m aimgpu catalogue list smol <&- >&- 2>{tmp_path / 'err'}"
    done = subprocess.run(["/bin/sh", "-c", command], check=False)
    assert (done.returncode, (tmp_path / "err").read_text()) == (0, "")


class InterruptedLock:
    """The lock of a Popen when a signal arrives at the one moment at which nothing gives it back."""

    def __init__(self) -> None:
        self._taken = False

    def acquire(self, blocking: bool = True) -> bool:  # noqa: FBT001, FBT002 - as a lock's
        del blocking
        self._taken = True
        raise KeyboardInterrupt

    def __enter__(self) -> None:
        assert not self._taken, "this would never return"

    def __exit__(self, *_: object) -> None:
        pass


def test_ctrl_c_while_the_end_of_a_daemon_is_waited_for_leaves_no_lock_taken() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process._waitpid_lock = InterruptedLock()  # type: ignore[attr-defined]
        assert not daemon_process.has_ended(process)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        while not daemon_process.has_ended(process):
            time.sleep(0.01)
        assert process.returncode == 0


def test_a_daemon_that_others_reaped_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitpid(process.pid, 0)
        assert daemon_process.has_ended(process)
