"""How fast kube-scheduler binds pods with shares of GPUs and the same pods without, on nodes that kwok keeps alive."""

import asyncio
import time
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.go_programs import GoProgram, build, module_folder
from tests.cluster.waiting import wait_until
from tests.kubernetes.node_agent import claim_template, share

from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.api_access import read_kubeconfig
from aimgpu.kubernetes.api_client import Client, Resource
from aimgpu.kubernetes.dra_driver.candidates import list_candidates
from aimgpu.kubernetes.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.dra_driver.publisher import SLICES
from aimgpu.kubernetes.dra_driver.resource_slices import SliceSettings, build_slices

KWOK = GoProgram(name="kwok", packages=("sigs.k8s.io/kwok/cmd/kwok",))
KWOK_VERSION = "v0.8.0"
NODES = Resource(version="v1", plural="nodes")
PODS = Resource(version="v1", plural="pods", namespaced=True)
AT_ONCE = 32
WAIT_SECONDS = 900.0


def measure_scheduling(nodes: int, pods: int) -> dict[str, Any]:
    with Cluster() as cluster:
        start_kwok(cluster)
        cluster.apply([*device_classes(), claim_template("quarter", share("48000Mi", "25"))])
        cluster.kubectl("cordon", "node1")
        row: dict[str, Any] = {"nodes": nodes, "pods": pods}
        row |= asyncio.run(_measure(cluster, nodes, pods))
        cluster.process("kwok").stop()
    return row


async def _measure(cluster: Cluster, nodes: int, pods: int) -> dict[str, Any]:
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        await create_all(client.create(NODES, fake_node(number)) for number in range(nodes))
        await create_all(client.create(SLICES, body) for number in range(nodes) for body in fake_slices(number))
        await wait_until_ready(client, nodes)
        found = {}
        for name, claims in (("without_claims", False), ("with_claims", True)):
            found[f"{name}_per_second"] = await _rate(client, name.replace("_", "-"), pods, claims=claims)
        return found


async def _rate(client: Client, prefix: str, pods: int, *, claims: bool) -> float:
    """From the request that creates the first pod to the sight of the last one bound; making pods and claims is part of it."""
    names = [f"{prefix}-{number}" for number in range(pods)]
    begin = time.monotonic()
    await create_all(client.create(PODS, _pod(name, claims=claims), "default") for name in names)
    while True:
        items, _ = await client.list(PODS, "default")
        bound = sum(bool(item["spec"].get("nodeName")) for item in items if item["metadata"]["name"].startswith(prefix))
        if bound >= pods:
            break
        if time.monotonic() - begin > WAIT_SECONDS:
            raise TimeoutError(f"{bound} of {pods} pods are bound after {WAIT_SECONDS:.0f} s")
        await asyncio.sleep(0.25)
    seconds = time.monotonic() - begin
    await create_all(client.delete(PODS, name, "default") for name in names)
    return round(pods / seconds, 1)


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


def fake_slices(number: int) -> list[dict[str, Any]]:
    device = SimulatedHardware([("MI300X", 1)]).read_devices()[0]
    specs = build_slices([list_candidates(device, repartition=False)], {}, SliceSettings(node=f"fake-{number}"))
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
