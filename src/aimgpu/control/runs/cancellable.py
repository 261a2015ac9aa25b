"""A long question to an engine that can be given up: its asker is released, the engine dies, or it takes too long."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


class Cancelled(Exception):
    """The instance was released while it was starting, waking or falling asleep."""


@dataclass(slots=True)
class _Answer:
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


def call_cancellable(
    call: Callable[[], None], give_up: Callable[[], None], *, poll_seconds: float, bound_seconds: float
) -> None:
    """Runs `call` in a thread of its own and raises what it raises; `give_up` raises where waiting has become pointless.

    A call that was given up goes on until its engine is stopped, and its result is dropped. Raises TimeoutError at the bound.
    """
    answer = _Answer()

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            answer.error = error
        finally:
            answer.done.set()

    threading.Thread(target=work, name="patience", daemon=True).start()
    deadline = time.monotonic() + bound_seconds
    while not answer.done.wait(poll_seconds):
        give_up()
        if time.monotonic() >= deadline:
            raise TimeoutError
    if answer.error is not None:
        raise answer.error
