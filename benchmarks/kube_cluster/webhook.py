"""What admission adds to the creation of a pod, seen by the client and by the API server.

Pods are created with ``dryRun=All``, so that nothing piles up; what is compared is created in turns, so that both see the
same load of the machine.
"""

import os
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.processes import Process

from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import PODS

WARM_UP = 50
_HOOK = "pods.aim.amd.com"
_METRIC = "apiserver_admission_webhook_admission_duration_seconds"
_LINE = re.compile(rf'^{_METRIC}_(sum|count|bucket)\{{.*name="{re.escape(_HOOK)}".*\}} (\S+)$')


async def measure_added(cluster: Cluster, admission: Sequence[Process], reviews: int) -> dict[str, Any]:
    """Annotated and plain pods in turns: what the webhook adds."""
    times: dict[bool, list[float]] = {False: [], True: []}
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        for number in range(WARM_UP):
            await create_dry(client, fake_pod(f"warm-{number}", annotated=True))
        cpu, seen = sum(map(cpu_seconds, admission)), await _read_metric(client)
        for number in range(reviews):
            for annotated, found in times.items():
                found.append(await create_dry(client, fake_pod(f"pod-{number}", annotated=annotated)))
        cpu, now = sum(map(cpu_seconds, admission)) - cpu, await _read_metric(client)
    counted = {name: now[name] - seen.get(name, 0.0) for name in now}
    calls = counted["count"]
    return {
        "reviews": reviews,
        "plain_pod_p50_ms": round(statistics.median(times[False]), 2),
        "webhook_added_p50_ms": round(statistics.median(times[True]) - statistics.median(times[False]), 2),
        "webhook_added_p99_ms": round(percentile(times[True], 99) - percentile(times[False], 99), 2),
        "webhook_mean_ms_by_api_server": round(counted["sum"] / calls * 1000, 2),
        "webhook_within_5_ms_percent_by_api_server": round(100 * counted["0.005"] / calls, 2),
        "webhook_within_25_ms_percent_by_api_server": round(100 * counted["0.025"] / calls, 2),
        "admission_cpu_ms_per_review": round(cpu * 1000 / calls, 3),
    }


async def create_dry(client: Client, pod: dict[str, Any]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    await client.request("POST", PODS.path("default"), body=pod, query={"dryRun": "All"})
    return (time.perf_counter() - begin) * 1000


def fake_pod(name: str, *, annotated: bool) -> dict[str, Any]:
    """For nodes that kwok keeps; with KServe's label, as its controller would make it."""
    metadata: dict[str, Any] = {"name": name}
    if annotated:
        metadata |= {"annotations": {"gpu-memory": "4096"}, "labels": {"serving.kserve.io/inferenceservice": name}}
    container = {"name": "main", "image": "fake", "resources": {"requests": {"cpu": "1m"}}}
    spec = {"nodeSelector": {"type": "kwok"}, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def cpu_seconds(process: Process) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def _read_metric(client: Client) -> dict[str, float]:
    """Sum, count and the buckets by their bounds, as the API server has measured our webhook."""
    found: dict[str, float] = {}
    async for line in client.read_lines("/metrics"):
        if match := _LINE.match(line):
            bound = re.search(r'le="([^"]+)"', line)
            name = bound.group(1) if bound else match.group(1)
            found[name] = found.get(name, 0.0) + float(match.group(2))
    return found
