"""The control groups of one test cluster: every process of it is in there, so all of them can be found and ended.

Works on cgroup v1 (one tree per controller), v2 and hybrid machines.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

KILL_SECONDS = 120.0
REMOVE_SECONDS = 10.0


class ControlGroups:
    """A group of this name in every hierarchy, with one child for our own programs and one per node."""

    def __init__(self, name: str, nodes: tuple[str, ...] = ()) -> None:
        self.name = name
        self._roots = [mount / name for mount in _mounts()]
        self._children = ("programs", *nodes)

    def create(self) -> None:
        for root in self._roots:
            for group in (root, *(root / child for child in self._children)):
                group.mkdir(parents=True, exist_ok=True)
                _inherit_cpus(group)
            for parent in (root.parent, root):
                _delegate(parent)

    def join_command(self) -> list[str]:
        """Prefix of a command line that runs the rest of it inside the group of our own programs."""
        files = " ".join(str(root / "programs" / "cgroup.procs") for root in self._roots if root.parent.name in _JOINED)
        # What cannot join, because the cluster is being removed, does not run: nobody would find it.
        script = f'joined=; for f in {files}; do echo $$ > $f && joined=1; done; [ "$joined" ] && exec "$@"'
        return ["sh", "-c", script, "sh"]

    def processes(self) -> set[int]:
        found: set[int] = set()
        for root in self._roots:
            for folder, _, _ in os.walk(root):  # passes over groups that the kubelet removes meanwhile
                try:
                    found.update(int(line) for line in (Path(folder) / "cgroup.procs").read_text().split())
                except OSError:
                    continue  # the group went away, or is threaded
        return found - {os.getpid()}

    def kill(self) -> None:
        """End every process in the groups, and wait until none is left."""
        deadline = time.monotonic() + KILL_SECONDS
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of the test cluster do not end: {sorted(left)}")
            time.sleep(0.05)

    def remove(self) -> None:
        """Remove the groups, and what joins them meanwhile; the kernel may take a moment to let go of a process."""
        deadline = time.monotonic() + REMOVE_SECONDS
        while self._remove() and time.monotonic() < deadline:
            self.kill()
            time.sleep(0.05)

    def _remove(self) -> list[Path]:
        for root in self._roots:
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
        return self.leftovers()

    def leftovers(self) -> list[Path]:
        return [root for root in self._roots if root.exists()]


# On v1 one hierarchy is enough to find a process by; pods are in all of them. An empty name is the v2 root.
_JOINED = ("pids", "cgroup", "unified")


def _mounts() -> list[Path]:
    lines = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return [Path(mount) for _, mount, kind, *_ in lines if kind in ("cgroup", "cgroup2")]


def _inherit_cpus(group: Path) -> None:
    for name in ("cpuset.cpus", "cpuset.mems"):
        own, above = group / name, group.parent / name
        if own.exists() and above.exists() and not own.read_text().strip():
            own.write_text(above.read_text())


def _delegate(parent: Path) -> None:
    """On cgroup v2, let the children of a group have its controllers."""
    available, enabled = parent / "cgroup.controllers", parent / "cgroup.subtree_control"
    if not available.exists():
        return
    for controller in available.read_text().split():
        try:
            enabled.write_text(f"+{controller}")
        except OSError:
            continue  # bound to a v1 hierarchy
