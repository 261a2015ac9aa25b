"""Progress of downloads and loading: bars with a rate and the time left on a terminal, plain lines elsewhere.

Goes to stderr, so that stdout stays for the answer.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from aimgpu.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_PLAIN_STEP_PERCENT = 25  # a plain line at the start, then whenever it moved this far
_PERCENT = 100
_MOVING = ("queued", "loading", "draining")


class ProgressDisplay(Protocol):
    """Downloads and loading models, as they go on."""

    def update_bytes(self, what: str, done: int, total: int | None) -> None:
        """Bytes done so far, of a total where it is known. Fits `engines.protocols.Progress`."""

    def update_state(self, what: str, state: str, percent: int | None = None) -> None:
        """Where a thing with states stands ("loading", "ready"), with a percentage where it reports one."""

    def print_line(self, text: str) -> None:
        """A line above the bars."""


@contextmanager
def show_progress(stream: TextIO | None = None) -> Iterator[ProgressDisplay]:
    """A display for the length of the block."""
    target = stream or sys.stderr
    if not target.isatty():
        yield PlainProgress(target)
        return
    display = _TerminalProgress(target)
    with display.bars:
        yield display


@dataclass(slots=True)
class _Seen:
    started: float
    percent: int | None
    state: str | None = None


class PlainProgress:
    """Lines such as "smollm2: 25% of ~93.4MiB, ~10.1MiB/s, 7 s left"."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def update_bytes(self, what: str, done: int, total: int | None) -> None:
        """How much of a download is there."""
        percent = None if not total else min(done, total) * _PERCENT // total
        seen = self._seen.get(what)
        if seen is None:
            self._seen[what] = _Seen(self._clock(), percent)
            self.print_line(f"{what}: {format_bytes(total) if total else 'size unknown'}")
        elif self._moved_far(seen, percent):
            seen.percent = percent
            self.print_line(f"{what}: {percent}% of {format_bytes(total or 0)}{self._pace(seen, done, total or 0)}")

    def update_state(self, what: str, state: str, percent: int | None = None) -> None:
        """What a model is doing."""
        seen = self._seen.get(what)
        if seen is None or seen.state != state:
            self._seen[what] = _Seen(self._clock(), percent, state)
            self.print_line(f"{what}: {state}")
        elif self._moved_far(seen, percent):
            seen.percent = percent
            self.print_line(f"{what}: {state} {percent}%")

    def print_line(self, text: str) -> None:
        """A line above the moving ones."""
        self._stream.write(text + "\n")
        self._stream.flush()

    @staticmethod
    def _moved_far(seen: _Seen, percent: int | None) -> bool:
        if percent is None or percent == seen.percent:
            return False
        return percent >= _PERCENT or percent - (seen.percent or 0) >= _PLAIN_STEP_PERCENT

    def _pace(self, seen: _Seen, done: int, total: int) -> str:
        seconds = self._clock() - seen.started
        if seconds <= 0 or done <= 0:
            return ""
        rate = done / seconds
        left = "" if done >= total else f", {(total - done) / rate:.0f} s left"
        return f", {format_bytes(int(rate))}/s{left}"


class _TerminalProgress:
    def __init__(self, stream: TextIO) -> None:
        self.bars = _rich_bars(stream)
        self._tasks: dict[str, TaskID] = {}

    def update_bytes(self, what: str, done: int, total: int | None) -> None:
        """How much of a download is there."""
        amount = f"{format_bytes(done)} of {format_bytes(total)}" if total else format_bytes(done)
        self._show(what, done, total, amount, in_bytes=True)

    def update_state(self, what: str, state: str, percent: int | None = None) -> None:
        """What a model is doing."""
        moving = state.partition(" (")[0] in _MOVING
        total = _PERCENT if percent is not None or not moving else None  # None: a bar that pulses
        done = _PERCENT if state == "ready" else percent or 0
        amount = state if percent is None or not moving else f"{state} {percent}%"
        self._show(what, done, total, amount, in_bytes=False)

    def print_line(self, text: str) -> None:
        """A line above the moving ones."""
        self.bars.console.print(text, markup=False, highlight=False)

    def _show(self, what: str, done: int, total: int | None, amount: str, *, in_bytes: bool) -> None:
        task = self._tasks.get(what)
        if task is None:
            task = self._tasks[what] = self.bars.add_task(what, total=total, amount=amount, in_bytes=in_bytes)
        self.bars.update(task, completed=done, total=total, amount=amount)


def _rich_bars(stream: TextIO) -> "RichProgress":
    from rich.console import Console  # noqa: PLC0415 -- rich is slow to import, only a terminal needs it
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text(f"{format_bytes(int(rate))}/s" if rate and task.fields["in_bytes"] else "")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        RateColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
