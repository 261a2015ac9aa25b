"""What Ctrl-C, a closed terminal and a polite kill do to a command: they end it, or wait until something is whole."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """A closed terminal or a polite kill stops what we started, as Ctrl-C does."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def signals_answered(answer: Callable[[], object]) -> Iterator[None]:
    """None of them ends the block; each is only answered."""
    with _handling(ENDING, lambda *_: answer()):
        yield


@contextmanager
def signals_held() -> Iterator[None]:
    """Those that come within the block take effect at its end. Handlers are not inherited by programs started within."""
    came: list[int] = []
    with _handling(ENDING, lambda number, _: came.append(number)):
        yield
    for number in came:
        signal.raise_signal(number)


@contextmanager
def _handling(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """One that is ignored, as SIGHUP is under nohup, stays so. Only the main thread has handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: found for number in numbers if (found := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
