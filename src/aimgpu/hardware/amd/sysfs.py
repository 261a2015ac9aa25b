"""The one door to the kernel's files."""

import os
from pathlib import Path

_MOST_BYTES = 1 << 16


class Sysfs:
    """Files below a root that is `/sys`, or a tree laid out like it. What is absent, hidden or gone reads as None."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        self.root = str(root)

    def read(self, path: str) -> str | None:
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
        return parse_int(self.read(path))

    def list(self, path: str) -> list[str]:
        try:
            return os.listdir(f"{self.root}/{path}")  # noqa: PTH208 - called for each poll; pathlib doubles its cost
        except OSError:
            return []

    def write(self, path: str, text: str) -> None:
        """Raises the kernel's OSError; its errno tells why."""
        descriptor = os.open(f"{self.root}/{path}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def parse_int(text: str | None) -> int | None:
    """An integer, decimal or 0x..., or None."""
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def parse_properties(text: str) -> dict[str, int]:
    """KFD's `name value` lines; values that are no numbers are left out."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            found[name] = int(value)
    return found


def parse_modes(text: str | None) -> tuple[str, ...]:
    """Modes of "SPX, DPX, CPX"; none of "Not supported", "UNKNOWN" or an absent file."""
    if text is None or " " in text.strip().replace(", ", ","):
        return ()
    return tuple(name for name in (part.strip().upper() for part in text.split(",")) if name and name != "UNKNOWN")
