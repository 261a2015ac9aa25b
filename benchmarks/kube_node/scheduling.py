"""How fast kube-scheduler binds pods with shares of GPUs and the same pods without, on nodes that kwok keeps alive.

With both forms of our slices: two devices for a GPU, with a counter between them, and one device (`--single-device`).
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.go_programs import GoProgram, build, module_folder
from tests.cluster.waiting import wait_until
from tests.kubernetes.node_agent import claim_template, share

from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import NODES, PODS, RESOURCE_SLICES
from aimgpu.kubernetes.node.dra_driver.candidates import list_candidates
from aimgpu.kubernetes.node.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.node.dra_driver.resource_slices import SliceSettings, build_slices

KWOK = GoProgram(name="kwok", packages=("sigs.k8s.io/kwok/cmd/kwok",))
KWOK_VERSION = "v0.8.0"
AT_ONCE = 32
WAIT_SECONDS = 900.0


def measure_scheduling(nodes: int, pods: int, rounds: int = 3) -> dict[str, Any]:
    """Medians of pods bound a second, and CPU of kube-scheduler per pod, which other work on the machine does not change."""
    with Cluster() as cluster:
        start_kwok(cluster)
        cluster.apply([*device_classes(), claim_template("quarter", share("48000Mi", "25"))])
        cluster.kubectl("cordon", "node1")
        row: dict[str, Any] = {"nodes": nodes}
        row |= asyncio.run(_measure(cluster, nodes, pods, rounds))
        cluster.process("kwok").stop()
    return row


async def _measure(cluster: Cluster, nodes: int, pods: int, rounds: int) -> dict[str, Any]:
    # With counters a pod costs kube-scheduler 1.36 time that grows with the third power of the nodes.
    few = max(4, min(pods, round(20 * (500 / nodes) ** 3)))
    found: dict[str, list[tuple[float, float]]] = {}
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        await create_all(client.create(NODES, fake_node(number)) for number in range(nodes))
        await wait_until_ready(client, nodes)
        for name, single, count, times in (("single_device", True, pods, rounds), ("two_devices", False, few, 1)):
            bodies = [body for number in range(nodes) for body in fake_slices(number, single_device=single)]
            await create_all(client.create(RESOURCE_SLICES, body) for body in bodies)
            for _ in range(times):
                for variant, number, claims in (("without_claims", pods, False), (name, count, True)):
                    figures = await _bind(client, cluster, variant.replace("_", "-"), number, claims=claims)
                    found.setdefault(variant, []).append(figures)
                    print(f"{nodes} nodes, {variant}: {figures[0]:.1f} pods/s, {figures[1]:.1f} ms of CPU per pod", flush=True)
            await create_all(client.delete(RESOURCE_SLICES, body["metadata"]["name"]) for body in bodies)
    medians = {name: [statistics.median(column) for column in zip(*figures, strict=True)] for name, figures in found.items()}
    rates = {f"{name}_per_second": round(figures[0], 2) for name, figures in medians.items()}
    return rates | {f"{name}_cpu_ms": round(figures[1], 1) for name, figures in medians.items()}


async def _bind(client: Client, cluster: Cluster, prefix: str, pods: int, *, claims: bool) -> tuple[float, float]:
    """From the request that creates the first pod to the sight of the last one bound; making pods and claims is part of it."""
    names = [f"{prefix}-{number}" for number in range(pods)]
    begin, cpu = time.monotonic(), _cpu_seconds(cluster)
    await create_all(client.create(PODS, _pod(name, claims=claims), "default") for name in names)
    await _until(client, lambda items: sum(bool(item["spec"].get("nodeName")) for item in items) >= pods, f"{pods} pods bound")
    seconds, cpu = time.monotonic() - begin, _cpu_seconds(cluster) - cpu
    await create_all(client.delete(PODS, name, "default") for name in names)
    await _until(client, lambda items: not items, "no pods")
    return pods / seconds, 1000 * cpu / pods


async def _until(client: Client, done: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        items, _ = await client.list(PODS, "default")
        if done(items):
            return
        await asyncio.sleep(0.25)
    raise TimeoutError(f"not {what} after {WAIT_SECONDS:.0f} s")


def _cpu_seconds(cluster: Cluster) -> float:
    """Of kube-scheduler, user and system."""
    fields = Path(f"/proc/{cluster.process('kube-scheduler').pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_until_ready(client: Client, nodes: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        items, _ = await client.list(NODES)
        ready = sum(
            any(one["type"] == "Ready" and one["status"] == "True" for one in item["status"].get("conditions", ()))
            for item in items
        )
        if ready > nodes:  # node1 is real
            return
        await asyncio.sleep(0.5)
    raise TimeoutError(f"{nodes} nodes are not Ready after {WAIT_SECONDS:.0f} s")


async def create_all(calls: Any) -> None:  # noqa: ANN401 - an iterable of coroutines
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(call: Any) -> None:  # noqa: ANN401
        async with limit:
            await call

    await asyncio.gather(*(one(call) for call in calls))


def start_kwok(cluster: Cluster) -> None:
    stages = module_folder("sigs.k8s.io/kwok", KWOK_VERSION) / "kustomize" / "stage"
    files = [
        file
        for folder in ("node/fast", "node/heartbeat-with-lease", "pod/fast")
        for file in sorted((stages / folder).glob("*.yaml"))
        if file.name != "kustomization.yaml"
    ]
    config = cluster.folder / "kwok.yaml"
    config.write_text("\n---\n".join(file.read_text() for file in files))
    program = str(Path(build(KWOK)) / "kwok")
    flags = ["--manage-all-nodes=false", "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"]
    command = [program, f"--kubeconfig={cluster.kubeconfig}", f"--config={config}", *flags, "--node-lease-duration-seconds=200"]
    process = cluster.start("kwok", command)
    wait_until(process.log.exists, "kwok")


def fake_node(number: int) -> dict[str, Any]:
    resources = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"fake-{number}",
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"type": "kwok", "kubernetes.io/hostname": f"fake-{number}"},
        },
        "status": {"capacity": resources, "allocatable": resources},
    }


def fake_slices(number: int, *, single_device: bool = False) -> list[dict[str, Any]]:
    device = SimulatedHardware([("MI300X", 1)]).read_devices()[0]
    settings = SliceSettings(node=f"fake-{number}", single_device=single_device)
    specs = build_slices([list_candidates(device, repartition=False)], {}, settings)
    pool = {"name": f"fake-{number}", "generation": 1, "resourceSliceCount": len(specs)}
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"fake-{number}-{index}"},
            "spec": {**spec, "pool": pool},
        }
        for index, spec in enumerate(specs)
    ]


def _pod(name: str, *, claims: bool) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "main", "image": "fake", "resources": {"requests": {"cpu": "1"}}}
    spec: dict[str, Any] = {
        "nodeSelector": {"type": "kwok"},
        "containers": [container],
    }
    if claims:
        container["resources"]["claims"] = [{"name": "gpu"}]
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "quarter"}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
