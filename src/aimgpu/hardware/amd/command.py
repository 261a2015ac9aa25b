"""Running a program of someone else: bounded in time, never left behind, its words kept."""

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aimgpu.errors import HardwareFailed, HardwareUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return f"{self.stdout}\n{self.stderr}"


class CommandRunner(Protocol):
    def __call__(self, argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> Outcome: ...


def run_command(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> Outcome:
    """`answer` is what a prompt gets. A program that takes too long is killed with its children."""
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
            f"{argv[0]} was not found", hint="Install AMD's tools (ROCm, package amd-smi) or put them on PATH."
        ) from error
    except OSError as error:
        raise HardwareUnavailable(f"{argv[0]} cannot be run: {error.strerror}", hint="Reinstall it.") from error
    try:
        stdout, stderr = process.communicate(answer, timeout=timeout_seconds)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise HardwareFailed(
            f"`{' '.join(argv)}` gave no answer within {timeout_seconds:g}s and was stopped",
            hint="The driver may hang: look at the kernel log (dmesg).",
        ) from error
    return Outcome(status=process.returncode, stdout=stdout, stderr=stderr)
