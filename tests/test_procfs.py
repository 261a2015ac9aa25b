import errno
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from aimgpu import procfs


def test_this_process_is_running_and_an_earlier_one_with_its_pid_is_not() -> None:
    me = procfs.read_process(os.getpid())
    assert me is not None
    assert me.parent_pid == os.getppid()
    assert procfs.is_running(me)
    assert not procfs.is_running(replace(me, start_ticks=me.start_ticks - 1))


def test_a_zombie_is_there_and_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
    entry = procfs.read_process(child.pid)
    assert entry is not None
    assert entry.ended
    assert procfs.read_start_ticks(child.pid) is None
    assert child.pid not in {process.pid for process in procfs.read_processes()}
    child.wait()
    assert procfs.read_process(child.pid) is None


def test_the_tree_of_a_process_holds_its_grandchildren() -> None:
    program = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        tree = procfs.read_tree(child.pid)
        assert child.pid in tree
        assert len(tree) == 2
        assert tree < procfs.read_tree(os.getpid())
        child.stdin.write("\n")
        child.stdin.flush()


def test_a_command_name_with_brackets_is_read(tmp_path: object) -> None:
    program = "import ctypes\nctypes.CDLL(None).prctl(15, b'a) Z (b', 0, 0, 0)\nprint(1, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        entry = procfs.read_process(child.pid)
        assert entry is not None
        assert not entry.ended
        assert entry.parent_pid == os.getpid()
        child.stdin.write("\n")
        child.stdin.flush()


def test_those_who_ask_while_the_process_table_is_read_share_one_reading_that_began_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go_on, readings = threading.Event(), threading.Event(), itertools.count()

    def read() -> list[procfs.ProcessEntry]:
        entry = procfs.ProcessEntry(pid=next(readings), state="R", parent_pid=0, session=0, start_ticks=1, kernel_thread=False)
        began.set()
        assert go_on.wait(60)
        return [entry]

    monkeypatch.setattr(procfs, "read_processes", read)
    table = procfs.SharedProcessTable()
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(table.read)
        assert began.wait(60)
        later = [pool.submit(table.read) for _ in range(5)]
        wait_until_all_wait(5)
        go_on.set()
        assert set(first.result(60)) == {0}
        assert [set(one.result(60)) for one in later] == [{1}] * 5


def wait_until_all_wait(count: int) -> None:
    """Until so many threads stand in `read`."""
    until = time.monotonic() + 60
    while sum(frame.f_code is procfs.SharedProcessTable.read.__code__ for frame in sys._current_frames().values()) < count:
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_reader_without_files_left_does_not_take_a_process_for_dead(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    me = procfs.read_process(os.getpid())
    assert me is not None
    assert procfs.is_running(me)

    def fail(_path: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        procfs.is_running(me)
