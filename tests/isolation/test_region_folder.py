"""Where regions lie: any user may make a folder in shared memory first, under the name that is ours."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        folder.rmdir()


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


@contextlib.contextmanager
def _region(home: Path) -> Iterator[Path]:
    """A region as the daemon with this home makes it."""
    with contextlib.closing(Interposer(regions_directory(home)).region("0", memory_bytes=GIB)) as region:
        yield region.path
