"""Whole pods through one node, with a claim and without in turns: how many a minute, and whose CPU each of them takes.

On cgroup v1 the CPU time of all that runs of the cluster is counted; what none of its programs took is that of containerd's
shims, runc and the containers. Elsewhere the programs' own CPU is reported only.
"""

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.waiting import wait_until
from tests.kubernetes.node_agent import NodeAgent, gpu_pod

from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import PODS
from benchmarks.kube_node.calls import read_rss_mb

WAIT_SECONDS = 600.0
PROGRAMS = ("kube-apiserver", "etcd", "kube-scheduler", "kube-controller-manager", "node1-kubelet", "node1-containerd")
_ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")


@dataclass(slots=True)
class _Total:
    """Of all batches of one kind."""

    pods: int = 0
    seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, pods: int, seconds: float, before: dict[str, float], after: dict[str, float]) -> None:
        self.pods += pods
        self.seconds += seconds
        self.cpu_seconds = {name: self.cpu_seconds.get(name, 0.0) + after[name] - before[name] for name in after}

    def per_minute(self) -> int:
        return round(60 * self.pods / self.seconds)

    def cpu_ms(self) -> dict[str, float]:
        """By program, for each pod."""
        return {name: round(1000 * taken / self.pods, 1) for name, taken in self.cpu_seconds.items()}


async def measure_churn(cluster: Cluster, agent: NodeAgent, count: int, batch: int) -> dict[str, float]:
    """So many pods with claims through the agent and as many without, a batch of each in turns; the agent's most memory."""
    account = _Account(cluster)
    claimed, plain = _Total(), _Total()
    rss: list[int] = []
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        for first in range(0, count, batch):
            numbers = range(first, min(first + batch, count))
            for total, bodies in (
                (claimed, [gpu_pod(f"churn-{number}", "share") for number in numbers]),
                (plain, [plain_pod(f"plain-{number}") for number in numbers]),
            ):
                before, begin = account.read(), time.monotonic()
                await _start(client, bodies)
                rss.append(read_rss_mb(agent))
                await _remove(client, bodies)
                total.add(len(bodies), time.monotonic() - begin, before, account.read())
    await asyncio.to_thread(wait_until, lambda: not agent.grants(), "grants given back", agent.check, WAIT_SECONDS)
    return {
        "pods": count,
        "pods_per_minute": claimed.per_minute(),
        "plain_pods_per_minute": plain.per_minute(),
        "grants_left": len(agent.grants()),
        "agent_rss_mb": max([*rss, read_rss_mb(agent)]),
        **{f"pod_cpu_ms.{name}": value for name, value in claimed.cpu_ms().items()},
        **{f"plain_pod_cpu_ms.{name}": value for name, value in plain.cpu_ms().items()},
    }


async def wait_for_pods(client: Client, names: Iterable[str], *, running: bool) -> None:
    """Until all of them run, or none of them is there."""
    wanted = set(names)
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        found, _ = await client.list(PODS, "default")
        there = {pod["metadata"]["name"]: pod for pod in found if pod["metadata"]["name"] in wanted}
        if running and len(there) == len(wanted) and all(map(is_running, there.values())):
            return
        if not running and not there:
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"{len(wanted)} pods: not {'running' if running else 'gone'} after {WAIT_SECONDS:.0f} s")


def is_running(pod: dict[str, Any]) -> bool:
    return any("running" in (status.get("state") or {}) for status in pod["status"].get("containerStatuses") or ())


def plain_pod(name: str) -> dict[str, Any]:
    """As `gpu_pod`, without a claim."""
    container = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"]}
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def _start(client: Client, bodies: list[dict[str, Any]]) -> None:
    await asyncio.gather(*(client.create(PODS, body, "default") for body in bodies))
    await wait_for_pods(client, (body["metadata"]["name"] for body in bodies), running=True)


async def _remove(client: Client, bodies: list[dict[str, Any]]) -> None:
    await asyncio.gather(*(client.delete(PODS, body["metadata"]["name"], "default") for body in bodies))
    await wait_for_pods(client, (body["metadata"]["name"] for body in bodies), running=False)


class _Account:
    """CPU seconds by program since each began; `containers` are those of no program."""

    def __init__(self, cluster: Cluster) -> None:
        self._pids = {name.removeprefix("node1-"): cluster.process(name).pid for name in (*PROGRAMS, "node1-agent")}
        group = _ACCOUNTS / cluster.folder.name
        self._usage = group / "cpuacct.usage"
        if self._usage.exists():  # what the kubelet starts is in there; children of programs are from now on
            for pid in self._pids.values():
                (group / "programs" / "cgroup.procs").write_text(str(pid))
            own = sum(map(_cpu_seconds, self._pids.values()))
            self._before = own - self._total()

    def _total(self) -> float:
        return int(self._usage.read_text()) / 1e9

    def read(self) -> dict[str, float]:
        found = {name: _cpu_seconds(pid) for name, pid in self._pids.items()}
        if self._usage.exists():
            found["containers"] = self._before + self._total() - sum(found.values())
        return found


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
