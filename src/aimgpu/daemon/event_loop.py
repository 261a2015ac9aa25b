"""Calling into the gateway's event loop from other threads: what lives there needs no locks."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LONGEST_SECONDS = 30.0


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """Run `function` on the loop's thread and return what it returns; directly where this is that thread."""
    try:
        inside = asyncio.get_running_loop() is loop
    except RuntimeError:
        inside = False
    if inside:
        return function()

    async def run() -> T:
        return function()

    return asyncio.run_coroutine_threadsafe(run(), loop).result(_LONGEST_SECONDS)
