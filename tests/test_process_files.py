"""Processes read from files as /proc has them: odd names, zombies, loops, and what vanishes between two reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu import procfs

KERNEL_THREAD = 0x0020_0000


def write_process(  # noqa: PLR0913 - the fields of a process
    proc: Path,
    pid: int,
    *,
    parent: int = 1,
    name: str = "python3",
    state: str = "S",
    flags: int = 0,
    threads: int = 1,
    start: int = 7,
) -> None:
    """As the kernel writes it: 52 fields after pid and name."""
    fields = ["0"] * 50
    fields[0], fields[1], fields[3], fields[6], fields[17], fields[19] = (
        state,
        str(parent),
        "3",
        str(flags),
        str(threads),
        str(start),
    )
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_bytes(f"{pid} ({name}) {' '.join(fields)}\n".encode("utf-8", "surrogateescape"))


@settings(max_examples=examples(20))
@given(name=st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=15), start=st.integers(0, 2**62))
def test_a_process_is_read_whatever_its_name(tmp_path_factory: pytest.TempPathFactory, name: str, start: int) -> None:
    proc = tmp_path_factory.mktemp("proc")
    write_process(proc, 5, parent=3, name=name, start=start, threads=4)
    found = procfs.read_process(5, proc)
    assert found is not None
    assert (found.pid, found.parent_pid, found.start_ticks, found.threads) == (5, 3, start, 4)
    assert not found.kernel_thread


def test_a_name_that_is_no_text_is_read(tmp_path: Path) -> None:
    write_process(tmp_path, 5, name="\udcff\udcfe", start=9)
    assert procfs.read_start_ticks(5, tmp_path) == 9


@pytest.mark.parametrize(
    ("state", "ended", "stopped"),
    [
        ("R", False, False),
        ("S", False, False),
        ("D", False, False),
        ("T", False, True),
        ("t", False, True),
        ("Z", True, False),
        ("X", True, False),
    ],
)
def test_states_of_a_process(tmp_path: Path, state: str, ended: bool, stopped: bool) -> None:  # noqa: FBT001 - a table
    write_process(tmp_path, 5, state=state)
    found = procfs.read_process(5, tmp_path)
    assert found is not None
    assert found.ended == ended
    assert procfs.is_stopped(5, tmp_path) == stopped
    assert (procfs.read_start_ticks(5, tmp_path) is None) == ended
    assert [process.pid for process in procfs.read_processes(tmp_path)] == ([] if ended else [5])


def test_a_kernel_thread_is_told_apart(tmp_path: Path) -> None:
    write_process(tmp_path, 2, flags=KERNEL_THREAD | 0x40)
    write_process(tmp_path, 3, flags=0x40)
    entries = [procfs.read_process(pid, tmp_path) for pid in (2, 3)]
    assert [entry.kernel_thread for entry in entries if entry] == [True, False]


def test_what_is_no_process_is_passed_over(tmp_path: Path) -> None:
    write_process(tmp_path, 5)
    (tmp_path / "meminfo").write_text("")
    (tmp_path / "sys").mkdir()
    (tmp_path / "77").mkdir()  # ended between the listing and the read
    assert [process.pid for process in procfs.read_processes(tmp_path)] == [5]
    assert procfs.read_process(77, tmp_path) is None
    assert not procfs.is_stopped(77, tmp_path)


def test_a_tree_has_descendants_and_no_siblings(tmp_path: Path) -> None:
    for pid, parent in ((1, 0), (10, 1), (11, 10), (12, 11), (13, 12), (20, 1), (21, 20)):
        write_process(tmp_path, pid, parent=parent, state="Z" if pid == 12 else "S")
    assert procfs.read_tree(10, tmp_path) == {10, 11, 12, 13}
    assert procfs.read_tree(13, tmp_path) == {13}
    assert procfs.read_tree(99, tmp_path) == frozenset()


@settings(max_examples=examples(20))
@given(parents=st.lists(st.integers(1, 12), min_size=12, max_size=12), root=st.integers(1, 12))
def test_a_tree_ends_even_where_pids_were_reused_in_a_circle(
    tmp_path_factory: pytest.TempPathFactory, parents: list[int], root: int
) -> None:
    """The table is read entry by entry: by the time the last is read, the parent of the first may be another process."""
    proc = tmp_path_factory.mktemp("proc")
    for pid, parent in enumerate(parents, start=1):
        write_process(proc, pid, parent=parent)
    tree = procfs.read_tree(root, proc)
    assert root in tree
    for pid in tree - {root}:
        assert parents[pid - 1] in tree


def test_the_environment_of_a_process_is_read_and_of_none_is_empty() -> None:
    environment = {"PATH": os.environ.get("PATH", ""), "ODD": "a=b=c", "EMPTY": ""}
    with subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1, env=environment
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = procfs.read_environment(child.pid)
        assert {name: found[name] for name in environment} == environment
        assert procfs.read_working_directory(child.pid) == Path.cwd()
        child.communicate(b"\n")
    assert procfs.read_environment(child.pid) == {}
    assert procfs.read_working_directory(child.pid) is None


def test_a_working_directory_that_is_gone_shows_it(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1, cwd=folder) as child:
        assert child.stdout is not None
        child.stdout.readline()
        folder.rmdir()
        assert str(procfs.read_working_directory(child.pid)) == f"{folder} (deleted)"
        child.communicate(b"\n")


def test_the_process_table_has_this_process_and_each_read_is_new() -> None:
    table = procfs.SharedProcessTable()
    assert os.getpid() in table.read()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child:
        assert child.pid in table.read()
        child.communicate(b"\n")
    assert child.pid not in table.read()
