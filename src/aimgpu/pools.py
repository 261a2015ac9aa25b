"""Small pools of threads with a refusal when they are full: work that hangs holds up nothing but work of its own kind."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from aimgpu.errors import LoadShed

T = TypeVar("T")
P = ParamSpec("P")
_RETRY_SECONDS = 5


class SmallPool:
    """At most `at_once` pieces of work run and `waiting` wait; more are refused. Use it on one event loop.

    Its threads are daemon threads and not those of the loop: one that never returns does not keep the process from ending.
    """

    def __init__(self, name: str, *, at_once: int, waiting: int) -> None:
        self._name = name
        self._most = at_once + waiting
        self._held = 0
        self._free = asyncio.Semaphore(at_once)

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What `work` returns. A caller that leaves does not end it. Raises LoadShed when the pool is full."""
        if self._held >= self._most:
            text = f"Too many requests of this kind ({self._name}) are under way."
            raise LoadShed(text, hint="Try again in a moment.", retry_after_seconds=_RETRY_SECONDS)
        self._held += 1
        try:
            await self._free.acquire()
        except BaseException:
            self._held -= 1
            raise
        return await run_in_thread(lambda: work(*arguments, **named), self._name, self._leave)

    def _leave(self) -> None:
        self._held -= 1
        self._free.release()


async def run_in_thread(work: Callable[[], T], name: str, finished: Callable[[], None] = lambda: None) -> T:
    """In a thread of its own. `finished` is called on the loop when the work is done, waited for or not."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(error: BaseException | None, value: T | None) -> None:
        finished()
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", value))

    def run() -> None:
        error, value = None, None
        try:
            value = work()
        except Exception as raised:  # noqa: BLE001 - raised again where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error, value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
