"""The end of an engine's log, once or as it grows; bounded, and printable whatever the engine wrote."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

_BYTES_A_LINE = 400
_CHUNK = 1 << 16
_LOOK_AGAIN_SECONDS = 0.2
_MARK_BYTES = 256


def read_tail(path: Path, lines: int) -> str:
    return _printable(_tail(path, lines)[0])


async def follow_log(path: Path, lines: int, still_there: Callable[[], bool]) -> AsyncIterator[str]:
    """Ends when the instance is gone and everything it wrote was sent. A log whose beginning is cut off is followed on."""
    data, place = await asyncio.to_thread(_tail, path, lines)
    yield _printable(data)
    while True:
        there = await asyncio.to_thread(still_there)
        data, place = await asyncio.to_thread(_read_from, path, place)
        if data:
            yield _printable(data)
        elif not there:
            return
        else:
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """How far the log was read, and what stands before there: a log that is cut loses its beginning."""

    position: int = 0
    mark: bytes = b""


def _tail(path: Path, lines: int) -> tuple[bytes, _Place]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max(lines * _BYTES_A_LINE, _MARK_BYTES)))
            data = file.read(size - file.tell())
    except FileNotFoundError:
        return b"", _Place()
    shown = b"".join(data.splitlines(keepends=True)[-lines:]) if lines else b""
    return shown, _Place(position=size, mark=data[-_MARK_BYTES:])


def _read_from(path: Path, place: _Place) -> tuple[bytes, _Place]:
    """The lines after the mark. If the mark is gone, the log was replaced and is read from its beginning."""
    mark = place.mark
    try:
        with path.open("rb") as file:
            start = max(0, place.position - len(mark))
            file.seek(start)
            data = file.read(len(mark) + _CHUNK)
            if not data.startswith(mark):
                file.seek(0)
                data = file.read()
                start = data.rfind(mark)
                if start < 0:
                    start, mark = 0, b""
                data = data[start : start + len(mark) + _CHUNK]
    except FileNotFoundError:
        return b"", place
    return data[len(mark) :], _Place(position=start + len(data), mark=data[-_MARK_BYTES:])


def _printable(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
