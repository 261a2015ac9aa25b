"""Threads of which one runs at a time. At each switching point the next is drawn from the seed; time passes when all wait."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.control.world import Crashed


class Stuck(Exception):
    """Everything waits for something that nothing will bring about."""


@dataclass(eq=False)
class Life:
    """One process of the daemon: its threads end together."""

    dead: bool = False


@dataclass(eq=False)
class SimThread:
    name: str
    number: int
    life: Life | None
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    until: Callable[[], bool] | None = None  # None: it can go on
    deadline: float | None = None
    ended: bool = False


class Scheduler:
    def __init__(self, seed: int, *, most_steps: int = 400_000) -> None:
        self.chance = random.Random(seed)
        self.clock = 1000.0
        self.wall_offset = 0.0
        self.steps = 0
        self.held = 0  # a transaction is open: nobody else could get the ledger, so nothing switches
        self.trace = 0  # of which thread ran when: the same for the same seed
        self._most_steps = most_steps
        self._threads: list[SimThread] = []
        self._number = 0
        self._current: SimThread | None = None
        self._over = threading.Event()
        self.error: BaseException | None = None

    @property
    def current(self) -> SimThread:
        assert self._current is not None
        return self._current

    def run(self, main: Callable[[], None]) -> None:
        """Returns when `main` has ended; what it raises is raised here."""
        self._current = self.spawn(main, "main", None, is_main=True)
        self._current.baton.release()
        self._over.wait()
        if self.error is not None:
            raise self.error

    def spawn(self, call: Callable[[], object], name: str, life: Life | None, *, is_main: bool = False) -> SimThread:
        self._number += 1
        thread = SimThread(name=name, number=self._number, life=life)

        def work() -> None:
            thread.baton.acquire()
            try:
                self.check_life(thread)
                call()
            except Crashed:
                pass
            except BaseException as error:  # noqa: BLE001 - raised where the simulation was started
                self.error = self.error or error
            thread.ended = True
            self._threads.remove(thread)
            if is_main or self.error is not None:
                self._over.set()
                return
            self._pass_on(None)

        self._threads.append(thread)
        threading.Thread(target=work, name=name, daemon=True).start()
        return thread

    def switch(self) -> None:
        """Another may go on here, or the same one."""
        if not self.held:
            self._pass_on(self.current)

    def block(self, until: Callable[[], bool] | None, deadline: float | None = None) -> bool:
        """Until it holds, or until then; True where it holds."""
        if self.held:
            raise Stuck("something waits inside a transaction")
        mine = self.current
        mine.until, mine.deadline = until or (lambda: False), deadline
        self._pass_on(mine)
        held = mine.until()
        mine.until = mine.deadline = None
        self.check_life(mine)
        return held

    def end(self, life: Life) -> None:
        """Its threads end where they are, and it writes nothing more."""
        life.dead = True
        if self._current is not None and self._current.life is life:
            raise Crashed

    def fail(self, error: Exception) -> Exception:
        """The simulation ends with it, whoever catches it on its way."""
        self.error = self.error or error
        return error

    def wait_for_end(self, life: Life) -> None:
        self.block(lambda: not any(thread.life is life for thread in self._threads))

    def left(self, life: Life) -> list[str]:
        return [thread.name for thread in self._threads if thread.life is life]

    def _pass_on(self, mine: SimThread | None) -> None:
        try:
            found = self._choose()
        except BaseException as error:  # noqa: BLE001 - no thread can go on
            self.error = self.error or error
            self._over.set()
            if mine is not None:
                mine.baton.acquire()  # for ever
            return
        self._current = found
        if found is not mine:
            found.baton.release()
            if mine is not None:
                mine.baton.acquire()
        if mine is not None and mine.until is None:
            self.check_life(mine)

    def _choose(self) -> SimThread:
        self.steps += 1
        if self.error is not None:
            raise self.error
        if self.steps > self._most_steps:
            raise Stuck(f"no end after {self.steps} steps: {sorted(thread.name for thread in self._threads)}")
        while True:
            ready = [thread for thread in self._threads if self._can_go_on(thread)]
            if ready:
                found = ready[0] if len(ready) == 1 else self.chance.choice(ready)
                self.trace = (self.trace * 1_000_003 + found.number) % (1 << 61)
                return found
            deadlines = [thread.deadline for thread in self._threads if thread.deadline is not None]
            if not deadlines:
                raise Stuck(f"nothing will end the wait of {sorted(thread.name for thread in self._threads)}")
            self.clock = max(self.clock, min(deadlines))

    def _can_go_on(self, thread: SimThread) -> bool:
        if thread.until is None or (thread.life is not None and thread.life.dead):
            return True
        return thread.until() or (thread.deadline is not None and thread.deadline <= self.clock)

    def check_life(self, thread: SimThread) -> None:
        if thread.life is not None and thread.life.dead:
            raise Crashed
