"""Operator and admission on a real cluster: how soon a GpuShare follows its pod, memory, and what the webhook adds to a pod.

As root: ``make bench-kube-cluster``. Nodes are kept alive by kwok; the pods have KServe's label, so that each belongs to an
InferenceService of its own, as KServe's controller would make them. Latencies of the webhook are those of creations with
``dryRun=All``, annotated and not in turns, so that nothing piles up and both see the same load.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.cluster.cluster import Cluster
from tests.kubernetes.accounts import NAMESPACE, make_account
from tests.kubernetes.admission import running_admission

from aimgpu.kubernetes.api_access import read_kubeconfig
from aimgpu.kubernetes.api_client import Client
from aimgpu.kubernetes.custom_resources import GPU_SHARES, custom_resource_definitions
from aimgpu.kubernetes.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.dra_driver.publisher import SLICES
from aimgpu.kubernetes.operator.access_rules import cluster_role_rules, role_rules
from benchmarks.kube_node_scheduling import NODES, PODS, create_all, fake_node, fake_slices, start_kwok, wait_until_ready
from benchmarks.recording import write_result

WAIT_SECONDS = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--reviews", type=int, default=500)
    given = parser.parse_args()
    with Cluster() as cluster:
        cluster.apply([*device_classes(), *custom_resource_definitions()])
        for name in ("gpunodes", "gpushares", "partitionplans"):
            cluster.wait(f"crd/{name}.aim.amd.com", "condition=Established")
        start_kwok(cluster)
        cluster.kubectl("cordon", "node1")
        figures = measure(cluster, given.nodes, given.services, given.reviews)
        cluster.process("kwok").stop()
    for name, value in figures.items():
        print(f"{name}: {value}")
    write_result("kube-cluster", figures)


def measure(cluster: Cluster, nodes: int, services: int, reviews: int) -> dict[str, Any]:
    kubeconfig = make_account(cluster, "operator", cluster_role_rules(), role_rules())
    command = [sys.executable, "-m", "aimgpu.kubernetes.operator", "--namespace", NAMESPACE]
    figures: dict[str, Any] = {"nodes": nodes, "services": services, "load_average": round(os.getloadavg()[0], 1)}
    with running_admission(cluster, replicas=2) as admission:
        asyncio.run(_add_nodes(cluster, nodes))
        operator = cluster.start("operator", command, env={"KUBECONFIG": str(kubeconfig)})
        figures |= asyncio.run(_measure_shares(cluster, services))
        figures["operator_rss_mb"] = round(_rss(operator.pid) / 1e6, 1)
        figures["admission_rss_mb"] = round(max(_rss(one.pid) for one in admission) / 1e6, 1)
        figures |= asyncio.run(_measure_webhook(cluster, reviews, "up"))
        for process in admission:
            process.kill()
        figures |= asyncio.run(_measure_webhook(cluster, reviews, "down"))
        operator.stop()
    figures["plain_pod_down_x"] = round(figures.pop("plain_down_p50_ms") / figures.pop("plain_up_p50_ms"), 3)
    return figures


def _rss(pid: int) -> int:
    """The commands that put it into its control group and namespaces become the program: one process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:  # noqa: PTH123 - a pseudo file
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _add_nodes(cluster: Cluster, nodes: int) -> None:
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        await create_all(client.create(NODES, fake_node(number)) for number in range(nodes))
        await create_all(client.create(SLICES, body) for number in range(nodes) for body in fake_slices(number))
        await wait_until_ready(client, nodes)


async def _measure_shares(cluster: Cluster, services: int) -> dict[str, Any]:
    """From the sight of a pod bound to a node to the sight of a GpuShare that says so."""
    bound: dict[str, float] = {}
    reported: dict[str, float] = {}
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        watching = [asyncio.ensure_future(_watch_pods(client, bound)), asyncio.ensure_future(_watch_shares(client, reported))]
        begin = time.monotonic()
        await create_all(client.create(PODS, _pod(f"isvc-{number}", annotated=True), "default") for number in range(services))
        while len(reported) < services and time.monotonic() - begin < WAIT_SECONDS:  # noqa: ASYNC110 - with a bound
            await asyncio.sleep(0.2)
        seconds = time.monotonic() - begin
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    delays = [max(0.0, reported[name] - bound[name]) * 1000 for name in reported if name in bound]
    return {
        "reported": len(reported),
        "all_reported_seconds": round(seconds, 1),
        "reconcile_p50_ms": round(statistics.median(delays), 1),
        "reconcile_p95_ms": round(_percentile(delays, 95), 1),
    }


async def _watch_pods(client: Client, bound: dict[str, float]) -> None:
    async for event in client.watch(PODS, "default"):
        if event.object and event.object["spec"].get("nodeName"):
            bound.setdefault(event.object["metadata"]["name"], time.monotonic())


async def _watch_shares(client: Client, reported: dict[str, float]) -> None:
    async for event in client.watch(GPU_SHARES, "default"):
        conditions = ((event.object or {}).get("status") or {}).get("conditions") or ()
        if any(one["type"] == "PartitionAllocated" and one["status"] == "True" for one in conditions):
            reported.setdefault(event.object["spec"]["workload"]["name"], time.monotonic())


async def _measure_webhook(cluster: Cluster, reviews: int, state: str) -> dict[str, Any]:
    """With admission `up` annotated and plain pods in turns; `down` plain ones only: annotated ones are refused then."""
    plain: list[float] = []
    annotated: list[float] = []
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        for number in range(reviews):
            plain.append(await _create_dry(client, _pod(f"plain-{number}", annotated=False)))
            if state == "up":
                annotated.append(await _create_dry(client, _pod(f"annotated-{number}", annotated=True)))
    found = {f"plain_{state}_p50_ms": statistics.median(plain)}
    if annotated:
        found["webhook_added_p50_ms"] = round(statistics.median(annotated) - statistics.median(plain), 2)
        found["webhook_p99_ms"] = round(_percentile(annotated, 99) - _percentile(plain, 99), 2)
    return found


async def _create_dry(client: Client, pod: dict[str, Any]) -> float:
    begin = time.perf_counter()
    await client.request("POST", PODS.path("default"), body=pod, query={"dryRun": "All"})
    return (time.perf_counter() - begin) * 1000


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _pod(name: str, *, annotated: bool) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if annotated:
        metadata |= {"annotations": {"gpu-memory": "4096"}, "labels": {"serving.kserve.io/inferenceservice": name}}
    container = {"name": "main", "image": "fake", "resources": {"requests": {"cpu": "1m"}}}
    spec = {"nodeSelector": {"type": "kwok"}, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


if __name__ == "__main__":
    main()
