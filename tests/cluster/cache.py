"""The folder that built programs and unpacked packages are kept in, shared by every checkout of this user."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.downloads import DownloadFailed

_failed: dict[Path, DownloadFailed] = {}  # of this process: what could not be had is not tried for every test


def cache_folder() -> Path:
    """``$AIMGPU_CLUSTER_CACHE``, else ``aimgpu/cluster`` in the user's cache folder."""
    given = os.environ.get("AIMGPU_CLUSTER_CACHE")
    folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aimgpu" / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached(key: str, make: Callable[[Path], None]) -> Path:
    """The folder of that key; the first caller fills it with ``make``, others on this machine wait for it.

    A folder is renamed to its key when it is complete, so that an interrupted build leaves nothing that looks finished.
    """
    folder = cache_folder() / key
    if folder.is_dir():
        return folder
    if folder in _failed:
        raise _failed[folder]
    with _locked(key):
        if folder.is_dir():
            return folder
        # A compiler of an interrupted build may write on for a while, so that its folder cannot be removed yet.
        for left in cache_folder().glob(f"{key}.unfinished*"):
            shutil.rmtree(left, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{key}.unfinished-", dir=cache_folder()))
        unfinished.chmod(0o755)
        try:
            make(unfinished)
        except DownloadFailed as error:
            _failed[folder] = error
            raise
        unfinished.rename(folder)
    return folder


@contextmanager
def _locked(key: str) -> Iterator[None]:
    with (cache_folder() / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
