"""Which processes live, told by pid and start time; a pid alone may be somebody else's by now."""

from pathlib import Path

from aimgpu.procfs import PROC, read_process, read_start_ticks


def own_pid_namespace() -> int:
    return (PROC / "self/ns/pid").stat().st_ino


def is_alive(pid: int, start_ticks: int, pid_namespace: int, proc: Path = PROC) -> bool:
    """Whether the process that wrote this into a region still lives; it may have written the pid of its own namespace."""
    if pid_namespace == own_pid_namespace():
        return read_start_ticks(pid, proc) == start_ticks
    return any(_is_inside(entry, pid, start_ticks) for entry in proc.iterdir() if entry.name.isdigit())


def _is_inside(entry: Path, pid: int, start_ticks: int) -> bool:
    if read_start_ticks(int(entry.name), entry.parent) != start_ticks:
        return False
    try:
        status = (entry / "status").read_text()
    except OSError:
        return False
    names = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    return str(pid) in names


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
