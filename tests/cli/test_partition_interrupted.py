"""`aimgpu gpus` and `aimgpu partition` when something was cut short: a killed daemon, Ctrl-C."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.daemon.running import TestDaemon, apply, stack, wait_until_settled

from aimgpu.cli.client import DaemonClient
from aimgpu.cli.main import cli
from aimgpu.domain import Device
from aimgpu.errors import PartitionBusy, UnknownLayout
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.home import Home
from aimgpu.ledger import read_grants

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def daemon(home: Home) -> Iterator[TestDaemon]:
    found = TestDaemon(home.path)
    yield found
    found.stop()


def aimgpu(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def read(*arguments: str) -> Any:
    return json.loads(aimgpu(*arguments, "--json").stdout)


def test_models_that_a_killed_daemon_left_are_still_counted_and_not_disturbed(daemon: TestDaemon) -> None:
    client = daemon.start()
    apply(client, stack(chat={"gpu": {"memory": "4GiB"}}))
    wait_until_settled(client)
    with_daemon = read("gpus")
    daemon.kill()

    shown = read("gpus")
    (part,) = shown["gpus"][0]["partitions"]
    assert shown["daemon"] is False
    assert part["granted_bytes"] == with_daemon["gpus"][0]["partitions"][0]["granted_bytes"] == 4 << 30
    assert part["free_bytes"] == part["memory_bytes"] - (4 << 30)
    (left,) = shown["stranded"]
    assert left.startswith("chat-0")
    assert f"models of one do ({left})" in aimgpu("gpus").stdout

    planned = read("partition", "plan", "0", "CPX")
    assert planned["stops"] == []
    assert [process["instance"] for process in planned["in_the_way"]] == [left]
    assert f"of {left}, whose daemon is gone" in aimgpu("partition", "plan", "0", "CPX").stdout
    refused = aimgpu("partition", "apply", "0", "CPX", "--yes").exception
    assert isinstance(refused, PartitionBusy)
    assert "aimgpu down" in str(refused.hint)

    (instance,) = wait_until_settled(daemon.start())
    assert (instance["id"], instance["state"]) == (left, "ready")
    assert read("gpus")["stranded"] == []


def test_books_that_cannot_be_read_tell_of_no_grant(tmp_path: Path) -> None:
    assert read_grants(tmp_path / "none.sqlite3") == ()
    broken = tmp_path / "broken.sqlite3"
    broken.write_bytes(b"no database at all" * 100)
    assert read_grants(broken) == ()
    assert broken.read_bytes() == b"no database at all" * 100


def test_ctrl_c_does_not_leave_half_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    change = SimulatedHardware.apply_layout

    def interrupted(self: SimulatedHardware, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        os.kill(os.getpid(), signal.SIGINT)
        return change(self, device_id, layout_name, reload_driver=reload_driver)

    monkeypatch.setattr(SimulatedHardware, "apply_layout", interrupted)
    before = signal.getsignal(signal.SIGINT)
    outcome = aimgpu("partition", "apply", "0", "CPX")
    assert outcome.exit_code == 0
    assert "will be finished" in outcome.stderr
    assert "CPX/NPS1, as read back" in outcome.stdout
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_a_daemon_changes_says_that_it_goes_on(daemon: TestDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.start()

    def interrupted(*_: object, **__: object) -> Iterator[dict[str, Any]]:
        yield {"event": "step", "text": "stopping 1 instance"}
        raise KeyboardInterrupt

    monkeypatch.setattr(DaemonClient, "partition", interrupted)
    outcome = aimgpu("partition", "apply", "0", "CPX")
    assert outcome.exit_code != 0
    assert "The daemon goes on with the change" in outcome.stderr


def test_a_compute_mode_that_needs_another_memory_mode_says_so() -> None:
    assert aimgpu("partition", "apply", "0", " cpx/nps4 ", "--reload-driver").exit_code == 0
    refused = aimgpu("partition", "apply", "0", "spx").exception
    assert isinstance(refused, UnknownLayout)
    assert "under NPS4" in refused.message
    assert str(refused.hint).endswith("SPX/NPS1.")
