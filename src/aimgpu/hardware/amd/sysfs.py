"""The one door to the kernel's files."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_MOST_BYTES = 1 << 16
_FEW_BYTES = 64
_MOST_DIGITS = 20  # of a 64-bit number
_MODE = re.compile(r"[A-Z][A-Z0-9]*")


class Sysfs:
    """Files below a root that is `/sys`, or a tree laid out like it. What is absent, hidden or gone reads as None.

    `dev` is where the device files of the same machine are.
    """

    def __init__(self, root: Path = Path("/sys"), dev: Path = Path("/dev")) -> None:
        self.root = str(root)
        self.dev = dev

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None where it cannot be read."""
        try:
            descriptor = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace").strip()
        except OSError:  # the kernel answers some reads with EPERM or ENODEV: a hidden partition, a GPU in reset
            return None
        finally:
            os.close(descriptor)

    def read_int(self, path: str) -> int | None:
        """The number in a file; None where there is none."""
        return parse_int(self.read(path))

    def read_all(self, directory: str, names: Iterable[str]) -> list[bytes]:
        """The first bytes of many files of one directory, whose path is walked once; none of a file that cannot be read."""
        return [_read_and_close(descriptor) for descriptor in self._open_each(directory, names)]

    def open_all(self, directory: str, names: Iterable[str]) -> list[int]:
        """Descriptors of all these files, to be closed by the caller; of none, where one of them cannot be opened."""
        found: list[int] = []
        for descriptor in self._open_each(directory, names):
            if descriptor is None:
                for opened in found:
                    os.close(opened)
                return []
            found.append(descriptor)
        return found

    def _open_each(self, directory: str, names: Iterable[str]) -> Iterator[int | None]:
        try:
            folder = os.open(f"{self.root}/{directory}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield from (None for _ in names)
            return
        try:
            for name in names:
                try:
                    yield os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
                except OSError:
                    yield None
        finally:
            os.close(folder)

    def list(self, path: str) -> list[str]:
        """Names in a folder; empty where it cannot be read."""
        try:
            return os.listdir(f"{self.root}/{path}")  # noqa: PTH208 - called for each poll; pathlib doubles its cost
        except OSError:
            return []

    def why_not_writable(self, path: str) -> OSError | None:
        """What opening the file for writing is answered with; None where it may be written. Writes nothing."""
        try:
            os.close(os.open(f"{self.root}/{path}", os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            return error
        return None

    def stamp(self, path: str) -> object:
        """Equal for as long as this is the same directory, not another of its name; None where there is none."""
        try:
            found = os.stat(f"{self.root}/{path}")  # noqa: PTH116 - called for each poll; pathlib doubles its cost
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns

    def write(self, path: str, text: str) -> None:
        """Raises the kernel's OSError; its errno says why."""
        descriptor = os.open(f"{self.root}/{path}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _read_and_close(descriptor: int | None) -> bytes:
    if descriptor is None:
        return b""
    try:
        return os.read(descriptor, _FEW_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def parse_int(text: str | None) -> int | None:
    """A count, decimal or 0x...; None where there is none, or where it is negative (an error code)."""
    try:
        value = int(text, 0) if text else -1
    except ValueError:
        return None
    return value if value >= 0 else None


def parse_properties(text: str) -> dict[str, int]:
    """KFD's `name value` lines; values that are not numbers are left out."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal() and len(value) <= _MOST_DIGITS:
            found[name] = int(value)
    return found


def parse_modes(text: str | None) -> tuple[str, ...]:
    """Modes of "SPX, DPX, CPX"; none of "Not supported", "UNKNOWN", anything else that is not a mode, or an absent file."""
    if text is None or " " in text.strip().replace(", ", ","):
        return ()
    names = (part.strip().upper() for part in text.split(","))
    return tuple(name for name in names if _MODE.fullmatch(name) and name != "UNKNOWN")
