"""The program `aimgpu`: what has to hold before the command line is imported."""

import os
import signal
import sys

_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))
_COMPLETING = "_AIMGPU_COMPLETE"  # set by a shell that asks for completions


def main() -> None:
    """Ctrl-C while modules are imported, or Tab is pressed, ends it without a word; streams that were closed lead nowhere."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from aimgpu.cli import main as command_line  # noqa: PLC0415 -- only now: it takes a tenth of a second

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and _COMPLETING not in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line.main()


def _open_closed_streams() -> None:
    """As after `aimgpu ps >&-`: else the next file that is opened would be taken for the stream."""
    for number, name, mode in _STREAMS:
        if getattr(sys, name) is None:
            found = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, so that of the stream
            setattr(sys, name, open(found, mode, encoding="utf-8", closefd=found != number))  # noqa: SIM115 -- to the end
