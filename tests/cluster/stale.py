"""Clusters whose test process was killed: found by their folder, and removed by the next start."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.cluster.control_groups import ControlGroups

OWNER = "owner"


def mark(folder: Path) -> None:
    """Write which process a cluster belongs to; a pid alone could be another process by then."""
    (folder / OWNER).write_text(f"{os.getpid()} {_started(os.getpid())}")


def remove_stale(prefix: str) -> None:
    for folder in Path("/var/tmp").glob(f"{prefix}*"):  # noqa: S108
        if _alive(folder):
            continue
        groups = ControlGroups(folder.name)
        with contextlib.suppress(OSError):
            groups.kill()
        unmount_below(folder)
        groups.remove()
        shutil.rmtree(folder, ignore_errors=True)


def unmount_below(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


def _alive(folder: Path) -> bool:
    try:
        pid, started = (folder / OWNER).read_text().split()
    except (OSError, ValueError):
        return folder.exists() and not (folder / "logs").exists()  # just being made
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """Start time in clock ticks since boot, field 22; the name in parentheses may hold spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "gone"
