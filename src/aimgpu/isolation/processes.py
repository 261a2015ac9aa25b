"""Which processes live, told by pid and start time; a pid alone may be somebody else's by now."""

from pathlib import Path

PROC = Path("/proc")
_START_FIELD = 19  # of what follows the name in /proc/PID/stat: field 22 counted from 1


def read_start_ticks(pid: int, proc: Path = PROC) -> int | None:
    """Clock ticks after boot at which it started; None: it is gone, or only waits to be reaped."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[_START_FIELD])


def read_boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


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
    try:
        stat = (proc / str(pid) / "stat").read_text()
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return []
    ticks = int(stat[stat.rindex(")") + 2 :].split()[_START_FIELD])
    inside = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [str(pid)])
    return [(int(name), ticks) for name in inside]


def read_tree(root: int, proc: Path = PROC) -> frozenset[int]:
    """The process and all that descend from it now."""
    parents: dict[int, int] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit() and (parent := _read_parent(entry)) is not None:
            parents[int(entry.name)] = parent
    tree = {root} if root in parents else set()
    grown = bool(tree)
    while grown:
        more = {pid for pid, parent in parents.items() if parent in tree and pid not in tree}
        tree |= more
        grown = bool(more)
    return frozenset(tree)


def _read_parent(entry: Path) -> int | None:
    try:
        text = (entry / "stat").read_text()
    except OSError:
        return None
    return int(text[text.rindex(")") + 2 :].split()[1])
