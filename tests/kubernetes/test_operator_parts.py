"""The operator's pure parts: which workload a pod belongs to, what a share says, the queue, the definitions."""

import asyncio
from typing import Any

import pytest

from aimgpu.kubernetes.cluster.operator.shares.indexes import ClaimIndex, DeviceIndex, KnownGpus
from aimgpu.kubernetes.cluster.operator.shares.status import share_status
from aimgpu.kubernetes.cluster.operator.shares.workloads import Workload, workload_of
from aimgpu.kubernetes.cluster.operator.work_queue import WorkQueue
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions, possible_layouts

GIB = 1 << 30


def pod(name: str, *, node: str = "n1", claim: str | None = "c1", message: str = "") -> dict[str, Any]:
    status: dict[str, Any] = {"phase": "Running" if claim else "Pending"}
    if claim:
        status["resourceClaimStatuses"] = [{"name": "aim-gpu", "resourceClaimName": claim}]
    if message:
        status["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": {"nodeName": node}, "status": status}


def claim(consumed: str, name: str = "c1", /, *, namespace: str = "ns", device: str = "gpu0", **data: str) -> dict[str, Any]:
    place = {"driver": "gpu.aim.amd.com", "pool": "n1", "device": device}
    status: dict[str, Any] = {"allocation": {"devices": {"results": [{**place, "consumedCapacity": {"memory": consumed}}]}}}
    if data:
        status["devices"] = [{**place, "data": data}]
    return {"metadata": {"name": name, "namespace": namespace}, "status": status}


SLICE: dict[str, Any] = {
    "metadata": {"name": "s1"},
    "spec": {
        "driver": "gpu.aim.amd.com",
        "pool": {"name": "n1"},
        "devices": [
            {
                "name": "gpu0",
                "attributes": {
                    "computeMode": {"string": "SPX"},
                    "memoryMode": {"string": "NPS1"},
                    "level": {"string": "runtime"},
                },
                "capacity": {"memory": {"value": "192Gi"}},
            }
        ],
    },
}


ONE = KnownGpus(claims=ClaimIndex([claim("1Gi")]), devices=DeviceIndex([SLICE]))


def test_what_is_left_of_a_gpu_that_kai_shares_out_is_not_guessed() -> None:
    seat = {"name": "kai-3", "attributes": {"type": {"string": "seat"}}, "capacity": {"memory": {"value": "140Gi"}}}
    spec = {"driver": "gpu.aim.amd.com", "pool": {"name": "n1"}, "devices": [seat]}
    devices = DeviceIndex([{"metadata": {"name": "s1"}, "spec": spec}])
    sources = KnownGpus(claims=ClaimIndex([claim("0", device="kai-3")]), devices=devices)
    unprepared = share_status([pod("a")], sources, {})["partitionInfo"]
    assert set(unprepared) == {"partitionId", "partitionSizeGB"}
    data = {"partition": "sim-0/whole-0", "memory": "70Gi", "level": "runtime"}
    sources = KnownGpus(claims=ClaimIndex([claim("0", device="kai-3", **data)]), devices=devices)
    prepared = share_status([pod("a")], sources, {})["partitionInfo"]
    assert prepared["allocatedMemoryGB"] == round(70 * GIB / 1e9, 3)
    assert "availableMemoryGB" not in prepared


def test_a_share_says_where_it_is_and_what_is_left() -> None:
    data = {"partition": "sim-0/spx-0", "memory": "96Gi", "level": "runtime"}
    claims = ClaimIndex([claim("96Gi", **data), claim("48Gi", namespace="other")])
    status = share_status([pod("a")], KnownGpus(claims=claims, devices=DeviceIndex([SLICE])), {})
    assert status["partitionInfo"] == {
        "partitionId": "sim-0/spx-0",
        "computeMode": "SPX",
        "memoryMode": "NPS1",
        "partitionSizeGB": round(192 * GIB / 1e9, 3),
        "allocatedMemoryGB": round(96 * GIB / 1e9, 3),
        "availableMemoryGB": round(48 * GIB / 1e9, 3),
    }
    assert status["level"] == "runtime"
    assert status["conditions"][0]["status"] == "True"


def test_a_share_that_its_node_refuses_is_not_allocated_and_says_why() -> None:
    refused = claim("96Gi", partition="unused")
    del refused["status"]["devices"][0]["data"]
    condition = {"type": "Ready", "status": "False", "reason": "NotPrepared", "message": "level none at most"}
    refused["status"]["devices"][0]["conditions"] = [condition]
    status = share_status([pod("a")], KnownGpus(claims=ClaimIndex([refused]), devices=DeviceIndex([SLICE])), {})
    assert status["conditions"][0]["status"] == "False"
    assert status["conditions"][0]["message"] == "1 of 1 pods wait: a: n1: level none at most"
    assert status["replicas"][0]["problem"] == "level none at most"


def test_a_waiting_pod_is_reported_in_the_words_of_the_scheduler() -> None:
    status = share_status([pod("a"), pod("b", claim=None, message="0/1 nodes: no GPU")], ONE, {})
    condition = status["conditions"][0]
    assert (condition["status"], condition["reason"]) == ("False", "Waiting")
    assert "1 of 2 pods wait: b: 0/1 nodes: no GPU" in condition["message"]


def test_what_did_not_change_keeps_its_time() -> None:
    first = share_status([pod("a")], ONE, {})
    first["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    assert share_status([pod("a")], ONE, first) == first


def test_claims_are_counted_by_device_however_they_come_and_go() -> None:
    index = ClaimIndex()
    assert index.put(claim("8Gi", "a")) == {("n1", "gpu0")}
    assert index.put(claim("8Gi", "a", level="runtime")) == set()  # prepared: nothing else is taken
    assert index.put(claim("4Gi", "a", namespace="other")) == {("n1", "gpu0")}
    assert index.taken_bytes(("n1", "gpu0")) == 12 * GIB
    assert index.put(claim("2Gi", "a", device="gpu1")) == {("n1", "gpu0"), ("n1", "gpu1")}
    assert [one["metadata"]["namespace"] for one in index.holders(("n1", "gpu0"))] == ["other"]
    assert index.remove(claim("4Gi", "a", namespace="other")) == {("n1", "gpu0")}
    assert index.remove(claim("2Gi", "a")) == {("n1", "gpu1")}
    assert (index.taken_bytes(("n1", "gpu0")), index.taken_bytes(("n1", "gpu1")), len(index)) == (0, 0, 0)


def test_devices_go_with_the_slice_that_published_them() -> None:
    index = DeviceIndex([SLICE])
    assert index.find(("n1", "gpu0"))["name"] == "gpu0"
    index.put({**SLICE, "spec": {**SLICE["spec"], "devices": [{"name": "gpu1"}]}})
    assert not index.find(("n1", "gpu0"))
    index.remove(SLICE)
    assert not index.find(("n1", "gpu1"))


@pytest.mark.parametrize(
    ("labels", "owner", "expected"),
    [
        ({}, None, ("Pod", "p-1")),
        ({"serving.kserve.io/inferenceservice": "llm"}, ("ReplicaSet", "llm-predictor-abc"), ("InferenceService", "llm")),
        ({"pod-template-hash": "abc"}, ("ReplicaSet", "web-abc"), ("Deployment", "web")),
        ({}, ("Job", "train"), ("Job", "train")),
        ({}, ("StatefulSet", "db"), ("StatefulSet", "db")),
        ({}, ("Node", "n1"), ("Pod", "p-1")),  # of a file of the kubelet
    ],
)
def test_the_workload_of_a_pod(labels: dict[str, str], owner: tuple[str, str] | None, expected: tuple[str, str]) -> None:
    references = [{"kind": owner[0], "name": owner[1], "controller": True}] if owner else []
    metadata = {"name": "p-1", "namespace": "ns", "labels": labels, "ownerReferences": references}
    assert workload_of({"metadata": metadata}) == Workload("ns", *expected)


def test_long_names_stay_apart_and_fit() -> None:
    names = {Workload("ns", "InferenceService", "x" * 60 + end).share_name for end in ("a", "b")}
    assert len(names) == 2
    assert all(len(name) <= 63 for name in names)


def test_a_key_is_worked_on_once_at_a_time_and_again_if_it_came_meanwhile() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(jitter=lambda: 1.0)
        queue.add("a")
        queue.add("a")
        assert await queue.take() == "a"
        queue.add("a")
        queue.add("b")
        assert await queue.take() == "b"
        queue.done("a")
        assert await queue.take() == "a"
        queue.done("a")
        queue.done("b")
        assert [queue.failed("b") for _ in range(4)] == [0.2, 0.4, 0.8, 1.6]
        assert [queue.failed("b") for _ in range(8)][-3:] == [60.0, 60.0, 60.0]
        queue.done("b")
        assert queue.failed("b") == 0.2
        halved: WorkQueue[str] = WorkQueue(jitter=lambda: 0.0)
        assert [halved.failed("b") for _ in range(3)] == [0.1, 0.2, 0.4]

    asyncio.run(scenario())


def test_impossible_layouts_are_in_no_schema() -> None:
    assert ("SPX", "NPS4") not in possible_layouts()
    assert ("CPX", "NPS4") in possible_layouts()
    assert {item["spec"]["names"]["kind"] for item in custom_resource_definitions()} == {"GpuNode", "GpuShare", "PartitionPlan"}
