"""Where regions lie: any user may make a folder in shared memory first, under the name that is ours."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aimgpu.errors import RegionUnusable
from aimgpu.isolation.interposer import Interposer, regions_directory
from aimgpu.units import GIB

NOBODY = 65534


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """The folder in shared memory that a daemon with this home would use."""
    if not os.access("/dev/shm", os.W_OK):  # noqa: S108
        pytest.skip("no shared memory here")
    folder = regions_directory(tmp_path).parent
    assert folder.is_relative_to("/dev/shm")  # noqa: S108
    yield folder
    _remove(folder)


def test_a_folder_that_another_user_made_first_is_not_used(tmp_path: Path, in_memory: Path) -> None:
    if os.getuid():
        pytest.skip("only root can make a folder for another user")
    in_memory.mkdir(mode=0o777)
    os.chown(in_memory, NOBODY, NOBODY)
    with _region(tmp_path) as path:
        assert path.is_relative_to(tmp_path)
    assert not list(in_memory.iterdir())


def test_a_link_that_was_made_first_is_not_followed(tmp_path: Path, in_memory: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    in_memory.symlink_to(elsewhere)
    with _region(tmp_path) as path:
        assert path.is_relative_to(tmp_path)
    assert not list(elsewhere.iterdir())


def plant_folder(folder: Path, elsewhere: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, NOBODY, NOBODY)


def plant_folder_with_regions(folder: Path, elsewhere: Path) -> None:
    plant_folder(folder, elsewhere)
    (folder / "regions").mkdir()
    os.chown(folder / "regions", NOBODY, NOBODY)


def plant_link(folder: Path, elsewhere: Path) -> None:
    folder.symlink_to(elsewhere)


def plant_link_below_own(folder: Path, elsewhere: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "regions").symlink_to(elsewhere)


def plant_file(folder: Path, elsewhere: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "regions").write_text("")


PLANTED = [plant_folder, plant_folder_with_regions, plant_link, plant_link_below_own, plant_file]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder for another user")
@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_after_the_folder_was_chosen_is_not_used(
    tmp_path: Path, in_memory: Path, plant: Callable[[Path, Path], None]
) -> None:
    """Between the choice of the folder and the first region on it, any user may act."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.chown(elsewhere, NOBODY, NOBODY)
    chosen = Interposer(regions_directory(tmp_path))
    plant(in_memory, elsewhere)
    with pytest.raises(RegionUnusable, match=r"is a link|belongs to another user|as a folder"):
        chosen.region("0", memory_bytes=GIB)
    assert not [path for path in in_memory.rglob("*") if path.name.endswith(".region")]
    assert not list(elsewhere.iterdir())
    _remove(in_memory)
    with contextlib.closing(chosen.region("0", memory_bytes=GIB)) as region:  # once it was removed, as the hint says
        assert region.path.is_relative_to(in_memory)


def test_two_that_make_the_folder_at_once_both_have_it(tmp_path: Path, in_memory: Path) -> None:
    at_once = threading.Barrier(8)

    def make(number: int) -> Path:
        at_once.wait()
        with contextlib.closing(Interposer(regions_directory(tmp_path)).region(str(number), memory_bytes=GIB)) as region:
            return region.path

    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(make, range(8)))
    assert {path.parent for path in paths} == {in_memory / "regions"}
    assert in_memory.stat().st_mode & 0o777 == 0o700


@contextlib.contextmanager
def _region(home: Path) -> Iterator[Path]:
    """A region as the daemon with this home makes it."""
    with contextlib.closing(Interposer(regions_directory(home)).region("0", memory_bytes=GIB)) as region:
        yield region.path


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
