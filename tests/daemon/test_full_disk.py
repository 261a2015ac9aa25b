"""A full disk does not keep `down` from stopping models."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_for, wait_until_settled

from aimgpu.cli.main import cli


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root and the right to mount")
    yield folder
    unmount = ["umount", str(folder)]
    wait_for(lambda: subprocess.run(unmount, capture_output=True, check=False).returncode == 0, "it is unmounted")


def fill(folder: Path) -> None:
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(folder).f_bavail == 0


@pytest.mark.parametrize("killed", [False, True])
def test_models_are_stopped_on_a_full_disk(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, killed: bool
) -> None:
    daemon = TestDaemon(disk / "home", grace_seconds=1.0, drain_seconds=0.1)
    monkeypatch.setenv("AIMGPU_HOME", str(disk / "home"))
    try:
        client = daemon.start()
        apply(client, stack(chat={"gpu": {"memory": "4GiB"}}))
        wait_until_settled(client)
        assert daemon.launcher.find_started()
        if killed:
            daemon.kill()
        fill(disk)
        cli.main(["down"], standalone_mode=False)
        assert "Stopped." in capsys.readouterr().out
        assert daemon.launcher.find_started() == {}
    finally:
        (disk / "filler").unlink(missing_ok=True)
        daemon.stop()
