"""Work side by side in threads of its own: no pool is shared, so nothing that hangs keeps anything else from running."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

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


def side_by_side(calls: Sequence[Callable[[], T]], name: str) -> list[T]:
    """Returns when all have ended, and raises the first error of any; one call alone runs in the caller's thread."""
    running = [_Call(call) for call in calls]
    if len(running) == 1:
        running[0]()
    else:
        threads = [threading.Thread(target=call, name=name, daemon=True) for call in running]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [call.value for call in running]


class Background:
    """Threads that are not waited for until the end."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, call: Callable[[], object], name: str) -> None:
        """Does nothing once closed: the next start sees to it."""

        def work() -> None:
            try:
                call()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            if self._closed:
                return
            self._threads.add(thread)
        thread.start()

    def close(self, timeout_seconds: float) -> bool:
        """Take no more, and wait for what runs; False where something did not end in time."""
        with self._lock:
            self._closed = True
            left = list(self._threads)
        deadline = time.monotonic() + timeout_seconds
        for thread in left:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in left)
