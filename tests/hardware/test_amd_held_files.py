"""Polling real files that stay open between polls."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from aimgpu.hardware.amd import Sysfs
from aimgpu.hardware.amd.processes import ProcessBook
from aimgpu.hardware.amd.vram import PROCESSES, Descriptors

GPU_IDS = (11, 12, 13)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / PROCESSES
    found.mkdir(parents=True)
    return found


def add_process(folder: Path, pid: int, sizes: dict[int, int]) -> Path:
    process = folder / str(pid)
    process.mkdir()
    for gpu_id, size in sizes.items():
        (process / f"vram_{gpu_id}").write_text(f"{size}\n", encoding="utf-8")
        (process / f"sdma_{gpu_id}").write_text("7\n", encoding="utf-8")
    return process


def targets() -> dict[int, str]:
    """What each open descriptor of this process is."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            found[int(link.name)] = str(link.readlink())
    return found


def open_below(folder: Path) -> int:
    return sum(str(folder) in target for target in targets().values())


@pytest.mark.parametrize("most", [0, 4, 1000], ids=["none held", "some held", "all held"])
def test_what_changed_is_seen_whether_or_not_files_are_held(folder: Path, tmp_path: Path, most: int) -> None:
    processes = {pid: add_process(folder, pid, dict.fromkeys(GPU_IDS, pid)) for pid in (100, 200)}
    book = ProcessBook(Sysfs(tmp_path), Descriptors(most))
    assert [process.bytes_by_gpu for process in book.read(GPU_IDS)] == [
        dict.fromkeys(GPU_IDS, 100),
        dict.fromkeys(GPU_IDS, 200),
    ]
    assert open_below(folder) == {0: 0, 4: 3, 1000: 6}[most]
    (processes[200] / "vram_12").write_text("5\n", encoding="utf-8")
    assert [process.bytes_by_gpu[12] for process in book.read([11])] == [100, 200]  # nobody said that 12 is stale
    assert [process.bytes_by_gpu[12] for process in book.read([12])] == [100, 5]


def test_files_of_ended_processes_are_closed_and_their_room_is_used_again(folder: Path, tmp_path: Path) -> None:
    book = ProcessBook(Sysfs(tmp_path), Descriptors(3))
    for pid in range(100, 110):
        process = add_process(folder, pid, dict.fromkeys(GPU_IDS, pid))
        assert [found.pid for found in book.read(GPU_IDS)] == [pid]
        assert open_below(folder) == len(GPU_IDS)
        shutil.rmtree(process)
        assert book.read(GPU_IDS) == ()
        assert open_below(folder) == 0


def test_a_process_number_that_is_used_again_shows_the_new_process(folder: Path, tmp_path: Path) -> None:
    process = add_process(folder, 100, {11: 1})
    book = ProcessBook(Sysfs(tmp_path), Descriptors(10))
    book.read(GPU_IDS)
    process.rename(tmp_path / "gone")
    add_process(folder, 100, {12: 2})
    assert [found.bytes_by_gpu for found in book.read([])] == [{12: 2}]
    assert open_below(tmp_path) == 1


def test_a_file_that_stops_answering_reads_as_no_bytes_and_leaves_the_others(folder: Path, tmp_path: Path) -> None:
    process = add_process(folder, 100, dict.fromkeys(GPU_IDS, 9))
    book = ProcessBook(Sysfs(tmp_path), Descriptors(10))
    book.read(GPU_IDS)
    held = next(number for number, target in targets().items() if target == str(process / "vram_12"))
    directory = os.open(tmp_path, os.O_RDONLY)
    os.dup2(directory, held)  # reading a directory is an error, as reading the file of a GPU in reset is
    os.close(directory)
    (process / "vram_12").write_text("broken", encoding="utf-8")
    (process / "vram_13").write_text("8", encoding="utf-8")
    assert [found.bytes_by_gpu for found in book.read(GPU_IDS)] == [{11: 9, 12: 0, 13: 8}]


def test_a_file_that_cannot_be_opened_holds_none(folder: Path, tmp_path: Path) -> None:
    process = add_process(folder, 100, dict.fromkeys(GPU_IDS, 9))
    (process / "vram_14").symlink_to(tmp_path / "nowhere")
    book = ProcessBook(Sysfs(tmp_path), Descriptors(10))
    assert [found.bytes_by_gpu for found in book.read(GPU_IDS)] == [{11: 9, 12: 9, 13: 9, 14: 0}]
    assert open_below(folder) == 0


def test_a_reader_that_is_dropped_leaves_nothing_open(folder: Path, tmp_path: Path) -> None:
    add_process(folder, 100, dict.fromkeys(GPU_IDS, 9))
    book = ProcessBook(Sysfs(tmp_path), Descriptors(10))
    book.read(GPU_IDS)
    assert open_below(folder) == len(GPU_IDS)
    del book
    assert open_below(folder) == 0
