"""Processes as Linux's /proc shows them. A pid alone may be another process by now; pid, start time and boot are not."""

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

PROC = Path("/proc")
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors of the reader
_KERNEL_THREAD = 0x0020_0000  # PF_KTHREAD, include/linux/sched.h
# Positions after the command name of /proc/<pid>/stat (proc(5) counts from 1, with pid and name before them).
_STATE, _PARENT, _SESSION, _FLAGS, _THREADS, _START = 0, 1, 3, 6, 17, 19


class Identified(Protocol):
    """What distinguishes one process from every other, before and after it."""

    @property
    def pid(self) -> int: ...

    @property
    def start_ticks(self) -> int: ...

    @property
    def boot_id(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEntry:
    """One /proc/<pid>/stat, read once: by now the process may be gone."""

    pid: int
    state: str
    parent_pid: int
    session: int
    start_ticks: int  # clock ticks after boot
    kernel_thread: bool
    threads: int = 1  # a zombie with more than one has only lost its main thread

    @property
    def boot_id(self) -> str:
        """Of this boot: what is read now runs now."""
        return read_boot_id()

    @property
    def ended(self) -> bool:
        """A zombie runs nothing and holds nothing; it only waits for its parent."""
        return self.state in "ZX"


@cache
def read_boot_id() -> str:
    """Identifies this boot of the machine: start times count from it."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_process(pid: int, proc: Path = PROC) -> ProcessEntry | None:
    """The process with this pid, zombies included; None when there is none.

    Raises OSError where this program has no files left to open: that says nothing of the other process.
    """
    try:
        text = (proc / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
    except OSError as error:
        if error.errno in _OURS:
            raise
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name may hold spaces and brackets
    return ProcessEntry(
        pid=pid,
        state=fields[_STATE],
        parent_pid=int(fields[_PARENT]),
        session=int(fields[_SESSION]),
        start_ticks=int(fields[_START]),
        kernel_thread=bool(int(fields[_FLAGS]) & _KERNEL_THREAD),
        threads=int(fields[_THREADS]),
    )


def read_processes(proc: Path = PROC) -> Iterator[ProcessEntry]:
    """Every process that has not ended."""
    for name in os.listdir(proc):  # noqa: PTH208 - names only, hundreds of them, often
        if name.isdigit() and (process := read_process(int(name), proc)) and not process.ended:
            yield process


class SharedProcessTable:
    """All processes by pid. Those who ask while it is being read share the next reading, which began after they asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0  # readings
        self._last: dict[int, ProcessEntry] = {}

    def read(self) -> Mapping[int, ProcessEntry]:
        """As of a moment after the call."""
        seen = self._begun
        with self._lock:
            if self._begun <= seen:
                self._begun += 1
                self._last = {process.pid: process for process in read_processes()}
            return self._last


def read_start_ticks(pid: int, proc: Path = PROC) -> int | None:
    """Clock ticks after boot at which it started; None when there is no such process, or it is a zombie."""
    process = read_process(pid, proc)
    return None if process is None or process.ended else process.start_ticks


def read_name(pid: int, proc: Path = PROC) -> str | None:
    """Of its program, as the kernel keeps it; None when there is no such process."""
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    """Whether a signal or a debugger holds it: it runs, and does nothing."""
    process = read_process(pid, proc)
    return process is not None and process.state in {"T", "t"}


def is_running(process: Identified) -> bool:
    """Whether this very process still runs: same boot, same start, no zombie."""
    return process.boot_id == read_boot_id() and read_start_ticks(process.pid) == process.start_ticks


def read_tree(root: int, proc: Path = PROC) -> frozenset[int]:
    """The process and all that descend from it now, zombies included; not this program, if it is below the root."""
    entries = (read_process(int(name), proc) for name in os.listdir(proc) if name.isdigit())  # noqa: PTH208
    parents = {entry.pid: entry.parent_pid for entry in entries if entry is not None}
    tree = {root} if root in parents else set()
    if root != os.getpid() and proc == PROC:
        parents.pop(os.getpid(), None)
    grown = bool(tree)
    while grown:
        more = {pid for pid, parent in parents.items() if parent in tree and pid not in tree}
        tree |= more
        grown = bool(more)
    return frozenset(tree)


def read_host_memory() -> tuple[int, int]:
    """Bytes of this machine's memory, and how many of them a new program could use."""
    lines = (line.split() for line in (PROC / "meminfo").read_text(encoding="ascii").splitlines())
    kibibytes = {line[0]: int(line[1]) for line in lines}
    return kibibytes["MemTotal:"] * 1024, kibibytes["MemAvailable:"] * 1024


def read_environment(pid: int) -> Mapping[str, str]:
    """The environment it was started with; empty when it is gone, another user's, or in the middle of an exec."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.split("=", 1) for entry in raw.decode("utf-8", "replace").split("\0") if "=" in entry)
    return {name: value for name, value in entries}  # noqa: C416 - split gives lists, dict() wants pairs


def read_working_directory(pid: int) -> Path | None:
    """Where it runs; the text ends in " (deleted)" where the folder is gone."""
    try:
        return Path(os.readlink(PROC / str(pid) / "cwd"))  # noqa: PTH115 - readlink reports "(deleted)" too
    except OSError:
        return None
