"""A cluster goes with the process that it belongs to, whatever ends that."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.cluster import PREFIX
from tests.cluster.control_groups import ControlGroups
from tests.cluster.requirements import missing
from tests.cluster.stale import GONE, OWNER, is_owned, mark, remove_stale, started
from tests.cluster.waiting import wait_for, wait_until

ROOT = Path(__file__).parents[2]
# Prints the folder of its cluster, then the pid of a child that was forked from it, then that a pod runs.
OWNING = """
import os, signal
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
cluster = Cluster(nodes=1)
print(cluster.folder, flush=True)
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
main = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "1000"]}
main["volumeMounts"] = [{"name": "memory", "mountPath": "/memory"}]
spec = {"volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}], "containers": [main]}
with cluster:
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": spec})
    cluster.wait("pod/web", "condition=Ready")
    print("runs", flush=True)
    signal.pause()
"""


@dataclass(slots=True, kw_only=True)
class Owner:
    """A process that has a cluster."""

    popen: subprocess.Popen[str]
    folder: Path
    child: int

    def wait_until_it_starts(self) -> None:
        """Until the cluster has control groups, processes and namespaces."""
        wait_until((self.folder / "node1" / "prepared").exists, "the first node's namespaces", self._check)

    def wait_until_a_pod_runs(self) -> None:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "runs\n"

    def end(self, number: signal.Signals) -> None:
        """Not collected yet: a process whose parent does not is gone all the same."""
        self.popen.send_signal(number)
        os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)

    def end_child(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)
        self.child = 0

    def _check(self) -> None:
        assert self.popen.poll() is None


@contextmanager
def owning() -> Iterator[Owner]:
    with subprocess.Popen([sys.executable, "-c", OWNING], cwd=ROOT, stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        owner = Owner(popen=popen, folder=Path(popen.stdout.readline().strip()), child=int(popen.stdout.readline()))
        try:
            yield owner
        finally:
            owner.end_child()
            popen.kill()


@pytest.fixture
def owner() -> Iterator[Owner]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with owning() as started:
        yield started


def processes_of(folder: Path) -> dict[int, str]:
    """Start time by pid, of all processes in the cluster's control groups."""
    return {pid: started(pid) for pid in ControlGroups(folder.name).processes()}


def remains(folder: Path, processes: dict[int, str]) -> list[str]:
    """All that this machine still has of a cluster. Its namespaces have mounts of its folder; their numbers are soon reused."""
    found = [str(path) for path in (folder, *ControlGroups(folder.name).leftovers()) if path.exists()]
    found += [f"process {pid}" for pid, start in processes.items() if start != GONE and started(pid) == start]
    for process in Path("/proc").glob("[0-9]*"):
        found += [f"{process / name}" for name in ("cmdline", "mountinfo") if folder.name in read(process / name)]
    return found


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # it has ended


def guard_of(folder: Path) -> int:
    (found,) = (int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if f"guard\0{folder}\0" in read(path))
    return found


def wait_until_nothing_is_left(folder: Path, processes: dict[int, str]) -> None:
    wait_for(lambda: remains(folder, processes), lambda found: found == [], "nothing is left of the cluster")


def test_nothing_is_left_of_a_cluster_with_pods_whose_process_is_killed(owner: Owner) -> None:
    owner.end_child()
    owner.wait_until_a_pod_runs()
    processes = processes_of(owner.folder)
    before = "\n".join(remains(owner.folder, processes))
    commands = {read(Path(f"/proc/{pid}/comm")).strip() for pid in processes}
    assert commands >= {"containerd-shim", "sleep", "kubelet", "etcd"}
    for words in (f"{owner.folder}\n", "/sys/fs/cgroup/", "process ", "/mountinfo", "/cmdline"):
        assert words in before

    owner.end(signal.SIGKILL)

    wait_until_nothing_is_left(owner.folder, processes)


def test_nothing_is_left_of_a_cluster_whose_process_is_ended_while_it_starts(owner: Owner) -> None:
    owner.wait_until_it_starts()
    processes = processes_of(owner.folder)
    assert processes

    owner.end(signal.SIGTERM)  # its child lives on, and has open all that it had

    wait_until_nothing_is_left(owner.folder, processes)


def test_next_starts_may_remove_a_cluster_while_its_guard_does(owner: Owner) -> None:
    owner.wait_until_it_starts()
    owner.end_child()
    processes = processes_of(owner.folder)
    starts = [threading.Thread(target=remove_stale, args=(PREFIX,)) for _ in range(2)]

    owner.end(signal.SIGTERM)
    for start in starts:
        start.start()
    for start in starts:
        start.join()

    wait_until_nothing_is_left(owner.folder, processes)


def test_the_next_start_removes_what_is_left_where_the_guard_was_killed_too(owner: Owner) -> None:
    owner.wait_until_it_starts()
    owner.end_child()
    processes = processes_of(owner.folder)
    os.kill(guard_of(owner.folder), signal.SIGKILL)

    owner.end(signal.SIGKILL)
    remove_stale(PREFIX)  # a start of another worker's may have come before it

    wait_until_nothing_is_left(owner.folder, processes)


def test_a_removal_that_was_interrupted_is_finished_by_the_next(tmp_path: Path) -> None:
    mark(tmp_path)
    assert is_owned(tmp_path)
    (tmp_path / OWNER).write_text("1 0")  # no such process: the first of a machine starts later
    assert not is_owned(tmp_path)
    (tmp_path / OWNER).unlink()
    assert is_owned(tmp_path)  # just being made
    os.utime(tmp_path, (0, 0))
    assert not is_owned(tmp_path)
    assert not is_owned(tmp_path / "gone")
