"""What our webhooks cost pods that do not ask for us, while admission is dead, by what the API server has to look at.

Four configurations in turns, block by block, so that all see the same load of the machine: none, webhooks whose
namespaceSelector leaves the namespace out, ours with the shortest condition there is (`false`), and ours as they ship. What
the third costs is the price of any condition: the API server converts the pod for CEL before it looks at the expression.
"""

import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.cluster import HIGHEST_PRIORITY, Cluster
from tests.cluster.waiting import wait_until
from tests.kubernetes.accounts import NAMESPACE
from tests.kubernetes.admission import SERVICE

from aimgpu.kubernetes.admission.webhook_configurations import NAME, mutating_configuration, validating_configuration
from aimgpu.kubernetes.api_access import read_kubeconfig
from aimgpu.kubernetes.api_client import Client
from benchmarks.kube_cluster_webhook import create_dry, fake_pod, percentile
from benchmarks.kube_node_scheduling import PODS

ROUNDS = 12  # blocks of each configuration
WARM_UP = 50
SETTLE_SECONDS = 2.0
STATES = ("absent", "unselected", "trivial", "down")


async def measure_absence(cluster: Cluster, reviews: int) -> dict[str, Any]:
    """Dry creations, in which admission is most of the work, and real ones, which end in etcd."""
    cluster.process("kube-scheduler").stop()  # it would look at every pod
    _prioritise_self()
    dry: dict[str, list[float]] = {state: [] for state in STATES}
    stored: dict[str, list[float]] = {state: [] for state in STATES}
    cpu = dict.fromkeys(STATES, 0.0)
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        for number in range(ROUNDS):
            for place in range(len(STATES)):
                state = STATES[(number + place) % len(STATES)]
                _configure(cluster, state)
                for _ in range(WARM_UP):
                    await create_dry(client, fake_pod("plain", annotated=False))
                before = _cpu_milliseconds(cluster)
                block = [await create_dry(client, fake_pod("plain", annotated=False)) for _ in range(reviews // ROUNDS)]
                cpu[state] += _cpu_milliseconds(cluster) - before
                dry[state] += block
                stored[state] += [await _create(client) for _ in range(reviews // ROUNDS)]
    return {
        **_figures("plain_pod", dry),
        **{f"plain_pod_{state}_api_server_cpu_ms": round(cpu[state] / len(dry[state]), 3) for state in STATES},
        **_figures("stored_plain_pod", stored),
    }


def _figures(name: str, times: Mapping[str, list[float]]) -> dict[str, float]:
    medians = {state: statistics.median(found) for state, found in times.items()}
    return {
        **{f"{name}_{state}_p10_ms": round(percentile(found, 10), 3) for state, found in times.items()},
        **{f"{name}_{state}_p50_ms": round(found, 3) for state, found in medians.items()},
        **{f"{name}_{state}_p99_ms": round(percentile(found, 99), 2) for state, found in times.items()},
        **{f"{name}_{state}_x": round(found / medians["absent"], 3) for state, found in medians.items() if state != "absent"},
    }


async def _create(client: Client) -> float:
    """A pod that is stored and removed again; milliseconds of its creation."""
    begin = time.perf_counter()
    await client.request("POST", PODS.path("default"), body=fake_pod("plain", annotated=False))
    seconds = time.perf_counter() - begin
    await client.request("DELETE", f"{PODS.path('default')}/plain", body={"gracePeriodSeconds": 0})
    return seconds * 1000


def _configure(cluster: Cluster, state: str) -> None:
    """Until the API server follows: with admission dead an annotated pod is refused where our condition holds."""
    configurations = [mutating_configuration(NAMESPACE, SERVICE), validating_configuration(NAMESPACE, SERVICE)]
    for webhook in (webhook for each in configurations for webhook in each["webhooks"]):
        if state == "unselected":
            webhook["namespaceSelector"] = {"matchLabels": {"aim.amd.com/admission": "never"}}
        elif state == "trivial":
            webhook["matchConditions"] = [{"name": "never", "expression": "false"}]
    if state == "absent":
        for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            cluster.kubectl("delete", kind, NAME, "--ignore-not-found")
    else:
        cluster.apply(configurations)
    words = ("run", "probe", "--image=fake", "--annotations=gpu-memory=1", "--dry-run=server", "--output=name")
    wait_until(lambda: bool(cluster.kubectl(*words, check=False)) != (state == "down"), "webhooks")
    time.sleep(SETTLE_SECONDS)


def _prioritise_self() -> None:
    """As the cluster: a client that waits for a core would be measured as a slow API server."""
    os.setpriority(os.PRIO_PROCESS, 0, HIGHEST_PRIORITY)
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(str(HIGHEST_PRIORITY))


def _cpu_milliseconds(cluster: Cluster) -> float:
    """Of the API server's threads, in nanoseconds as the scheduler counts them: a tick is as long as three creations."""
    tasks = Path(f"/proc/{cluster.process('kube-apiserver').pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e6
