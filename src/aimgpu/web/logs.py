"""The end of an engine's log, once or as it grows; bounded, and printable whatever the engine wrote."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

_BYTES_A_LINE = 400
_CHUNK = 1 << 16
_LOOK_AGAIN_SECONDS = 0.2


def read_tail(path: Path, lines: int) -> str:
    return _tail(path, lines)[0]


async def follow_log(path: Path, lines: int, still_there: Callable[[], bool]) -> AsyncIterator[str]:
    """Ends when the instance is gone and everything it wrote was sent."""
    text, position = await asyncio.to_thread(_tail, path, lines)
    yield text
    while True:
        there = await asyncio.to_thread(still_there)
        data = await asyncio.to_thread(_read_from, path, position)
        if data:
            position += len(data)
            yield _printable(data)
        elif not there:
            return
        else:
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)


def _tail(path: Path, lines: int) -> tuple[str, int]:
    if lines == 0:
        return "", path.stat().st_size if path.exists() else 0
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - lines * _BYTES_A_LINE))
            data = file.read(size - file.tell())
    except FileNotFoundError:
        return "", 0
    return _printable(b"".join(data.splitlines(keepends=True)[-lines:])), size


def _read_from(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(_CHUNK)
    except FileNotFoundError:
        return b""


def _printable(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
