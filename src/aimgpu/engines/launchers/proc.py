"""Processes as Linux's /proc shows them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aimgpu.domain import ProcessIdentity

_PROC = Path("/proc")
_KERNEL_THREAD = 0x0020_0000  # PF_KTHREAD, include/linux/sched.h
# Positions after the command name of /proc/<pid>/stat (proc(5) counts from 1, with pid and name before them).
_STATE, _PARENT, _SESSION, _FLAGS, _START = 0, 1, 3, 6, 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One line of /proc, read once: by now it may be gone."""

    pid: int
    state: str
    parent_pid: int
    session: int
    start_ticks: int
    kernel_thread: bool

    @property
    def ended(self) -> bool:
        """A zombie runs nothing and holds nothing; it only waits for its parent."""
        return self.state in "ZX"

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(pid=self.pid, start_ticks=self.start_ticks, boot_id=read_boot_id())


@cache
def read_boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_process(pid: int) -> Process | None:
    """The process with this pid, zombies included; None when there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name may hold spaces and brackets
    return Process(
        pid=pid,
        state=fields[_STATE],
        parent_pid=int(fields[_PARENT]),
        session=int(fields[_SESSION]),
        start_ticks=int(fields[_START]),
        kernel_thread=bool(int(fields[_FLAGS]) & _KERNEL_THREAD),
    )


def read_processes() -> Iterator[Process]:
    """Every process that has not ended."""
    for name in os.listdir(_PROC):  # noqa: PTH208 - names only, hundreds of them, often
        if name.isdigit() and (process := read_process(int(name))) and not process.ended:
            yield process


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process still runs: same boot, same start, no zombie."""
    if identity.boot_id != read_boot_id():
        return False
    process = read_process(identity.pid)
    return process is not None and process.start_ticks == identity.start_ticks and not process.ended


def read_environment(pid: int) -> Mapping[str, str]:
    """The environment it was started with; empty when it is gone, another user's, or in the middle of an exec."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.split("=", 1) for entry in raw.decode("utf-8", "replace").split("\0") if "=" in entry)
    return {name: value for name, value in entries}  # noqa: C416 - split gives lists, dict() wants pairs


def read_working_directory(pid: int) -> Path | None:
    try:
        return Path(os.readlink(_PROC / str(pid) / "cwd"))  # noqa: PTH115 - readlink says "(deleted)" too
    except OSError:
        return None
