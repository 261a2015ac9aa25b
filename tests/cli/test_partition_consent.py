"""Before running models are stopped, a person is asked: tried at a real terminal, with a daemon and a model."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_until_settled

from aimgpu.cli.client import DaemonClient

_PROGRAM = "from aimgpu.cli.main import main; main()"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonClient]:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    daemon = TestDaemon(tmp_path / "home")
    found = daemon.start()
    apply(found, stack(chat={}))
    wait_until_settled(found)
    yield found
    daemon.stop()


def at_a_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """Exit status and everything shown; the answer is typed when the question stands there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown, asked = "", False
        while True:
            try:
                piece = os.read(ours, 4096).decode()
            except OSError:  # the other end closed
                break
            shown += piece
            if "[y/N]" in shown and not asked:  # it may come in two pieces
                asked = True
                os.write(ours, f"{answer}\n".encode())
        os.close(ours)
        return process.wait(timeout=60), shown


def test_a_person_is_asked_with_the_plan_before_them_and_no_changes_nothing(client: DaemonClient) -> None:
    before = wait_until_settled(client)
    status, shown = at_a_terminal("n", "partition", "apply", "0", "CPX")
    assert status == 1
    assert "Starts again afterwards: chat-" in shown
    assert "Stop 1 running model (chat-" in shown
    assert "Nothing was changed." in shown
    assert wait_until_settled(client) == before

    status, shown = at_a_terminal("y", "partition", "apply", "0", "CPX")
    assert status == 0, shown
    assert "SPX/NPS1 -> CPX/NPS1, as read back" in shown
    (instance,) = wait_until_settled(client)
    assert instance["partition"].startswith("cpx-")

    status, shown = at_a_terminal("", "partition", "reset", "0", "--yes")
    assert status == 0, shown
    assert "[y/N]" not in shown
