"""The one thread that decides what changes on this machine.

Plans are made on what is wanted, what there is and what is under way. Were two made side by side, each would count on the same
room. So all are made here, one after another. The rules:

1. A decision touches memory and the ledger. What it needs from the world is read before, in other threads.
2. A call that places nothing (a release, a sleep, an end) is decided in the order in which it came. It waits for no GPU.
3. What is to be placed waits in a list until
   a. the repairs of a start are through,
   b. what it waits for has ended: an operation that holds its deployment or its room, or a change of layout,
   c. the GPUs were read after that, under the layouts of now.
4. What is due is placed in the order in which it came. Restarts come last and are handed over together.
5. One thread reads the GPUs for all that wait by then. What comes meanwhile is placed on the next reading.
   A reading that fails is the answer to those that waited for it.
6. Once the daemon stops, nothing waits: what is in the list is refused.

After each decision the whole list is looked at. No event says what became possible, so none can be lost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from aimgpu.control.effects import Effects, Flag, Thread
from aimgpu.control.plan.prepared import Prepared
from aimgpu.control.snapshots import Reading
from aimgpu.domain import Deployment
from aimgpu.errors import AimGpuError, Conflict

T = TypeVar("T")
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class NotYet:
    """What is to be placed waits until this holds."""

    until: Callable[[], bool]
    then_none: bool = False  # that is the answer then: the caller looks at the world again


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A deployment that is wanted already and is to be placed again, prepared."""

    deployment: Deployment
    ready: Mapping[str, Prepared]


@dataclass(slots=True, eq=False)
class _Answer(Generic[T]):
    """What one thread waits for."""

    done: Flag
    value: list[T] = field(default_factory=list)
    error: BaseException | None = None

    def settle(self, value: T) -> None:
        self.value.append(value)
        self.done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()

    def wait(self) -> T:
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.value[0]


@dataclass(slots=True, eq=False, kw_only=True)
class Placing:
    """One that is to be placed. `attempt` places it, or returns what must come first; then it is called again."""

    attempt: Callable[[Reading], Any | NotYet]
    answer: _Answer[Any]
    restart: Restart | None
    after: int = 0  # the first reading that is recent enough
    waits: NotYet | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has no answer yet."""
        return not self.answer.done.is_set()

    @property
    def order(self) -> int:
        """What was asked for just now, then restarts by their priority."""
        return -100 if self.restart is None else -self.restart.deployment.ask.priority.rank


class Loop:
    """Thread-safe. `read` reads the GPUs."""

    def __init__(self, effects: Effects, read: Callable[[], Reading]) -> None:
        self._effects = effects
        self._read = read
        self._changed = effects.condition()  # guards the next three
        self._posted: list[Callable[[], None]] = []
        self._thread: Thread | None = None
        self._closed = False
        # From here on of the loop's thread alone; the first two may be read by others.
        self.ending = False  # the daemon stops: nothing is placed any more
        self.layouts_version = 0  # changes when a change of layout begins and when it ends
        self.place_together: Callable[[Sequence[Placing], Reading], None] = lambda *_: None  # those that it can
        self._held = 0  # repairs that are under way
        self._placings: list[Placing] = []
        self._begun = 0  # readings
        self._reads = False
        self._last: tuple[int, int, Reading | BaseException] | None = (
            None  # its number, and the layouts that it was begun under
        )

    # --- in any other thread ---

    def decide(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises on the thread of the loop."""
        answer = _Answer[T](self._effects.flag())

        def work() -> None:
            try:
                answer.settle(call())
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
                answer.fail(error)

        self._post(work)
        return answer.wait()

    def place(self, attempt: Callable[[Reading], T | NotYet], restart: Restart | None = None) -> T:
        """What `attempt` returns or raises, once it does not return `NotYet`."""
        answer = _Answer[T](self._effects.flag())
        placing = Placing(attempt=attempt, answer=answer, restart=restart)
        self._post(lambda: self._add(placing))
        return answer.wait()

    @contextmanager
    def placing_nothing(self) -> Iterator[None]:
        """What is to be placed meanwhile waits until this ends."""
        self.decide(lambda: self._hold(1))
        try:
            yield
        finally:
            self.decide(lambda: self._hold(-1))

    def close(self) -> None:
        """Decides nothing more; those that wait hear that the daemon stops."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def end(self) -> None:
        """Rule 6 holds from here on. To be decided, as `go_on`."""
        self.ending = True

    def go_on(self) -> None:
        """The daemon does not stop after all."""
        self.ending = False

    def require(self) -> None:
        """Raises where it is not called on the thread of the loop."""
        if self._thread is None or not self._effects.is_current(self._thread):
            raise RuntimeError("decided outside the loop")

    def _post(self, work: Callable[[], None]) -> None:
        with self._changed:
            if self._closed:
                raise stopping()
            if self._thread is None:
                self._thread = self._effects.start(self._run, "loop")
            elif self._effects.is_current(self._thread):
                raise RuntimeError("the loop cannot wait for itself")
            self._posted.append(work)
            self._changed.notify_all()

    # --- in its own ---

    def _run(self) -> None:
        while posted := self._take():
            for work in posted:
                work()
            self._look()
        for one in self._placings:
            one.answer.fail(stopping())

    def _take(self) -> list[Callable[[], None]]:
        """Empty where it is closed and nothing is left to do."""
        with self._changed:
            while not self._posted and not self._closed:
                self._changed.wait()
            taken, self._posted = self._posted, []
            return taken

    def _hold(self, change: int) -> None:
        self._held += change

    def _add(self, placing: Placing) -> None:
        placing.after = self._begun + 1
        self._placings.append(placing)

    def _look(self) -> None:
        """Rules 3 to 6."""
        if self.ending:
            for one in self._placings:
                one.answer.fail(stopping())
        elif not self._held:
            self._place()
        self._placings = [one for one in self._placings if one.is_open]

    def _place(self) -> None:
        for one in self._placings:
            if one.waits is not None and one.waits.until():
                if one.waits.then_none:
                    one.answer.settle(None)
                one.waits, one.after = None, self._begun + 1
        if self._last is not None:
            number, version, found = self._last
            due = [one for one in self._placings if one.is_open and one.waits is None and one.after <= number]
            self._place_on(found, version, sorted(due, key=lambda one: one.order))
        if not self._reads and any(one.is_open and one.waits is None for one in self._placings):
            self._begin_reading()

    def _place_on(self, found: Reading | BaseException, version: int, due: Sequence[Placing]) -> None:
        if isinstance(found, BaseException):
            for one in due:
                one.answer.fail(found)
            return
        restarts = [one for one in due if one.restart is not None]
        if len(restarts) > 1 and version == self.layouts_version:
            try:
                self.place_together(restarts, found)
            except AimGpuError:
                pass  # each is placed alone
            except BaseException as error:  # noqa: BLE001 - raised again in the threads that wait for it
                for one in restarts:
                    one.answer.fail(error)
        for one in due:
            if version != self.layouts_version:
                one.after = self._begun + 1
            elif one.is_open:
                self._try(one, found)

    def _try(self, placing: Placing, reading: Reading) -> None:
        try:
            found = placing.attempt(reading)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            placing.answer.fail(error)
            return
        if isinstance(found, NotYet):
            placing.waits = found
        else:
            placing.answer.settle(found)

    def _begin_reading(self) -> None:
        self._reads, self._begun = True, self._begun + 1
        number, version = self._begun, self.layouts_version

        def read() -> None:
            found: Reading | BaseException
            try:
                found = self._read()
            except BaseException as error:  # noqa: BLE001 - raised again by those that wait for it
                found = error
            self._note(number, version, found)

        try:
            self._effects.start(read, "read-gpus")
        except RuntimeError:  # no thread is available: nothing is decided meanwhile
            read()

    def _note(self, number: int, version: int, found: Reading | BaseException) -> None:
        """In any thread."""

        def work() -> None:
            self._reads, self._last = False, (number, version, found)

        with self._changed:
            self._posted.append(work)
            self._changed.notify_all()


def stopping() -> Conflict:
    """What those that wait are refused with, once the daemon stops."""
    return Conflict("the daemon is stopping", hint="Start it again with `aimgpu up`.")
