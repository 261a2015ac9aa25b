"""The log of an engine: a new one for each run, and its end fit to print."""

import os
import re
from pathlib import Path

LOG_NAME = "engine.log"
_LONGEST_TAIL_BYTES = 64 * 1024
_LONGEST_LINE = 500
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")
_ENDS = re.compile(r"[\r\n]+")  # progress bars overwrite themselves with \r


def open_log(path: Path) -> int:
    """A descriptor to append to; the log of the run before is kept once, as `<name>.1`."""
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def read_last_lines(path: Path, count: int) -> tuple[str, ...]:
    """The last lines that say something; bytes that are not text become "?" and lines are cut, never the caller's terminal."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LONGEST_TAIL_BYTES))
            raw = file.read(_LONGEST_TAIL_BYTES)
    except OSError:
        return ()
    text = _ESCAPES.sub("", raw.decode("utf-8", "replace"))
    lines = [_printable(line) for line in _ENDS.split(text)]
    return tuple(line for line in lines if line)[-count:] if count > 0 else ()


def _printable(line: str) -> str:
    plain = "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in line.strip())
    return plain if len(plain) <= _LONGEST_LINE else plain[: _LONGEST_LINE - 1] + "…"
