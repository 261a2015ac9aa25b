"""`up` where one model of several fails: by default the others run, with --all-or-none none that it started."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_until_settled

from aimgpu.cli.main import cli
from aimgpu.errors import EngineFailed


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestDaemon]:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    engines = {"broken": ("--die-at-start", "3", "--say", "error: no such tensor")}
    daemon = TestDaemon(tmp_path / "home", engines=engines, grace_seconds=1.0, drain_seconds=0.1)
    yield daemon
    daemon.stop()


def test_what_a_failed_up_started_is_stopped_and_what_ran_goes_on(daemon: TestDaemon, tmp_path: Path) -> None:
    client = daemon.start()
    apply(client, stack(old={}))
    wait_until_settled(client)
    before = daemon.launcher.find_started()
    file = tmp_path / "stack.yaml"
    file.write_text(stack(old={}, new={}, broken={}))
    with pytest.raises(EngineFailed, match="broken failed to start"):
        cli.main(["up", "--attach", "--all-or-none", "-f", str(file)], standalone_mode=False)
    assert [item["name"] for item in client.read_status()["deployments"]] == ["old"]
    assert daemon.launcher.find_started() == before
    assert {grant.deployment for grant in daemon.books()[1]} == {"old"}


def test_without_the_option_the_others_run(daemon: TestDaemon, tmp_path: Path) -> None:
    client = daemon.start()
    file = tmp_path / "stack.yaml"
    file.write_text(stack(new={}, broken={}))
    assert cli.main(["up", "--attach", "-f", str(file)], standalone_mode=False) == EngineFailed.exit_status
    assert {item["name"]: item["state"] for item in client.read_status()["instances"]}["new"] == "ready"
