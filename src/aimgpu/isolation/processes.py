"""Which processes are alive, identified by pid and start time, since pids are reused."""

from collections.abc import Callable
from pathlib import Path

from aimgpu.procfs import PROC, read_process


def own_pid_namespace() -> int:
    """Inode of the pid namespace of this process."""
    return (PROC / "self/ns/pid").stat().st_ino


def is_alive(pid: int, start_ticks: int, pid_namespace: int, *, locked: Callable[[], bool], proc: Path = PROC) -> bool:
    """Whether the process that wrote this into a region is alive.

    `locked` tests the lock that it holds for life, which works across pid namespaces and users. Where the lock is free,
    /proc of the observer's own namespace is consulted too: the program may have closed the descriptor that holds the lock.
    """
    if locked():
        return True
    if pid_namespace != own_pid_namespace():
        return False
    process = read_process(pid, proc)
    return process is not None and process.start_ticks == start_ticks and not (process.ended and process.threads <= 1)


def read_names(pid: int, proc: Path = PROC) -> list[tuple[int, int]]:
    """Pid and start time as a region may have them: a process in a container writes the pid that it has there."""
    process = read_process(pid, proc)
    if process is None:
        return []
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return []
    inside = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [str(pid)])
    return [(int(name), process.start_ticks) for name in inside]
