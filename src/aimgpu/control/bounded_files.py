"""Reads a file that a user named, however odd it is: no pipe is waited for without end, no device fills the memory."""

import errno
import os
from pathlib import Path


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """All of it. Raises OSError where it is larger, or a pipe by name; one that a shell made (/dev/fd/63) has a writer."""
    if path.is_fifo() and not path.is_relative_to("/dev"):
        raise OSError(errno.EINVAL, "it is a pipe", str(path))
    with path.open("rb") as stream:
        data = stream.read(min(os.fstat(stream.fileno()).st_size, most_bytes))
        rest = bytearray(data)
        while len(rest) <= most_bytes and (piece := stream.read(1 << 20)):  # a pipe or a device tells no size
            rest += piece
    if len(rest) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", str(path))
    return bytes(rest)
