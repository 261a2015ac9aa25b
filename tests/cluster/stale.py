"""Clusters whose test process was killed: removed by their guard (``tests.cluster.guard``), or else by the next start.

All of a cluster has the name of its folder, so the folder is what is found by, and goes last. Only the standard library:
the guard runs without any other.
"""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.cluster.control_groups import ControlGroups

OWNER = "owner"
GONE = "gone"
MAKING_SECONDS = 60.0  # far more than there is between a folder and the mark in it


def mark(folder: Path) -> None:
    """Write which process a cluster belongs to; a pid alone could be another process by then."""
    (folder / OWNER).write_text(f"{os.getpid()} {started(os.getpid())}")


def is_owned(folder: Path) -> bool:
    """Whether the process that this cluster belongs to runs."""
    try:
        pid, then = (folder / OWNER).read_text().split()
    except (OSError, ValueError):
        return _is_being_made(folder)
    return started(int(pid)) == then


def remove_stale(prefix: str) -> None:
    for folder in Path("/var/tmp").glob(f"{prefix}*"):  # noqa: S108
        if not is_owned(folder):
            with contextlib.suppress(OSError):
                remove(folder)


def remove(folder: Path) -> None:
    """End the processes of a cluster and remove all else of it. Several may do so at once, and be killed meanwhile."""
    groups = ControlGroups(folder.name)
    groups.kill()
    _unmount_below(folder)
    groups.remove()
    if not groups.leftovers():
        _remove_folder(folder)


def _unmount_below(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


def _remove_folder(folder: Path) -> None:
    """The mark last: with it, what a removal that was interrupted left is still known to be nobody's."""
    for path in (folder / name for name in _names(folder) if name != OWNER):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):
        if _names(folder) == [OWNER]:
            (folder / OWNER).unlink()
        folder.rmdir()


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def _is_being_made(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime < MAKING_SECONDS and not (folder / "logs").exists()
    except FileNotFoundError:
        return False


def started(pid: int) -> str:
    """When a process that runs was started, in clock ticks since boot: field 22; the name in parentheses may hold spaces."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return GONE
    return GONE if fields[0] in ("Z", "X") else fields[19]
