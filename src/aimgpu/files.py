"""Files on disk: whole or not at all, private from the first byte, bounded when a user named them."""

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_CHUNK = 1 << 20


def write_private(path: Path, text: str) -> None:
    """Replace `path` with `text`, readable by its owner alone. Readers see the old content or the new, never half of it.

    Safe beside other writers of the same path: each writes a file of its own name, and the last rename wins.
    """
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)  # noqa: PTH105 -- `scratch` is text
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)  # noqa: PTH108
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `<path>.lock`: a read, a change and a write of `path` by two processes would otherwise lose one change."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """All of it. Raises OSError where it is larger, or a named pipe; one that a shell made (/dev/fd/63) has a writer."""
    if path.is_fifo() and not path.is_relative_to("/dev"):
        raise OSError(errno.EINVAL, "it is a pipe", str(path))
    with path.open("rb") as stream:
        data = bytearray(stream.read(min(os.fstat(stream.fileno()).st_size, most_bytes)))
        while len(data) <= most_bytes and (piece := stream.read(_CHUNK)):  # a pipe or a device reports no size
            data += piece
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", str(path))
    return bytes(data)


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder of what can be fetched or built again: AIMGPU_CACHE, else the user's cache folder by the XDG rules."""
    if own := environment.get("AIMGPU_CACHE"):
        return Path(own).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "aimgpu"
