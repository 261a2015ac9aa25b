"""Operator and admission on a real cluster: how soon a GpuShare follows its pod, memory, take-over, what the webhook adds.

As root: ``make bench-kube-cluster``. Nodes are kept alive by kwok; the pods have KServe's label, so that each belongs to an
InferenceService of its own, as KServe's controller would make them. kube-scheduler needs seconds for each claim on so many
nodes (``make bench-kube-node`` measures that), so that this program allocates and binds in its place. The cluster's processes
have the highest priority, so that other work on the machine is not measured.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until
from tests.kubernetes.accounts import NAMESPACE, make_account
from tests.kubernetes.admission import running_admission

from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import NODES, PODS, RESOURCE_SLICES
from aimgpu.kubernetes.cluster.operator.access_rules import cluster_role_rules, namespaced_rules, role_rules
from aimgpu.kubernetes.node.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_SHARES, custom_resource_definitions
from benchmarks.kube_cluster.binder import Binder
from benchmarks.kube_cluster.plain_pods import measure_absence
from benchmarks.kube_cluster.webhook import cpu_seconds, fake_pod, measure_added, percentile
from benchmarks.kube_node.scheduling import create_all, fake_node, fake_slices, start_kwok, wait_until_ready
from benchmarks.recording import RESULTS, write_result

WAIT_SECONDS = 1200.0
TAKE_OVERS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--reviews", type=int, default=2000)
    parser.add_argument("--only", choices=("operator", "webhook", "absence"), help="keep the other figures as they are")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    if given.only != "operator":  # without nodes: nothing else keeps the API server busy
        with Cluster() as cluster:
            _install(cluster)
            figures |= _measure_webhook(cluster, given.reviews, absence_only=given.only == "absence")
    if given.only not in ("webhook", "absence"):
        with Cluster() as cluster:
            _install(cluster)
            start_kwok(cluster)
            cluster.process("kube-scheduler").stop()
            figures |= {"nodes": given.nodes, "services": given.services}
            figures |= _measure_operator(cluster, given.nodes, given.services)
            cluster.process("kwok").stop()
    for name, value in figures.items():
        print(f"{name}: {value}")
    write_result("kube-cluster", (_kept() if given.only else {}) | figures)


def _kept() -> dict[str, Any]:
    path = RESULTS / "kube-cluster.json"
    return dict(json.loads(path.read_text())["figures"]) if path.exists() else {}


def _install(cluster: Cluster) -> None:
    cluster.apply([*device_classes(), *custom_resource_definitions()])
    cluster.wait_until_served("gpunodes.aim.amd.com", "gpushares.aim.amd.com", "partitionplans.aim.amd.com")
    cluster.kubectl("cordon", "node1")


def _measure_webhook(cluster: Cluster, reviews: int, *, absence_only: bool) -> dict[str, Any]:
    with running_admission(cluster, replicas=2) as admission:
        cluster.prioritise()
        figures = {}
        if not absence_only:
            figures = _loaded("webhook", lambda: asyncio.run(measure_added(cluster, admission, reviews)))
        for process in admission:
            process.kill()
        return figures | _loaded("absence", lambda: asyncio.run(measure_absence(cluster, reviews)))


def _measure_operator(cluster: Cluster, nodes: int, services: int) -> dict[str, Any]:
    kubeconfig = make_account(cluster, "operator", [*cluster_role_rules(), *namespaced_rules()], role_rules())
    command = [sys.executable, "-m", "aimgpu.kubernetes.cluster.operator", "--namespace", NAMESPACE]
    numbers = itertools.count()

    def start() -> Process:
        return cluster.start(f"operator-{next(numbers)}", command, env={"KUBECONFIG": str(kubeconfig)})

    with running_admission(cluster, replicas=2) as admission:
        asyncio.run(_add_nodes(cluster, nodes))
        operator = start()
        wait_until(lambda: "operator.synced" in operator.log.read_text(errors="replace"), "the operator")
        cluster.prioritise()
        figures = _loaded("reconcile", lambda: asyncio.run(_measure_shares(cluster, nodes, services)))
        figures["operator_cpu_seconds"] = round(cpu_seconds(operator), 1)
        figures["operator_rss_mb"] = round(_rss(operator.pid) / 1e6, 1)
        figures["admission_rss_mb"] = round(max(_rss(one.pid) for one in admission) / 1e6, 1)
        return figures | _loaded("take_over", lambda: _measure_take_overs(cluster, nodes, operator, start))


def _loaded(name: str, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """With the load of the machine: what is measured is itself part of it."""
    figures = measured()
    return {**figures, f"{name}_load_average": round(os.getloadavg()[0], 1)}


def _rss(pid: int) -> int:
    """The commands that put it into its control group and namespaces become the program: one process."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _add_nodes(cluster: Cluster, nodes: int) -> None:
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        await create_all(client.create(NODES, fake_node(number)) for number in range(nodes))
        await create_all(client.create(RESOURCE_SLICES, body) for number in range(nodes) for body in fake_slices(number))
        await wait_until_ready(client, nodes)


async def _measure_shares(cluster: Cluster, nodes: int, services: int) -> dict[str, Any]:
    """From the request that binds a pod to a node to the sight of a GpuShare that shows it there."""
    reported: dict[str, float] = {}
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        binder = Binder(client, nodes)
        working = [asyncio.ensure_future(work) for work in (binder.run(), _watch_shares(client, reported))]
        begin = time.monotonic()
        pods = (fake_pod(f"isvc-{number}", annotated=True) for number in range(services))
        await create_all(client.create(PODS, pod, "default") for pod in pods)
        created = time.monotonic() - begin
        while len(reported) < services and time.monotonic() - begin < WAIT_SECONDS:  # noqa: ASYNC110 - with a bound
            await asyncio.sleep(0.2)
        seconds = time.monotonic() - begin
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    delays = [(reported[name] - binder.asked[name]) * 1000 for name in reported]
    return {
        "reported": len(reported),
        "all_created_seconds": round(created, 1),
        "all_reported_seconds": round(seconds, 1),
        "reconcile_p50_ms": round(statistics.median(delays), 1),
        "reconcile_p95_ms": round(percentile(delays, 95), 1),
    }


async def _watch_shares(client: Client, reported: dict[str, float]) -> None:
    async for event in client.watch(GPU_SHARES, "default"):
        status = (event.object or {}).get("status") or {}
        conditions = status.get("conditions") or ()
        allocated = any(one["type"] == "PartitionAllocated" and one["status"] == "True" for one in conditions)
        if allocated and all(row.get("node") for row in status["replicas"]):  # the claim is allocated before the pod is bound
            reported.setdefault(event.object["spec"]["workload"]["name"], time.monotonic())


def _measure_take_overs(cluster: Cluster, nodes: int, leader: Process, start: Callable[[], Process]) -> dict[str, Any]:
    """From the end of the leader to the share of a pod made just then, by an operator that was waiting."""
    figures = {}
    names = (f"takeover-{number}" for number in itertools.count())
    for manner, end in (("killed", Process.kill), ("stopped", Process.stop)):
        seconds = []
        for _ in range(TAKE_OVERS):
            waiting = start()
            time.sleep(5)  # it has seen the Lease by then
            cluster.prioritise()
            begin = time.monotonic()
            end(leader)
            asyncio.run(_wait_for_share(cluster, nodes, next(names)))
            seconds.append(time.monotonic() - begin)
            leader = waiting
        figures[f"leader_{manner}_take_over_seconds_most"] = round(max(seconds), 1)
    leader.stop()
    return figures


async def _wait_for_share(cluster: Cluster, nodes: int, name: str) -> None:
    reported: dict[str, float] = {}
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        working = [asyncio.ensure_future(work) for work in (Binder(client, nodes).run(), _watch_shares(client, reported))]
        await client.create(PODS, fake_pod(name, annotated=True), "default")
        while name not in reported:  # noqa: ASYNC110 - the watch fills it
            await asyncio.sleep(0.05)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


if __name__ == "__main__":
    main()
