"""One manager a machine: a lock that the kernel drops when its holder dies, however it dies."""

import fcntl
import os
import time
from pathlib import Path
from typing import Self

from aimgpu.errors import LedgerOwned

# A child that its parent was just starting keeps the lock until its exec is through; a dead owner's lock is worth a short wait.
_TRIES_FOR_A_DEAD_OWNER = 50
_PAUSE_SECONDS = 0.02


class Owner:
    """Holds `<folder>/owner.lock` for as long as this process lives or until `release`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, folder: Path) -> Self:
        """Raises LedgerOwned with the pid of the process that has it."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Never inherited: an engine that outlives the daemon must not keep the lock.
        descriptor = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def _lock(descriptor: int, folder: Path) -> None:
    for _ in range(_TRIES_FOR_A_DEAD_OWNER):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            if pid.isdigit() and Path(f"/proc/{pid}").exists():
                break
            time.sleep(_PAUSE_SECONDS)
        else:
            return
    raise LedgerOwned(
        f"another manager owns {folder} (pid {pid or 'unknown'})",
        hint="Use `aimgpu up --attach` to hand it your stack file, or stop it with `aimgpu down`. If these do not find it, "
        f"`kill {pid or 'PID'}` ends it, and the next start takes its models over.",
    )
