"""A long question to an engine that can be given up: its asker is released, the engine dies, or it takes too long."""

from collections.abc import Callable
from dataclasses import dataclass

from aimgpu.control.effects import REAL, Effects, Flag


class Cancelled(Exception):
    """The instance was released while it was starting, waking or falling asleep."""


@dataclass(slots=True)
class _Answer:
    done: Flag
    error: BaseException | None = None


def call_cancellable(
    call: Callable[[], None], give_up: Callable[[], None], *, poll_seconds: float, bound_seconds: float, effects: Effects = REAL
) -> None:
    """Runs `call` in a thread of its own and raises what it raises; `give_up` raises where waiting has become pointless.

    A call that was given up goes on until its engine is stopped, and its result is dropped. Raises TimeoutError at the bound.
    """
    answer = _Answer(done=effects.flag())

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            answer.error = error
        finally:
            answer.done.set()

    try:
        effects.start(work, "patience")
    except RuntimeError:  # no thread is available: then it cannot be given up
        work()
    deadline = effects.now() + bound_seconds
    while not answer.done.wait(poll_seconds):
        give_up()
        if effects.now() >= deadline:
            raise TimeoutError
    if answer.error is not None:
        raise answer.error
