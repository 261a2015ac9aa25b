"""Control groups (cgroup v2) that a launcher puts its processes into."""

import contextlib
from pathlib import Path

from aimgpu.errors import EngineFailed

_PROCESSES = "cgroup.procs"


def path_from_root(group: Path) -> str:
    """In the form that Docker takes: /aimgpu/chat-0."""
    roots = [folder for folder in group.parents if (folder / "cgroup.controllers").exists()]
    if not roots:
        raise EngineFailed(f"{group} is not a control group", hint="Set AIMGPU_CGROUP to one below where cgroup v2 is mounted.")
    return f"/{group.relative_to(roots[-1])}"


def holds(group: Path, pid: int) -> bool:
    """Whether the process is in the group, or in one below it."""
    for file in group.rglob(_PROCESSES):
        with contextlib.suppress(OSError):  # a group that just went
            if str(pid) in file.read_text(encoding="ascii").split():
                return True
    return False
