"""Plans evict every pod that holds something of a node's GPUs, whichever way it asked for it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.kubernetes.api_server import serving
from tests.kubernetes.partitioned_cluster import GPU_NODES, PLANS, PODS, PartitionedCluster

from aimgpu.kubernetes.cluster.operator.plan_phases import target_layouts

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"
Add = Callable[[PartitionedCluster], None]


def add_pod(cluster: PartitionedCluster, phase: str = "Running", **container: Any) -> None:
    spec = {"nodeName": "n1", "containers": [{"name": "main", **container}]}
    cluster.api.put(PODS, {"metadata": {"name": "busy"}, "spec": spec, "status": {"phase": phase}})


def with_claim(cluster: PartitionedCluster, driver: str = "gpu.aim.amd.com", pool: str = "n1") -> None:
    add_pod(cluster)
    results = [{"request": "gpu", "driver": driver, "pool": pool, "device": "gpu-a"}]
    reserved = [{"resource": "pods", "name": "busy", "uid": "1"}]
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}
    cluster.api.put(CLAIMS, {"metadata": {"name": "busy-gpu"}, "spec": {}, "status": status})


def with_replica(cluster: PartitionedCluster, phase: str = "Running", resource: str = "amd.com/gpu") -> None:
    add_pod(cluster, phase, resources={"limits": {resource: "1"}})
    cluster.api.patch(f"{GPU_NODES}/n1", {"status": {"resources": [{"name": "amd.com/gpu", "replicas": 4}]}})


@pytest.mark.parametrize(
    ("add", "evicted"),
    [
        (with_claim, ["team/busy"]),  # of its own, or of plain limits, for which kube-scheduler makes one
        (lambda cluster: with_claim(cluster, driver="net.example.com"), []),
        (lambda cluster: with_claim(cluster, pool="n2"), []),
        (with_replica, ["team/busy"]),
        (lambda cluster: with_replica(cluster, phase="Succeeded"), []),
        (lambda cluster: with_replica(cluster, resource="example.com/fpga"), []),
        (lambda cluster: cluster.add_pod("busy"), ["team/busy"]),
    ],
)
def test_a_dry_run_lists_the_pods_that_would_be_evicted(add: Add, evicted: list[str]) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            cluster = PartitionedCluster(api, client)
            cluster.add_node()
            add(cluster)
            plan = cluster.add_plan(dryRun=True)
            await cluster.look()
            found = api.find(f"/apis/aim.amd.com/v1alpha1/partitionplans/{plan['metadata']['name']}")
            assert found is not None
            assert found["status"]["evictions"] == evicted

    asyncio.run(main())


def test_a_node_is_changed_when_the_pod_with_a_claim_of_its_own_is_gone() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            cluster = PartitionedCluster(api, client)
            cluster.add_node()
            with_claim(cluster)
            cluster.add_plan()
            await cluster.look(3)
            assert cluster.phase() == "Draining"
            assert api.find(f"{PODS}/busy") is None
            assert cluster.wanted() == []  # its claim is still reserved for it
            api.remove(f"{CLAIMS}/busy-gpu")
            await cluster.carry_on()
            assert (cluster.phase(), cluster.layout()) == ("Succeeded", "CPX/NPS1")

    asyncio.run(main())


def test_what_a_dry_run_listed_goes_when_the_plan_is_carried_out() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            cluster = PartitionedCluster(api, client)
            cluster.add_node()
            cluster.add_pod("busy")
            cluster.add_plan(dryRun=True)
            await cluster.look()
            api.patch(f"{PLANS}/cpx", {"spec": {"dryRun": False}})
            await cluster.carry_on()
            found = api.find(f"{PLANS}/cpx")
            assert found is not None
            assert (found["status"]["phase"], found["status"]["evictions"]) == ("Succeeded", [])

    asyncio.run(main())


AMD_LAYOUTS = ["SPX/NPS1", "CPX/NPS1"]
MI300X = {"id": "a", "index": 0, "vendor": "amd", "product": "MI300X", "layout": "SPX/NPS1", "layouts": AMD_LAYOUTS}
MIG = [f"1g.18gb@{number}" for number in range(60)]
H200 = {"id": "n", "index": 1, "vendor": "nvidia", "product": "H200", "layout": "whole", "layouts": ["whole", *MIG]}


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({"layout": {"computeMode": "CPX"}}, {"a": "CPX/NPS1"}),
        ({"layout": {"mig": "1g.18gb@3"}}, {"n": "1g.18gb@3"}),
        ({"layout": {"computeMode": "CPX"}, "gpus": [0]}, {"a": "CPX/NPS1"}),
    ],
)
def test_a_layout_is_for_the_gpus_of_its_vendor(spec: dict[str, Any], wanted: dict[str, str]) -> None:
    assert target_layouts(spec, [MI300X, H200]) == (wanted, None)


def test_a_gpu_that_is_named_and_cannot_have_the_layout_is_refused_in_a_sentence_that_can_be_read() -> None:
    found, problem = target_layouts({"layout": {"computeMode": "CPX"}, "gpus": [1]}, [MI300X, H200])
    assert not found
    assert "n (H200) cannot have CPX/NPS1; it can have whole, 1g.18gb@0" in str(problem)
    assert str(problem).endswith("and 53 others")
