"""The door to the world for everything in control: clock, pauses, threads, locks, chance and /proc.

What asks hardware, engines, launchers, isolators and models goes through the protocols in `Dependencies`. Both can be replaced:
`tests/simulation` runs control with a clock and a scheduler of its own, one thread at a time, the same way for the same seed.
Nothing in control takes time, a thread or a lock from anywhere else.
"""

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

from aimgpu.procfs import ProcessEntry, is_stopped, read_processes


class Lock(Protocol):
    """As threading's."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...  # noqa: FBT001, FBT002 - as threading's

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> object: ...


class Mutex(Lock, Protocol):
    """A lock that shows whether somebody holds it."""

    def locked(self) -> bool: ...


class Flag(Protocol):
    """As threading.Event."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Condition(Protocol):
    """As threading's."""

    def wait(self, timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> object: ...


class Thread(Protocol):
    """As threading's, once started."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Effects(Protocol):
    """What control takes from the world beside its dependencies."""

    def now(self) -> float:
        """Steady clock, in seconds."""
        ...

    def wall_ms(self) -> int:
        """Wall clock: for what is kept over restarts of the daemon."""
        ...

    def pause(self, seconds: float) -> None: ...

    def jitter(self) -> float:
        """Between 0 and 1."""
        ...

    def new_token(self) -> str:
        """Six hexadecimal digits, for the id of an instance."""
        ...

    def lock(self) -> Mutex: ...

    def permits(self, count: int) -> Lock:
        """A lock that `count` callers may hold at once."""
        ...

    def flag(self) -> Flag: ...

    def condition(self) -> Condition: ...

    def start(self, call: Callable[[], object], name: str) -> Thread:
        """In a thread of its own. Raises RuntimeError where no thread is available."""
        ...

    def is_current(self, thread: Thread) -> bool:
        """Whether this thread calls."""
        ...

    def read_processes(self) -> Iterable[ProcessEntry]:
        """All of this machine."""
        ...

    def is_stopped(self, pid: int) -> bool:
        """By a signal."""
        ...


class RealEffects:
    """Those of this machine."""

    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def jitter(self) -> float:
        return random.random()  # noqa: S311 - no secret

    def new_token(self) -> str:
        return secrets.token_hex(3)

    def lock(self) -> Mutex:
        return threading.Lock()

    def permits(self, count: int) -> Lock:
        return threading.BoundedSemaphore(count)

    def flag(self) -> Flag:
        return threading.Event()

    def condition(self) -> Condition:
        return threading.Condition()

    def start(self, call: Callable[[], object], name: str) -> Thread:
        thread = threading.Thread(target=call, name=name, daemon=True)
        thread.start()
        return thread

    def is_current(self, thread: Thread) -> bool:
        return thread is threading.current_thread()

    def read_processes(self) -> Iterable[ProcessEntry]:
        return read_processes()

    def is_stopped(self, pid: int) -> bool:
        return is_stopped(pid)


REAL = RealEffects()
