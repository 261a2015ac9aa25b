"""Room kept on the disk, so that a full one never keeps what is held from being given back."""

import contextlib
import os
from pathlib import Path

from aimgpu.units import MIB

# SQLite's write-ahead log begins again after 1000 pages of 4 KiB, and giving back makes the file itself no longer.
_BYTES = 5 * MIB


class Reserve:
    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Made where the disk has room; without it everything else works as before."""
        if self._path.exists():
            return
        part = self._path.with_name(self._path.name + ".part")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _BYTES)
            finally:
                os.close(descriptor)
            part.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def spend(self) -> bool:
        """Whether there was one, and its room is free now."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
