"""A GpuShare for every workload that holds or waits for GPUs, whichever way its pods ask; what is not known is left out."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.kubernetes.api_server import ApiServer, serving, until
from tests.kubernetes.test_share_loop import DRA, GB, condition, known, pods, publish, running, shares

from aimgpu.kubernetes.api.client import Resource
from aimgpu.kubernetes.cluster.operator.pod_gpus import PodClaim, claims_of, concerns, limits_of, may_ask
from aimgpu.kubernetes.cluster.operator.shares.indexes import ClaimIndex, DeviceIndex, GpuNodeIndex, KnownGpus, PodIndex
from aimgpu.kubernetes.cluster.operator.shares.rows import asks, rows_of
from aimgpu.kubernetes.cluster.operator.shares.workloads import Workload

GPU_NODES = "/apis/aim.amd.com/v1alpha1/gpunodes"
GIB = 1 << 30
STARTED = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
UNPLACED = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
WAITS = {"phase": "Pending", "conditions": [UNPLACED]}
REPLICA = {
    "name": "amd.com/gpu.shared",
    "replicas": 4,
    "memoryBytes": 48 * GIB,
    "partitionBytes": 192 * GIB,
    "shared": True,
    "computeMode": "SPX",
    "memoryMode": "NPS1",
}

Object = dict[str, Any]


def add_pod(api: ApiServer, name: str, status: Object, namespace: str = "a", *, node: str = "n1", **spec: Any) -> None:
    spec = {"containers": [{"name": "main"}], **({"nodeName": node} if node else {}), **spec}
    api.put(pods(namespace), {"metadata": {"name": name}, "spec": spec, "status": status})


def limited(resource: str, count: int = 1) -> Object:
    return {"containers": [{"name": "main", "resources": {"limits": {resource: str(count), "cpu": "1"}}}]}


def add_claim(api: ApiServer, name: str, *users: str, device_class: str = "shared.gpu.aim.amd.com", **status: Any) -> None:
    """Allocated once somebody uses it."""
    requests = [{"name": "gpu", "exactly": {"deviceClassName": device_class}}]
    if users:
        place = {"driver": "gpu.aim.amd.com", "pool": "n1", "device": "gpu0", "consumedCapacity": {"memory": "8Gi"}}
        reserved = [{"resource": "pods", "name": user, "uid": "u"} for user in users]
        status = {"allocation": {"devices": {"results": [place]}}, "reservedFor": reserved, **status}
    body: Object = {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}, "status": status}
    api.put(f"{DRA}/namespaces/a/resourceclaims", body)


def add_gpu_node(api: ApiServer, *resources: Object) -> None:
    part = {"id": "g0/spx-0", "memoryBytes": 192 * GIB, "grantedBytes": 48 * GIB}
    status = {"resources": list(resources), "gpus": [{"id": "g0", "simulated": True, "partitions": [part]}]}
    api.put(GPU_NODES, {"metadata": {"name": "n1"}, "spec": {}, "status": status})


def rows(api: ApiServer, name: str, namespace: str = "a") -> list[Object]:
    found = api.find(f"{shares(namespace)}/{name}") or {}
    return list((found.get("status") or {}).get("replicas") or [])


def is_allocated(api: ApiServer, name: str, namespace: str = "a") -> bool:
    return condition(api, name, namespace).get("status") == "True"


def play(*scenarios: Callable[[ApiServer], Any], namespaces: tuple[str, ...] = ()) -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client, *namespaces):
            publish(api)
            for scenario in scenarios:
                await scenario(api)

    asyncio.run(main())


def test_a_pod_with_a_claim_of_its_own_has_a_share_from_its_waiting_on() -> None:
    async def scenario(api: ApiServer) -> None:
        template: Object = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "mine"}]}
        add_claim(api, "own-gpu-1")
        made: Object = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "own-gpu-1"}]}
        add_pod(api, "own", {**WAITS, **made}, node="", **template)
        await until(lambda: condition(api, "pod-own").get("reason") == "Waiting")
        assert condition(api, "pod-own")["message"] == "1 of 1 pods wait: own: 0/1 nodes are available"
        add_claim(api, "own-gpu-1", "own")
        add_pod(api, "own", {**STARTED, **made}, **template)
        await until(lambda: is_allocated(api, "pod-own"))
        (row,) = rows(api, "pod-own")
        assert (row["claim"], row["node"], row["level"]) == ("own-gpu-1", "n1", "runtime")
        assert row["partitionInfo"]["availableMemoryGB"] == round((184 << 30) / GB, 3)
        api.remove(f"{DRA}/namespaces/a/resourceclaims/own-gpu-1")
        await until(lambda: known(api) == set())  # it asks for nothing any more

    play(scenario)


def test_a_claim_that_several_pods_name_is_had_by_those_that_it_is_reserved_for() -> None:
    async def scenario(api: ApiServer) -> None:
        named: Object = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "common"}]}
        add_claim(api, "common", "first")
        add_pod(api, "first", STARTED, **named)
        add_pod(api, "second", WAITS, node="", **named)
        await until(lambda: is_allocated(api, "pod-first") and condition(api, "pod-second").get("reason") == "Waiting")
        add_claim(api, "common", "first", "second")
        add_pod(api, "second", STARTED, **named)
        await until(lambda: is_allocated(api, "pod-second"))
        left = {row["partitionInfo"]["availableMemoryGB"] for name in ("first", "second") for row in rows(api, f"pod-{name}")}
        assert left == {round((184 << 30) / GB, 3)}  # taken once

    play(scenario)


def test_a_plain_limit_is_answered_by_the_claim_that_kube_scheduler_makes() -> None:
    async def scenario(api: ApiServer) -> None:
        add_pod(api, "plain", WAITS, node="", **limited("aim.amd.com/gpu-shared"))
        await until(lambda: condition(api, "pod-plain").get("reason") == "Waiting")
        add_claim(api, "plain-extended-x", "plain")
        mapping = {"containerName": "main", "resourceName": "aim.amd.com/gpu-shared", "requestName": "r0"}
        special: Object = {
            "extendedResourceClaimStatus": {"resourceClaimName": "plain-extended-x", "requestMappings": [mapping]}
        }
        add_pod(api, "plain", {**STARTED, **special}, **limited("aim.amd.com/gpu-shared"))
        await until(lambda: is_allocated(api, "pod-plain"))
        assert [row["claim"] for row in rows(api, "pod-plain")] == ["plain-extended-x"]

    play(scenario)


def test_a_replica_of_the_device_plugin_has_what_the_node_offers_and_no_level_before_it_is_reported() -> None:
    async def scenario(api: ApiServer) -> None:
        add_pod(api, "web", WAITS, node="", **limited("amd.com/gpu.shared"))
        add_pod(api, "other", WAITS, node="", **limited("example.com/fpga"))
        add_gpu_node(api, REPLICA)
        await until(lambda: condition(api, "pod-web").get("reason") == "Waiting")
        add_pod(api, "web", {"phase": "Pending"}, **limited("amd.com/gpu.shared"))
        await until(lambda: "is not started on n1 yet" in condition(api, "pod-web").get("message", ""))
        add_pod(api, "web", STARTED, **limited("amd.com/gpu.shared"))
        await until(lambda: is_allocated(api, "pod-web"))
        assert rows(api, "pod-web") == [
            {
                "pod": "web",
                "node": "n1",
                "resource": "amd.com/gpu.shared",
                "gpu": "g0",
                "simulated": True,
                "partitionInfo": {
                    "partitionId": "g0/spx-0",
                    "computeMode": "SPX",
                    "memoryMode": "NPS1",
                    "partitionSizeGB": round(192 * GIB / GB, 3),
                    "allocatedMemoryGB": round(48 * GIB / GB, 3),
                    "availableMemoryGB": round(144 * GIB / GB, 3),
                },
            }
        ]
        assert known(api) == {("a", "pod-web")}
        add_pod(api, "web", {**STARTED, "phase": "Succeeded"}, **limited("amd.com/gpu.shared"))
        await until(lambda: condition(api, "pod-web").get("reason") == "NoPods")

    play(scenario)


def test_equal_names_are_two_and_pods_of_other_namespaces_are_left_alone() -> None:
    async def scenario(api: ApiServer) -> None:
        add_gpu_node(api, REPLICA)
        for namespace in ("a", "b", "c", "kai-resource-reservation"):
            add_pod(api, "web", STARTED, namespace, **limited("amd.com/gpu.shared"))
        await until(lambda: known(api) == {("a", "pod-web"), ("b", "pod-web")})
        api.remove(f"{pods('a')}/web")
        await until(lambda: known(api) == {("b", "pod-web")})

    play(scenario, namespaces=("a", "b", "kai-resource-reservation"))


def test_a_server_without_claims_has_shares_of_replicas() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            api.absent.add("resource.k8s.io/v1")
            add_gpu_node(api, REPLICA)
            add_pod(api, "web", STARTED, **limited("amd.com/gpu.shared"))
            async with running(client):
                await until(lambda: is_allocated(api, "pod-web"))

    asyncio.run(main())


def test_what_is_as_it_was_is_not_written_again() -> None:
    """Over a restart, and over changes of the node and the pod that say nothing new of the share."""

    async def main() -> None:
        async with serving() as (api, client):
            add_gpu_node(api, REPLICA)
            add_pod(api, "web", STARTED, **limited("amd.com/gpu.shared", 2))
            add_pod(api, "own", STARTED, resourceClaims=[{"name": "gpu", "resourceClaimName": "common"}])
            add_claim(api, "common", "own")
            async with running(client):
                await until(lambda: is_allocated(api, "pod-web") and is_allocated(api, "pod-own"))
            before = {place: version for place, version in api.versions().items() if place[0] == "gpushares"}
            async with running(client):
                add_pod(api, "late", STARTED, **limited("amd.com/gpu.shared"))
                await until(lambda: is_allocated(api, "pod-late"))
                api.patch(f"{GPU_NODES}/n1", {"status": {"products": "MI300X"}})
                api.patch(f"{pods('a')}/web", {"metadata": {"annotations": {"seen": "yes"}}})
                add_pod(api, "later", STARTED, **limited("amd.com/gpu.shared"))
                await until(lambda: is_allocated(api, "pod-later"))
            assert before.items() <= api.versions().items()

    asyncio.run(main())


def test_a_watch_that_keeps_some_reports_one_that_becomes_another_as_gone() -> None:
    maps = Resource(version="v1", plural="configmaps", namespaced=True)
    path = "/api/v1/namespaces/a/configmaps"

    async def main() -> None:
        async with serving() as (api, client):
            for name, kind in (("x", "ours"), ("y", "theirs")):
                api.put(path, {"metadata": {"name": name}, "data": {"kind": kind}})
            seen: list[tuple[str, str | None]] = []

            async def follow() -> None:
                async for event in client.watch(maps, keep=lambda item: item["data"]["kind"] == "ours"):
                    name = event.object.get("metadata", {}).get("name")
                    seen.append((event.type, name))

            task = asyncio.ensure_future(follow())
            await until(lambda: ("SYNCED", None) in seen)
            api.patch(f"{path}/y", {"data": {"more": "1"}})
            api.patch(f"{path}/y", {"data": {"kind": "ours"}})
            api.patch(f"{path}/x", {"data": {"kind": "theirs"}})
            api.remove(f"{path}/x")
            api.remove(f"{path}/y")
            expected = [("ADDED", "x"), ("SYNCED", None), ("MODIFIED", "y"), ("DELETED", "x"), ("DELETED", "y")]
            await until(lambda: len(seen) >= len(expected))
            assert seen == expected
            task.cancel()

    asyncio.run(main())


NODE: Object = {"metadata": {"name": "n1"}, "status": {}}


def pod(status: Object | None = None, **spec: Any) -> Object:
    return {"metadata": {"name": "p", "namespace": "a"}, "spec": {"nodeName": "n1", **spec}, "status": status or STARTED}


def test_replicas_that_differ_on_a_node_leave_out_what_is_not_the_same_of_all() -> None:
    small = {**REPLICA, "memoryBytes": 12 * GIB, "partitionBytes": 48 * GIB}
    gpus = [{"id": name, "partitions": [{"id": f"{name}/spx-0", "grantedBytes": 0}]} for name in ("g0", "g1")]
    nodes = GpuNodeIndex([{**NODE, "status": {"resources": [REPLICA, small], "gpus": gpus}}])
    first, second = rows_of(pod(**limited("amd.com/gpu.shared", 2)), KnownGpus(nodes=nodes))
    assert first == second
    assert first["partitionInfo"] == {"computeMode": "SPX", "memoryMode": "NPS1"}
    assert "gpu" not in first


def test_a_device_that_is_not_published_has_no_size_and_leaves_nothing_over() -> None:
    place = {"driver": "gpu.aim.amd.com", "pool": "n1", "device": "gpu0"}
    claim = {"metadata": {"name": "c", "namespace": "a"}, "status": {"allocation": {"devices": {"results": [place]}}}}
    made = {**STARTED, "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "c"}]}
    (row,) = rows_of(pod(made), KnownGpus(claims=ClaimIndex([claim]), devices=DeviceIndex()))
    assert row["partitionInfo"] == {"partitionId": "gpu0"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (limited("amd.com/gpu", 2), {"amd.com/gpu": 2}),
        (limited("amd.com/gpu", 0), {}),
        ({"containers": [{"resources": {"limits": {"cpu": "1", "hugepages-2Mi": "4Mi"}}}]}, {}),
        ({**limited("amd.com/gpu"), "initContainers": limited("amd.com/gpu", 3)["containers"]}, {"amd.com/gpu": 3}),
        (
            {
                **limited("amd.com/gpu"),
                "initContainers": [{**limited("amd.com/gpu")["containers"][0], "restartPolicy": "Always"}],
            },
            {"amd.com/gpu": 2},
        ),
    ],
)
def test_limits_of_a_pod_are_what_it_takes_from_its_node(spec: Object, expected: dict[str, int]) -> None:
    assert limits_of({"spec": spec}) == expected


def test_claims_of_a_pod_are_named_made_or_special() -> None:
    status = {
        "resourceClaimStatuses": [{"name": "a", "resourceClaimName": "made"}, {"name": "b"}],
        "extendedResourceClaimStatus": {"resourceClaimName": "special"},
    }
    found = claims_of(pod(status, resourceClaims=[{"name": "c", "resourceClaimName": "named"}]))
    assert found == [PodClaim(name="named", shared=True), PodClaim(name="made"), PodClaim(name="special")]


def request(device_class: str, **more: Any) -> Object:
    return {"spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": device_class, **more}}]}}}


@pytest.mark.parametrize(
    ("claim", "ours"),
    [
        (request("gpu.aim.amd.com"), True),
        (request("gpu.aim.amd.com", adminAccess=True), False),
        (request("net.example.com"), False),
        ({"spec": {"devices": {"requests": [{"firstAvailable": [{"deviceClassName": "shared.gpu.aim.amd.com"}]}]}}}, True),
        (
            {
                **request("ours.example.com"),
                "status": {"allocation": {"devices": {"results": [{"driver": "gpu.aim.amd.com"}]}}},
            },
            True,
        ),
        ({**request("gpu.aim.amd.com"), "status": {"allocation": {"devices": {"results": [{"driver": "other"}]}}}}, False),
    ],
)
def test_a_claim_is_ours_by_its_class_or_by_what_it_got(claim: Object, *, ours: bool) -> None:
    assert concerns({"metadata": {"name": "c"}, **claim}) is ours


@pytest.mark.parametrize(
    ("resource", "node", "expected"),
    [
        ("amd.com/gpu.shared", "n1", True),
        ("amd.com/gpu.shared", "n2", False),  # another plugin's
        ("amd.com/gpu.shared", "", True),
        ("example.com/fpga", "", False),
        ("aim.amd.com/gpu", "", True),
        ("deviceclass.resource.kubernetes.io/gpu.aim.amd.com", "", True),
        ("aim.amd.com/gpu", "n1", False),  # somebody's plugin: kube-scheduler made no claim
    ],
)
def test_a_limit_is_for_gpus_of_ours_where_we_offer_it(resource: str, node: str, *, expected: bool) -> None:
    nodes = GpuNodeIndex([{**NODE, "status": {"resources": [REPLICA]}}, {"metadata": {"name": "n2"}}])
    assert asks(pod(nodeName=node, **limited(resource)), KnownGpus(nodes=nodes)) is expected


def test_pods_that_can_hold_no_gpu_are_not_kept() -> None:
    assert not may_ask(pod(containers=[{"resources": {"limits": {"memory": "1Gi"}}}]))
    assert may_ask(pod(resourceClaims=[{"name": "x"}]))
    assert may_ask({**pod(), "metadata": {"name": "p", "namespace": "a", "labels": {"aim.amd.com/gpu-share": "true"}}})


def test_a_pod_that_moves_to_another_workload_leaves_the_one_before() -> None:
    index = PodIndex()
    labelled = {"name": "p", "namespace": "a", "labels": {"serving.kserve.io/inferenceservice": "llm"}}
    assert index.put(pod(**limited("amd.com/gpu"))) == {Workload("a", "Pod", "p")}
    assert index.limited_on("n1") == {Workload("a", "Pod", "p")}
    moved = {**pod(**limited("amd.com/gpu")), "metadata": labelled}
    assert index.put(moved) == {Workload("a", "Pod", "p"), Workload("a", "InferenceService", "llm")}
    assert index.workloads() == [Workload("a", "InferenceService", "llm")]
    assert index.remove({"metadata": {"name": "p", "namespace": "a"}}) == {Workload("a", "InferenceService", "llm")}
    assert (len(index), index.workloads(), index.limited_on("n1")) == (0, [], set())
