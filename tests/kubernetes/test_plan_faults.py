"""What a PartitionPlan leaves alone, how it reports what holds it up, and pods whose device went with the old layout."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.kubernetes.api_server import ApiServer, serving, until
from tests.kubernetes.partitioned_cluster import CLOSED, GPU_NODES, NODES, PLANS, PODS, PartitionedCluster
from tests.kubernetes.test_share_loop import DRA, condition, publish, running

from aimgpu.kubernetes.cluster.uninstall import forget_nodes

Object = dict[str, Any]
Scenario = Callable[[PartitionedCluster], Awaitable[None]]
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LAYOUTS = ["SPX/NPS1", "DPX/NPS1", "CPX/NPS1", "CPX/NPS4"]


def play(scenario: Scenario) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            await scenario(PartitionedCluster(api, client))

    asyncio.run(main())


def add_two_gpus(cluster: PartitionedCluster) -> None:
    """Each held by a pod of its own."""
    cluster.add_node()
    gpus = [
        {"id": f"gpu-{n}", "index": n, "product": "MI300X", "layout": "SPX/NPS1", "layouts": LAYOUTS, "memoryBytes": 192 << 30}
        for n in (0, 1)
    ]
    cluster.api.patch(f"{GPU_NODES}/n1", {"status": {"gpus": gpus}})
    devices = [{"name": f"gpu-{n}-shared", "attributes": {"gpu": {"string": f"gpu-{n}"}}} for n in (0, 1)]
    spec = {"driver": "gpu.aim.amd.com", "pool": {"name": "n1"}, "devices": devices}
    cluster.api.put(f"{DRA}/resourceslices", {"metadata": {"name": "s1"}, "spec": spec})
    for number in (0, 1):
        cluster.add_pod(f"on-{number}")
        results = [{"driver": "gpu.aim.amd.com", "pool": "n1", "device": f"gpu-{number}-shared"}]
        reserved = [{"resource": "pods", "name": f"on-{number}", "uid": "u"}]
        status = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}
        cluster.api.put(
            f"{DRA}/namespaces/team/resourceclaims", {"metadata": {"name": f"c{number}"}, "spec": {}, "status": status}
        )


def pods(api: ApiServer) -> set[str]:
    return {place[2] for place in api.versions() if place[0] == "pods"}


def test_a_plan_for_one_gpu_evicts_and_changes_nothing_of_the_other() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        add_two_gpus(cluster)
        cluster.api.patch(f"{GPU_NODES}/n1", {"spec": {"layouts": [{"gpu": "gpu-1", "layout": "SPX/NPS1"}]}})
        cluster.add_plan("look", gpus=[0], dryRun=True)
        cluster.add_plan(gpus=[0])
        await cluster.look(2)
        assert (cluster.api.find(f"{PLANS}/look") or {})["status"]["evictions"] == ["team/on-0"]
        assert pods(cluster.api) == {"on-1"}
        cluster.api.remove(f"{DRA}/namespaces/team/resourceclaims/c0")  # as it goes with its pod
        await cluster.carry_on()
        assert cluster.phase() == "Succeeded"
        assert cluster.wanted() == [{"gpu": "gpu-0", "layout": "CPX/NPS1"}, {"gpu": "gpu-1", "layout": "SPX/NPS1"}]
        assert pods(cluster.api) == {"on-1"}

    play(scenario)


def test_a_plan_for_another_memory_mode_evicts_every_pod_of_the_node() -> None:
    """It reloads the driver."""

    async def scenario(cluster: PartitionedCluster) -> None:
        add_two_gpus(cluster)
        cluster.add_plan(gpus=[0], layout={"computeMode": "CPX", "memoryMode": "NPS4"})
        await cluster.look(2)
        assert pods(cluster.api) == set()

    play(scenario)


def test_a_pod_of_which_the_gpu_is_not_known_is_in_the_way() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        add_two_gpus(cluster)
        cluster.api.remove(f"{DRA}/resourceslices/s1")
        cluster.add_plan(gpus=[0])
        await cluster.look(2)
        assert pods(cluster.api) == set()

    play(scenario)


def test_a_plan_that_waits_for_a_disruption_budget_names_it_and_a_dry_run_does_so_before() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_pod("stays")
        cluster.api.budgets.add("stays")
        cluster.add_plan("preview", dryRun=True)
        await cluster.look()
        assert "team/stays: Cannot evict" in cluster.message("preview")
        assert "The disruption budget careful" in cluster.message("preview")
        assert pods(cluster.api) == {"stays"}
        cluster.add_plan(drainTimeoutSeconds=60)
        await cluster.look(3)
        (node,) = (cluster.api.find(f"{PLANS}/cpx") or {})["status"]["nodes"]
        assert "team/stays (Cannot evict" in node["message"]
        assert "The disruption budget careful" in node["message"]
        cluster.clock += 100
        await cluster.look()
        assert (cluster.phase(), cluster.is_cordoned()) == ("Failed", False)
        assert "The disruption budget careful" in cluster.message()

    play(scenario)


@pytest.mark.parametrize(("most", "second"), [(1, "SPX/NPS1"), (2, "CPX/NPS1")])
def test_a_node_that_failed_keeps_its_place_among_max_parallel(most: int, second: str) -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        for name in ("n1", "n2"):
            cluster.add_node(name)
        cluster.add_pod("stays")
        cluster.api.budgets.add("stays")
        cluster.add_plan(maxParallel=most, drainTimeoutSeconds=60)
        await cluster.carry_on(2)
        cluster.clock += 100
        await cluster.carry_on()
        assert cluster.phases()["n1"] == "Failed"
        assert (cluster.phase(), cluster.layout("n2")) == ("Failed", second)
        assert ("1 nodes were left as they are" in cluster.message()) == (most == 1)
        assert not cluster.is_cordoned("n1")
        assert not cluster.is_cordoned("n2")

    play(scenario)


@pytest.mark.parametrize("kept", [True, False])
def test_plans_whose_definition_was_removed_leave_no_node_closed(*, kept: bool) -> None:
    """One that is there all the same, as while the API server starts, changes nothing."""

    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_plan()
        await cluster.look(2)
        assert cluster.taints() == [CLOSED]
        if kept:
            cluster.api.put(DEFINITION, {"metadata": {"name": "partitionplans.aim.amd.com"}})
        cluster.api.fault = lambda _method, path: 404 if path.startswith("/apis/aim.amd.com") else None
        await cluster.look()
        assert cluster.is_cordoned() == kept
        assert cluster.taints() == ([CLOSED] if kept else [])

    play(scenario)


def test_uninstalling_in_the_course_of_a_plan_opens_the_node_and_leaves_the_cordon_of_a_person() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        taint = {"key": "disk", "effect": "NoExecute"}
        cluster.add_node("open", taints=[taint])
        cluster.add_node("closed")
        cluster.cordon("closed")
        cluster.add_plan(maxParallel=2)
        await cluster.look(2)
        assert (cluster.is_cordoned("open"), cluster.taints("open")) == (True, [taint, CLOSED])
        for _ in range(2):  # safe to repeat
            await forget_nodes(cluster.client)
        assert (cluster.is_cordoned("open"), cluster.taints("open"), cluster.marks("open")) == (False, [taint], {})
        assert (cluster.is_cordoned("closed"), cluster.taints("closed"), cluster.marks("closed")) == (True, [], {})

    play(scenario)


GONE = "gpu-a is CPX/NPS1 and has no gpu-a/spx-0"


def add_stranded(api: ApiServer, name: str, **metadata: Any) -> None:
    """A pod that was bound to a device of the layout before."""
    made = {"resourceClaimStatuses": [{"name": "aim-gpu", "resourceClaimName": f"{name}-claim"}]}
    own = {"name": name, "labels": {"aim.amd.com/gpu-share": "true"}, **metadata}
    api.put(PODS, {"metadata": own, "spec": {"nodeName": "n1", "containers": []}, "status": {"phase": "Pending", **made}})
    place = {"driver": "gpu.aim.amd.com", "pool": "n1", "device": "gpu0"}
    refused = {"type": "Ready", "status": "False", "reason": "DeviceGone", "message": GONE}
    status = {
        "allocation": {"devices": {"results": [{**place, "consumedCapacity": {"memory": "8Gi"}}]}},
        "devices": [{**place, "conditions": [refused]}],
    }
    ours = {"app.kubernetes.io/managed-by": "aim-gpu-sharing"}
    body = {"metadata": {"name": f"{name}-claim", "labels": ours}, "spec": {}, "status": status}
    api.put(f"{DRA}/namespaces/team/resourceclaims", body)


def told(api: ApiServer, pod: str) -> list[str]:
    """What Events of a pod say."""
    found = [item for place, item in api.store.objects.items() if place[0] == "events"]
    return [
        item["message"] for item in found if (item["involvedObject"]["kind"], item["involvedObject"]["name"]) == ("Pod", pod)
    ]


def test_a_pod_whose_device_is_gone_is_evicted_with_the_reason_where_a_controller_replaces_it() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            publish(api)
            owner = {"kind": "ReplicaSet", "name": "web-1", "controller": True, "uid": "r"}
            add_stranded(api, "owned", ownerReferences=[owner])
            add_stranded(api, "bare")
            add_stranded(api, "ending", deletionTimestamp="2026-01-01T00:00:00Z", ownerReferences=[owner])
            async with running(client):
                await until(lambda: "owned" not in pods(api) and bool(told(api, "bare")))
                assert told(api, "owned") == [f"{GONE}: evicted, so that its controller's next pod is placed again"]
                assert told(api, "bare") == [f"{GONE}: delete the pod, and create it again"]
                assert told(api, "ending") == []
                assert GONE in condition(api, "pod-bare", "team")["message"]
                assert pods(api) == {"bare", "ending"}
                api.patch(f"{PODS}/bare", {"metadata": {"labels": {"seen": "again"}}})
                add_stranded(api, "later", ownerReferences=[owner])
                await until(lambda: "later" not in pods(api))
                assert len(told(api, "bare")) == 1

    asyncio.run(main())


def test_nodes_of_other_programs_are_not_opened_by_uninstalling() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.cordon()
        await forget_nodes(cluster.client)
        assert cluster.is_cordoned()
        assert not [one for one in cluster.api.writes if NODES in one]

    play(scenario)


def agent_pod(api: ApiServer, name: str, *, ready: bool, account: str = "aim-gpu-sharing-agent") -> None:
    api.put(
        "/api/v1/namespaces/system/pods",
        {
            "metadata": {"name": name, "labels": {"app.kubernetes.io/component": "agent"}},
            "spec": {"nodeName": "n1", "serviceAccountName": account},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]},
        },
    )


def test_a_plan_evicts_nobody_where_the_node_agent_does_not_answer() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_pod("stays")
        agent_pod(cluster.api, "agent-1", ready=False)
        cluster.add_plan()
        await cluster.look(3)
        (node,) = (cluster.api.find(f"{PLANS}/cpx") or {})["status"]["nodes"]
        assert (node["phase"], node["message"]) == ("Pending", "waits for its node agent: pod agent-1 is not ready")
        assert (pods(cluster.api) & {"stays"}, cluster.is_cordoned()) == ({"stays"}, False)
        agent_pod(cluster.api, "agent-2", ready=True)  # of an update: it waits, ready, for the other one to go
        await cluster.carry_on()
        assert cluster.phase() == "Succeeded"

    play(scenario)


def test_somebodys_pod_with_an_agents_label_holds_up_no_plan() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        agent_pod(cluster.api, "other", ready=False, account="default")
        cluster.add_plan()
        await cluster.carry_on()
        assert cluster.phase() == "Succeeded"

    play(scenario)
