import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aimgpu.errors import NotAllowed
from aimgpu.home import DaemonRecord, Home, find_home
from aimgpu.procfs import read_boot_id, read_start_ticks


def record_of(pid: int, ticks: int) -> DaemonRecord:
    return DaemonRecord(
        pid=pid, start_ticks=ticks, boot_id=read_boot_id(), host="127.0.0.1", port=8080, url="http://127.0.0.1:8080"
    )


def test_the_home_is_where_the_environment_says(tmp_path: Path) -> None:
    assert find_home({"AIMGPU_HOME": str(tmp_path), "XDG_STATE_HOME": "/x"}).path == tmp_path
    assert find_home({"XDG_STATE_HOME": "/x"}).path == Path("/x/aimgpu")
    assert find_home({}).path == Path.home() / ".local/state/aimgpu"


def test_the_home_is_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "a" / "home")
    home.create()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700


def test_a_live_daemon_is_found(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ticks = read_start_ticks(os.getpid())
    assert ticks is not None
    record = record_of(os.getpid(), ticks)
    home.write_daemon(record)
    assert home.read_daemon() == record


def test_a_record_whose_pid_was_reused_is_no_daemon(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.write_daemon(record_of(os.getpid(), 1))
    assert home.read_daemon() is None


def test_a_record_that_outlived_its_process_is_no_daemon(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = read_start_ticks(child.pid)
    assert ticks is not None
    Home(tmp_path).write_daemon(record_of(child.pid, ticks))
    child.communicate(b"\n")
    assert Home(tmp_path).read_daemon() is None


def test_no_record_or_a_broken_one_is_no_daemon(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.read_daemon() is None
    home.daemon_file.write_text('{"pid": 1')
    assert home.read_daemon() is None
    home.daemon_file.write_text('{"pid": 1}')
    assert home.read_daemon() is None
    home.daemon_file.write_bytes(b"\x80\xff")
    assert home.read_daemon() is None
    assert Home(home.daemon_file / "below").read_daemon() is None


def test_a_home_that_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(NotAllowed, match="every user can write"):
        Home(home).create()
    home.chmod(0o700)
    Home(home).create()
