"""Work side by side in threads of its own: no pool is shared, so nothing that hangs keeps anything else from running."""

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from aimgpu.control.effects import REAL, Effects, Thread

T = TypeVar("T")


class _Call(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error

    @property
    def value(self) -> T:
        if self.error is not None:
            raise self.error
        return self._value[0]


def side_by_side(calls: Sequence[Callable[[], T]], name: str, effects: Effects = REAL) -> list[T]:
    """Returns when all have ended, and raises the first error of any; one call alone runs in the caller's thread."""
    running = [_Call(call) for call in calls]
    if len(running) == 1:
        running[0]()
    else:
        threads = [_start(call, name, effects) for call in running]
        for thread in threads:
            if thread is not None:
                thread.join()
    return [call.value for call in running]


def _start(call: Callable[[], object], name: str, effects: Effects) -> Thread | None:
    """None: no thread was available, and it ran in the caller's."""
    try:
        return effects.start(call, name)
    except RuntimeError:
        call()
        return None


class Background:
    """Threads that are not waited for until the end."""

    def __init__(self, effects: Effects = REAL) -> None:
        self._effects = effects
        self._running: dict[int, Thread | None] = {}  # None: it is being started
        self._numbers = itertools.count()
        self._lock = effects.lock()
        self._closed = False

    def run(self, call: Callable[[], object], name: str) -> None:
        """Does nothing once closed: the next start sees to it. Raises RuntimeError where no thread is available."""
        number = next(self._numbers)

        def work() -> None:
            try:
                call()
            finally:
                with self._lock:
                    self._running.pop(number, None)

        with self._lock:
            if self._closed:
                return
            self._running[number] = None
        try:
            thread = self._effects.start(work, name)
        except RuntimeError:
            with self._lock:
                self._running.pop(number, None)
            raise
        with self._lock:
            if number in self._running:
                self._running[number] = thread

    @property
    def busy(self) -> bool:
        """Whether one of them runs."""
        with self._lock:
            return bool(self._running)

    def close(self, timeout_seconds: float) -> bool:
        """Take no more, and wait for what runs; False where something did not end in time."""
        with self._lock:
            self._closed = True
            left = [thread for thread in self._running.values() if thread is not None]
        deadline = self._effects.now() + timeout_seconds
        for thread in left:
            if not self._effects.is_current(thread):
                thread.join(max(0.0, deadline - self._effects.now()))
        return not any(thread.is_alive() for thread in left)
