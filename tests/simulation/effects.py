"""What control takes from the world, on the scheduler: clock, pauses, threads, locks and chance."""

from collections.abc import Callable, Iterable
from types import TracebackType

from tests.simulation.scheduler import Life, Scheduler, SimThread

from aimgpu.control.effects import Thread
from aimgpu.procfs import ProcessEntry

_WALL_MS = 1_790_000_000_000


class SimLock:
    def __init__(self, scheduler: Scheduler, *, count: int = 1, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._free = count
        self._reentrant = reentrant
        self._owner: SimThread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as threading's
        scheduler = self._scheduler
        if self._reentrant and self._owner is scheduler.current:
            self._depth += 1
            return True
        scheduler.switch()
        if not self._free:
            if not blocking:
                return False
            deadline = scheduler.clock + timeout if timeout >= 0 else None
            if not scheduler.block(lambda: self._free > 0, deadline):
                return False
        self._free -= 1
        self._owner, self._depth = scheduler.current, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0 or not self._reentrant:
            self._owner = None
            self._free += 1

    def locked(self) -> bool:
        return self._free == 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.release()


class SimFlag:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        self._scheduler.switch()
        if self._set:
            return True
        deadline = None if timeout is None else self._scheduler.clock + timeout
        return self._scheduler.block(lambda: self._set, deadline)


class SimCondition(SimLock):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, reentrant=True)
        self._turn = 0

    def wait(self, timeout: float | None = None) -> bool:
        turn = self._turn
        self.release()
        deadline = None if timeout is None else self._scheduler.clock + timeout
        held = self._scheduler.block(lambda: self._turn != turn, deadline)
        self.acquire()
        return held

    def notify_all(self) -> None:
        self._turn += 1


class Started:
    def __init__(self, scheduler: Scheduler, thread: SimThread) -> None:
        self._scheduler = scheduler
        self.thread = thread

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else self._scheduler.clock + timeout
        self._scheduler.block(lambda: self.thread.ended, deadline)

    def is_alive(self) -> bool:
        return not self.thread.ended


class SimEffects:
    """Of one life of the daemon."""

    def __init__(self, scheduler: Scheduler, life: Life) -> None:
        self._scheduler = scheduler
        self._life = life

    def now(self) -> float:
        return self._scheduler.clock

    def wall_ms(self) -> int:
        return _WALL_MS + round((self._scheduler.clock + self._scheduler.wall_offset) * 1000)

    def pause(self, seconds: float) -> None:
        self._scheduler.block(None, self._scheduler.clock + seconds)

    def jitter(self) -> float:
        return self._scheduler.chance.random()

    def new_token(self) -> str:
        return f"{self._scheduler.chance.getrandbits(24):06x}"

    def lock(self) -> SimLock:
        return SimLock(self._scheduler)

    def permits(self, count: int) -> SimLock:
        return SimLock(self._scheduler, count=count)

    def flag(self) -> SimFlag:
        return SimFlag(self._scheduler)

    def condition(self) -> SimCondition:
        return SimCondition(self._scheduler)

    def start(self, call: Callable[[], object], name: str) -> Thread:
        return Started(self._scheduler, self._scheduler.spawn(call, name, self._life))

    def is_current(self, thread: Thread) -> bool:
        return isinstance(thread, Started) and thread.thread is self._scheduler.current

    def read_processes(self) -> Iterable[ProcessEntry]:
        return ()

    def is_stopped(self, pid: int) -> bool:
        return False
