"""Running a program of someone else: bounded in time, never left behind, its words kept."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aimgpu.errors import HardwareFailed, HardwareUnavailable

_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a program ended and what it printed."""

    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Everything it printed."""
        return f"{self.stdout}\n{self.stderr}"


class CommandRunner(Protocol):
    """Runs a program, bounded in time."""

    def __call__(self, argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult: ...


def run_command(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
    """`answer` is what a prompt gets. A program that takes too long is killed with its children, and not waited for long."""
    try:
        process = subprocess.Popen(  # noqa: S603 - argv is a list of ours, no shell
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise HardwareUnavailable(
            f"{argv[0]} was not found",
            hint="Install it or put it on PATH: amd-smi comes with ROCm, modprobe with the package kmod.",
        ) from error
    except OSError as error:
        raise HardwareUnavailable(f"{argv[0]} cannot be run: {error.strerror}", hint="Reinstall it.") from error
    try:
        stdout, stderr = process.communicate(answer, timeout=timeout_seconds)
    except subprocess.TimeoutExpired as error:
        ended = _end(process)
        raise HardwareFailed(
            f"`{' '.join(argv)}` gave no answer within {timeout_seconds:g}s and {'was' if ended else 'cannot be'} stopped",
            hint="The driver may hang: look at the kernel log (dmesg).",
        ) from error
    return CommandResult(status=process.returncode, stdout=stdout, stderr=stderr)


def _end(process: subprocess.Popen[str]) -> bool:
    """Whether it ended: a program that hangs in the driver cannot be killed, and is left to the kernel."""
    os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written to it yet
                pipe.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name=f"reaper-{process.pid}", daemon=True).start()
        return False
    return True
