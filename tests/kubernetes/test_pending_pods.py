"""Layouts are found for pods that wait, whichever way they ask; what is not understood for certain counts for nothing."""

import asyncio
from typing import Any

import pytest
from tests.kubernetes.api_server import serving
from tests.kubernetes.partitioned_cluster import PLANS, PODS, PartitionedCluster

from aimgpu.kubernetes.cluster.operator.pending_pods import PendingPod, needs_of
from aimgpu.kubernetes.cluster.operator.plan_proposals import propose
from aimgpu.kubernetes.cluster.operator.plan_vocabulary import NodeView

Object = dict[str, Any]
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"
LAYOUTS = ["SPX/NPS1", "DPX/NPS1", "CPX/NPS1", "CPX/NPS4"]
GIB = 1 << 30


def node(layout: str, *resources: str) -> NodeView:
    gpu = {"id": "g0", "index": 0, "product": "MI300X", "layout": layout, "layouts": LAYOUTS, "memoryBytes": 192 * GIB}
    offered = tuple({"name": name} for name in resources)
    return NodeView(name="n1", gpus=[gpu], wanted={}, refused=None, observed=True, cordoned=False, pods=(), resources=offered)


def pod(**spec: Any) -> Object:
    return {"metadata": {"name": "p", "namespace": "team"}, "spec": spec}


def limited(resource: str, count: int = 1) -> Object:
    return pod(containers=[{"name": "main", "resources": {"limits": {resource: str(count)}}}])


def layout_for(waiting: Object, claim: Object | None, seen: NodeView) -> str | None:
    """That is proposed for it."""
    claims = {} if claim is None else {("team", "own"): claim}
    needs = needs_of(waiting, claims)
    found = propose([PendingPod(name="team/p", needs=needs)], [seen]) if needs else []
    return found[0].layout if found else None


def exactly(device_class: str, *expressions: str, memory: str = "", **more: Any) -> Object:
    found: Object = {"deviceClassName": f"{device_class}gpu.aim.amd.com", **more}
    if expressions:
        found["selectors"] = [{"cel": {"expression": expression}} for expression in expressions]
    if memory:
        found["capacity"] = {"requests": {"memory": memory}}
    return found


def claim(*requests: Object, constraints: tuple[Object, ...] = (), **status: Any) -> Object:
    devices = {"requests": [{"name": f"r{n}", "exactly": one} for n, one in enumerate(requests)], "constraints": constraints}
    return {"spec": {"devices": devices}, "status": status}


ATTRIBUTES = "device.attributes['gpu.aim.amd.com']"
CPX = f"{ATTRIBUTES}.partitionProfile == 'cpx'"
NPS4 = f'device.attributes["gpu.aim.amd.com"].computeMode == "CPX" && {ATTRIBUTES}.memoryMode=="NPS4"'
DISTINCT = {"distinctAttribute": "gpu.aim.amd.com/gpu"}


@pytest.mark.parametrize(
    ("wanted", "current", "layout"),
    [
        (claim(exactly("partition.", CPX)), "SPX/NPS1", "CPX/NPS1"),
        (claim(exactly("partition.", CPX)), "CPX/NPS1", None),  # it waits for room
        (claim(exactly("partition.", NPS4)), "CPX/NPS1", "CPX/NPS4"),
        (claim(exactly("partition.")), "SPX/NPS1", "DPX/NPS1"),
        (claim(exactly("partition.", CPX, count=8)), "SPX/NPS1", "CPX/NPS1"),
        (claim(exactly("partition.", CPX, count=9)), "SPX/NPS1", None),
        (claim(exactly("partition.", CPX), exactly("partition.", CPX)), "SPX/NPS1", "CPX/NPS1"),
        (claim(exactly("")), "CPX/NPS1", "SPX/NPS1"),
        (claim(exactly("")), "SPX/NPS1", None),
        (claim(exactly("shared.", memory="90Gi")), "CPX/NPS1", "SPX/NPS1"),
        (claim(exactly("shared.", memory="8Gi")), "CPX/NPS1", None),
        (claim(exactly("shared.")), "CPX/NPS1", None),
        (claim(exactly("shared-partition.", CPX, memory="8Gi")), "SPX/NPS1", "CPX/NPS1"),
        (claim(exactly("partition.", CPX, f"{ATTRIBUTES}.productName == 'MI300X'")), "SPX/NPS1", "CPX/NPS1"),
        (claim(exactly("partition.", CPX, f"{ATTRIBUTES}.productName == 'MI350X'")), "SPX/NPS1", None),
        # Not understood: another form of expression, a MIG profile, any number of devices, different GPUs.
        (claim(exactly("partition.", f"{CPX} || true")), "SPX/NPS1", None),
        (claim(exactly("partition.", f"{ATTRIBUTES}.index < 3")), "SPX/NPS1", None),
        (claim(exactly("partition.", f"{ATTRIBUTES}.partitionProfile == '1g.18gb'")), "SPX/NPS1", None),
        (claim(exactly("partition.", CPX, allocationMode="All")), "SPX/NPS1", None),
        (claim(exactly("partition.", CPX, count=2), constraints=(DISTINCT,)), "SPX/NPS1", None),
        # Nothing is needed: it is there, of others, or only looked at.
        (claim(exactly("partition.", CPX), allocation={"devices": {}}), "SPX/NPS1", None),
        (claim(exactly("other.")), "SPX/NPS1", None),
        (claim(exactly("partition.", CPX, adminAccess=True)), "SPX/NPS1", None),
    ],
)
def test_a_claim_of_its_own_says_what_layout_a_pod_needs(wanted: Object, current: str, layout: str | None) -> None:
    waiting = pod(resourceClaims=[{"name": "gpu", "resourceClaimName": "own"}])
    assert layout_for(waiting, wanted, node(current)) == layout
    assert layout_for(waiting, wanted, node(current, "amd.com/cpx_nps1")) is None  # no driver answers claims there


def test_of_alternatives_one_is_enough() -> None:
    either = [{"name": "a", **exactly("shared.", memory="500Gi")}, {"name": "b", **exactly("partition.", CPX)}]
    wanted = {"spec": {"devices": {"requests": [{"name": "r", "firstAvailable": either}]}}}
    waiting = pod(resourceClaims=[{"name": "gpu", "resourceClaimName": "own"}])
    assert layout_for(waiting, wanted, node("SPX/NPS1")) == "CPX/NPS1"


@pytest.mark.parametrize(
    ("resource", "seen", "layout"),
    [
        ("aim.amd.com/gpu", node("CPX/NPS1"), "SPX/NPS1"),
        ("aim.amd.com/gpu-partition", node("SPX/NPS1"), "DPX/NPS1"),
        ("deviceclass.resource.kubernetes.io/partition.gpu.aim.amd.com", node("SPX/NPS1"), "DPX/NPS1"),
        ("aim.amd.com/gpu-shared", node("CPX/NPS1"), None),
        ("amd.com/cpx_nps4", node("SPX/NPS1", "amd.com/spx_nps1"), "CPX/NPS4"),
        ("amd.com/cpx_nps4", node("SPX/NPS1", "amd.com/gpu"), None),  # partitions have one name there
        ("amd.com/cpx_nps4", node("SPX/NPS1"), None),  # no device plugin
        ("amd.com/gpu", node("SPX/NPS1", "amd.com/gpu"), None),  # smaller partitions are not what it asks for
        ("example.com/fpga", node("SPX/NPS1"), None),
    ],
)
def test_a_limit_says_what_layout_a_pod_needs(resource: str, seen: NodeView, layout: str | None) -> None:
    assert layout_for(limited(resource), None, seen) == layout


def wait(cluster: PartitionedCluster, name: str, **spec: Any) -> None:
    conditions = [{"type": "PodScheduled", "status": "False", "lastTransitionTime": "1970-01-01T00:00:10Z"}]
    status: Object = {"phase": "Pending", "conditions": conditions}
    cluster.api.put(PODS, {"metadata": {"name": name}, "spec": {"containers": [], **spec}, "status": status})


def test_an_automatic_plan_counts_pods_of_every_kind_and_changes_the_layout() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            cluster = PartitionedCluster(api, client)
            cluster.add_node()
            wait(cluster, "plain", **limited("aim.amd.com/gpu-partition")["spec"])
            wait(cluster, "own", resourceClaims=[{"name": "gpu", "resourceClaimName": "own"}])
            wait(cluster, "other", **limited("example.com/fpga")["spec"])
            api.put(CLAIMS, {"metadata": {"name": "own"}, **claim(exactly("partition.", CPX))})
            wait(cluster, "placed", nodeName="n2", **limited("aim.amd.com/gpu-partition")["spec"])
            body = {"metadata": {"name": "auto"}, "spec": {"auto": {"policy": "Apply", "minPendingSeconds": 60}}}
            api.put(PLANS, {"apiVersion": "aim.amd.com/v1alpha1", "kind": "PartitionPlan", **body})
            await cluster.look()
            assert cluster.message("auto") == "2 pods wait; CPX/NPS1 on n1"
            found = api.find(f"{PLANS}/auto")
            assert found is not None
            assert found["status"]["proposals"][0]["pods"] == ["team/own", "team/plain"]
            await cluster.carry_on()
            assert cluster.layout() == "CPX/NPS1"

    asyncio.run(main())
