"""Private writes and bounded reads where the disk is full, folders are gone, links lead elsewhere, or others write too."""

import errno
import os
import resource
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.files import cache_directory, locked, read_bounded, write_private


@contextmanager
def files_of_at_most(most_bytes: int) -> Iterator[None]:
    """As on a full disk: a write beyond the limit fails half-way (EFBIG; Python ignores the signal)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_the_disk_does_not_take_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "keys.json"
    write_private(target, "old")
    with files_of_at_most(100), pytest.raises(OSError, match="too large") as caught:
        write_private(target, "x" * 100_000)
    assert caught.value.errno == errno.EFBIG
    assert target.read_text() == "old"
    assert names_in(tmp_path) == ["keys.json"]
    write_private(target, "new")
    assert target.read_text() == "new"


def test_a_write_into_a_folder_that_is_gone_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_private(tmp_path / "gone" / "token", "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        write_private(tmp_path / "file" / "token", "x")


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "token" / "kept").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path / "token", "x")
    assert names_in(tmp_path) == ["token"]
    assert names_in(tmp_path / "token") == ["kept"]


def test_a_link_is_replaced_and_what_it_leads_to_is_not_written(tmp_path: Path) -> None:
    """Else a link that someone left in a shared folder would have a secret written wherever it leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not ours")
    link = tmp_path / "token"
    link.symlink_to(elsewhere)
    write_private(link, "secret")
    assert elsewhere.read_text() == "not ours"
    assert not link.is_symlink()
    assert link.read_text() == "secret"


def test_a_link_that_leads_nowhere_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "token").symlink_to(tmp_path / "nothing")
    write_private(tmp_path / "token", "secret")
    assert (tmp_path / "token").read_text() == "secret"
    assert not (tmp_path / "nothing").exists()


def test_no_one_else_can_read_a_private_file_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_private(tmp_path / "token", "secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_readers_see_a_whole_content_while_writers_take_turns(tmp_path: Path) -> None:
    target = tmp_path / "daemon.json"
    contents = ["a" * 10_000, "b" * 20_000, "c" * 5]
    write_private(target, contents[0])
    stop = threading.Event()

    def write(content: str) -> None:
        while not stop.is_set():
            write_private(target, content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    try:
        seen = {target.read_text() for _ in range(300)}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert seen <= set(contents)
    assert names_in(tmp_path) == ["daemon.json"]


@settings(max_examples=examples(30))
@given(content=st.text(max_size=200))
def test_what_was_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    target = tmp_path_factory.getbasetemp() / "round-trip"
    try:
        write_private(target, content)
    except UnicodeEncodeError:
        assert any("\ud800" <= character <= "\udfff" for character in content)
        return
    assert read_bounded(target, 1000) == content.encode().replace(b"\n", os.linesep.encode())


def test_a_lock_makes_its_folder_and_is_free_again_after_an_error(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "keys.json"
    with pytest.raises(ValueError, match="as told"), locked(target):
        raise ValueError("as told")
    with locked(target):
        assert names_in(target.parent) == ["keys.json.lock"]
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700


def test_a_lock_is_held_against_other_threads(tmp_path: Path) -> None:
    inside, leave, order = threading.Event(), threading.Event(), []

    def hold() -> None:
        with locked(tmp_path / "file"):
            order.append("first")
            inside.set()
            assert leave.wait(60)
            order.append("first leaves")

    def follow() -> None:
        with locked(tmp_path / "file"):
            order.append("second")

    first = threading.Thread(target=hold)
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=follow)
    second.start()
    leave.set()
    first.join(60)
    second.join(60)
    assert order == ["first", "first leaves", "second"]


@settings(max_examples=examples(30))
@given(size=st.integers(0, 300), most=st.integers(0, 300))
def test_a_file_is_read_whole_or_refused_by_its_size(tmp_path_factory: pytest.TempPathFactory, size: int, most: int) -> None:
    file = tmp_path_factory.getbasetemp() / "sized"
    file.write_bytes(b"x" * size)
    if size <= most:
        assert read_bounded(file, most) == b"x" * size
    else:
        with pytest.raises(OSError, match=f"larger than {most} bytes") as caught:
            read_bounded(file, most)
        assert caught.value.errno == errno.EFBIG


def test_a_file_that_reports_no_size_is_read_to_its_end() -> None:
    """Files of /proc report 0 bytes and have some."""
    assert read_bounded(Path("/proc/self/cmdline"), 1 << 16) == Path("/proc/self/cmdline").read_bytes()
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_bounded(Path("/proc/self/stat"), 3)


def test_what_cannot_be_read_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 10)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        read_bounded(tmp_path / "loop", 10)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(OSError, match="No such device or address"):
            read_bounded(tmp_path / "s", 10)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"AIMGPU_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"AIMGPU_CACHE": "~/a"}, Path.home() / "a"),
        ({"AIMGPU_CACHE": "", "XDG_CACHE_HOME": "/b"}, Path("/b/aimgpu")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/aimgpu"),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache/aimgpu"),
        ({}, Path.home() / ".cache/aimgpu"),
    ],
)
def test_the_cache_is_where_the_environment_puts_it(environment: dict[str, str], folder: Path) -> None:
    assert cache_directory(environment) == folder


def test_a_relative_cache_counts_from_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache_directory({"AIMGPU_CACHE": "here"}) == tmp_path / "here"
