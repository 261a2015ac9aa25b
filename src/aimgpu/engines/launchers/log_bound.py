"""Keeps a log from filling the disk while its engine goes on appending to it.

An engine holds the file open and outlives the daemon, so the file can neither be renamed under it nor fed through a pipe of
ours. Linux can take whole blocks off the beginning of a file (ext4, XFS): nothing is lost, and nothing has to be written.
Elsewhere the end is read, the file emptied and the end put back; what the engine writes in that instant may stand before it.
Both work because logs are opened to append: the next line goes to wherever the file ends then.
"""

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from aimgpu.units import MIB

_COLLAPSE_RANGE = 0x08  # FALLOC_FL_COLLAPSE_RANGE, include/uapi/linux/falloc.h
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBounds:
    """When a log is cut, and what is kept."""

    largest_bytes: int = 16 * MIB
    kept_bytes: int = 8 * MIB


def bound_log(path: Path, bounds: LogBounds | None = None) -> bool:
    """Whether it was cut. A log that is gone or cannot be written is left alone: its engine matters more."""
    bounds = bounds or LogBounds()
    with contextlib.suppress(OSError):
        if path.stat().st_size <= bounds.largest_bytes:
            return False
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            surplus = os.fstat(descriptor).st_size - bounds.kept_bytes
            if surplus > 0 and not _collapse(descriptor, surplus):
                _rewrite(descriptor, bounds.kept_bytes)
        finally:
            os.close(descriptor)
        return True
    return False


def _collapse(descriptor: int, surplus_bytes: int) -> bool:
    block = os.fstatvfs(descriptor).f_bsize
    whole = surplus_bytes - surplus_bytes % block
    if whole == 0:
        return False
    fallocate = getattr(_LIBC, "fallocate", None)
    if fallocate is None:
        return False
    done: int = fallocate(ctypes.c_int(descriptor), ctypes.c_int(_COLLAPSE_RANGE), ctypes.c_int64(0), ctypes.c_int64(whole))
    return done == 0


def _rewrite(descriptor: int, kept_bytes: int) -> None:
    """Empty it before writing: on a full disk there is room for the end only then."""
    start = max(0, os.fstat(descriptor).st_size - kept_bytes)
    kept = b""
    while piece := os.pread(descriptor, MIB, start + len(kept)):  # until it was caught up with
        kept += piece
    os.ftruncate(descriptor, 0)
    kept = kept[-kept_bytes:]
    while kept:
        kept = kept[os.write(descriptor, kept) :]
