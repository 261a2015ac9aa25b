"""Work on large bodies and answers, beside the event loop, so that no caller or engine holds up all others.

Two threads: Python gives the loop its turn every few milliseconds while they translate. A single call of the JSON parser keeps
it, so `body.has_more_values` bounds what it is given.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from aimgpu.errors import LoadShed

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")

LARGE_BYTES = 64 * 1024
_MOST_WAITING = 64
_RETRY_SECONDS = 2


class _Threads:
    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2, "gateway-large")
        self.waiting = 0


_threads = _Threads()


async def apart(size: int, work: Callable[_Given, _Found], *args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
    """What `work` returns or raises. At once where the body is small, else in a thread. `size`: of the body, in bytes."""
    if size <= LARGE_BYTES:
        return work(*args, **kwargs)
    _threads.waiting += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads.pool, lambda: work(*args, **kwargs))
    finally:
        _threads.waiting -= 1


def check_waiting() -> None:
    """Before a large body is begun with. Raises LoadShed where many wait."""
    if _threads.waiting >= _MOST_WAITING:
        text = "Too many large requests are being read at once."
        raise LoadShed(text, hint="Try again, or send less.", retry_after_seconds=_RETRY_SECONDS)
