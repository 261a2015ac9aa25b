"""Shares, partitions and whole GPUs by claims: kube-scheduler places, the driver makes it true."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.kubernetes_versions import counts_shares
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.node_agent import NodeAgent, claim_template, gpu_pod, partition, running_agent, share, whole

MI300X = "sim-mi300x-0"
changes_layouts = pytest.mark.skipif(not counts_shares(), reason="claims change layouts where kube-scheduler counts shares")


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[NodeAgent]:
    with running_agent(cluster, "--simulated", "MI300X:1,H200:1", "--repartition") as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(agent: NodeAgent) -> Iterator[None]:
    yield
    wait_until(lambda: not agent.grants() and not agent.cdi_files(), "everything given back", agent.check)


def is_waiting(cluster: Cluster, name: str, namespace: str) -> bool:
    status = cluster.get("pod", name, namespace)["status"]
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    return bool(status["phase"] == "Pending" and conditions.get("PodScheduled", {}).get("reason") == "Unschedulable")


def on(product: str) -> dict[str, Any]:
    expression = f"device.attributes['gpu.aim.amd.com'].productName == '{product}'"
    return {"selectors": [{"cel": {"expression": expression}}]}


def test_two_pods_share_a_gpu_the_third_waits_and_starts_when_one_ends(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    cluster.apply(claim_template("half", share("95Gi", "50", **on("MI300X"))), namespace)
    cluster.apply([gpu_pod(name, "half") for name in ("one", "two")], namespace)
    for name in ("one", "two"):
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    cluster.apply(gpu_pod("three", "half"), namespace)
    wait_until(lambda: is_waiting(cluster, "three", namespace), "the third pod waits", agent.check)
    assert sorted(grant["memory_bytes"] for grant in agent.grants()) == [95 << 30, 95 << 30]

    cluster.delete("pod", "one", namespace=namespace)

    cluster.wait("pod/three", "condition=Ready", namespace)
    environment = cluster.exec("three", "env", namespace=namespace)
    assert f"AIMGPU_MEMORY_BYTES={95 << 30}" in environment
    assert "AIMGPU_COMPUTE_PERCENT=50" in environment
    assert f"AIM_PARTITION_STABLE_ID={MI300X}/spx-0" in environment


def test_a_share_excludes_the_whole_gpu_and_the_other_way_round(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    assert (f"{MI300X}-shared" in agent.devices()) == counts_shares()  # else one device, whatever the options
    whole_gpu = whole()
    whole_gpu["exactly"] |= on("MI300X")
    cluster.apply(claim_template("whole", whole_gpu), namespace)
    cluster.apply(claim_template("some", share("1Gi", **on("MI300X"))), namespace)
    cluster.apply(gpu_pod("share", "some"), namespace)
    cluster.wait("pod/share", "condition=Ready", namespace)
    cluster.apply(gpu_pod("all", "whole"), namespace)
    wait_until(lambda: is_waiting(cluster, "all", namespace), "the whole GPU is not free", agent.check)

    cluster.delete("pod", "share", namespace=namespace)
    cluster.wait("pod/all", "condition=Ready", namespace)
    cluster.apply(gpu_pod("late", "some"), namespace)

    wait_until(lambda: is_waiting(cluster, "late", namespace), "no share beside a whole GPU", agent.check)


def test_memory_and_fraction_from_different_namespaces_mix(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    other = f"{namespace}-b"
    cluster.make_namespace(other)
    try:
        cluster.apply(claim_template("fraction", share("70000Mi", "50", **on("H200-141"))), namespace)
        cluster.apply(claim_template("memory", share("20000000000", **on("H200-141"))), other)
        cluster.apply(gpu_pod("fraction", "fraction"), namespace)
        cluster.apply(gpu_pod("memory", "memory"), other)
        cluster.wait("pod/fraction", "condition=Ready", namespace)
        cluster.wait("pod/memory", "condition=Ready", other)

        charged = {grant["deployment"].partition("/")[0]: grant for grant in agent.grants()}
        assert charged[namespace]["memory_bytes"] == 70000 << 20
        assert charged[other]["memory_bytes"] == 19074 << 20  # rounded up to whole MiB, and charged so
        assert charged[other]["compute_ppm"] is None
    finally:
        cluster.delete("pod", "--all", namespace=other)
        cluster.kubectl("delete", "namespace", other, "--wait=false")


@changes_layouts
def test_a_partition_is_made_when_it_is_needed_and_undone_when_the_gpu_is_idle(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    cluster.apply(claim_template("cpx", partition("cpx")), namespace)
    inside = share("2Gi")
    inside["exactly"] |= {
        "deviceClassName": "shared-partition.gpu.aim.amd.com",
        "selectors": [{"cel": {"expression": "device.attributes['gpu.aim.amd.com'].partitionProfile == 'cpx'"}}],
    }
    cluster.apply(claim_template("inside", inside), namespace)
    cluster.apply([gpu_pod("exclusive", "cpx"), gpu_pod("first", "inside"), gpu_pod("second", "inside")], namespace)
    for name in ("exclusive", "first", "second"):
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)

    assert agent.simulated_state()["devices"][MI300X]["layout"] == "CPX/NPS1"
    partitions = {grant["deployment"].rpartition("/")[2].partition("-")[0]: grant["partition_id"] for grant in agent.grants()}
    assert partitions["exclusive"] not in (partitions["first"], partitions["second"])
    assert "AIM_COMPUTE_MODE=CPX" in cluster.exec("first", "env", namespace=namespace)
    # The modes of one GPU exclude each other: no other layout can be had meanwhile.
    cluster.apply(claim_template("dpx", partition("dpx")), namespace)
    cluster.apply(gpu_pod("other-mode", "dpx"), namespace)
    wait_until(lambda: is_waiting(cluster, "other-mode", namespace), "another mode waits", agent.check)
    cluster.delete("pod", "--all", namespace=namespace)

    wait_until(lambda: agent.simulated_state()["devices"][MI300X]["layout"] == "SPX/NPS1", "layout restored", agent.check)


@changes_layouts
def test_mig_instances_of_several_profiles_are_made_side_by_side(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    cluster.apply([claim_template("small", partition("1g.18gb")), claim_template("large", partition("3g.71gb"))], namespace)
    cluster.apply(gpu_pod("small", "small"), namespace)
    cluster.wait("pod/small", "condition=Ready", namespace)
    cluster.apply(gpu_pod("large", "large"), namespace)
    cluster.wait("pod/large", "condition=Ready", namespace)

    assert {grant["partition_id"].partition("/")[2] for grant in agent.grants()} == {"1g.18gb-0", "3g.71gb-4"}
    assert agent.simulated_state()["devices"]["sim-h200-141-0"]["layout"] == "1g.18gb@0+3g.71gb@4"


def test_containers_of_a_pod_have_the_limits_of_the_request_they_name(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    big, small = share("40Gi", "60", **on("MI300X")), share("10Gi", "20", **on("MI300X"))
    big["name"], small["name"] = "big", "small"
    cluster.apply(claim_template("two", big, small), namespace)
    containers = [
        {
            "name": name,
            "image": "localhost/busybox:test",
            "imagePullPolicy": "Never",
            "command": ["/bin/sleep", "100000"],
            "resources": {"claims": [{"name": "gpu", "request": name}]},
        }
        for name in ("big", "small")
    ]
    cluster.apply(gpu_pod("pair", "two", containers=containers), namespace)
    cluster.wait("pod/pair", "condition=Ready", namespace)

    for name, memory, compute in (("big", 40 << 30, 60), ("small", 10 << 30, 20)):
        environment = cluster.exec("pair", "env", namespace=namespace, container=name)
        assert f"AIMGPU_MEMORY_BYTES={memory}\n" in environment
        assert f"AIMGPU_COMPUTE_PERCENT={compute}\n" in environment


def test_the_claim_says_what_was_granted_and_how_it_is_enforced(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    cluster.apply(claim_template("some", share("8Gi", "25", **on("MI300X"))), namespace)
    cluster.apply(gpu_pod("some", "some"), namespace)
    cluster.wait("pod/some", "condition=Ready", namespace)

    def statuses() -> list[dict[str, object]]:
        (claim,) = cluster.get_all("resourceclaims", namespace)
        found: list[dict[str, object]] = claim["status"].get("devices") or []
        return found

    wait_until(lambda: bool(statuses()), "device status", agent.check)
    (status,) = statuses()
    assert status["data"] == {
        "partition": f"{MI300X}/spx-0",
        "memory": "8Gi",
        "computePercent": 25,
        "compute": "76 of 304 CUs (25%)",
        "exclusive": False,
        "level": "none",
        "mechanism": "none",
    }


def test_a_plain_limit_gets_a_whole_gpu(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    container = {
        "name": "main",
        "image": "localhost/busybox:test",
        "imagePullPolicy": "Never",
        "command": ["/bin/sleep", "100000"],
        "resources": {"limits": {"aim.amd.com/gpu": "1"}},
    }
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"}, "spec": spec}, namespace)
    cluster.wait("pod/plain", "condition=Ready", namespace)

    (grant,) = agent.grants()
    assert grant["exclusive"] is True
    assert "AIM_PARTITION_STABLE_ID=" in cluster.exec("plain", "env", namespace=namespace)


def test_pods_of_a_namespace_share_one_claim_and_its_limits_and_the_last_one_gives_it_back(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    template = claim_template("common", share("24Gi", "40", **on("MI300X")))
    claim = {**template, "kind": "ResourceClaim", "spec": template["spec"]["spec"]}
    cluster.apply(claim, namespace)
    for name in ("first", "second"):
        pod = gpu_pod(name, "unused")
        pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "common"}]
        cluster.apply(pod, namespace)
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)

    (grant,) = agent.grants()  # charged once, whoever uses it
    assert grant["memory_bytes"] == 24 << 30
    for name in ("first", "second"):
        assert f"AIMGPU_MEMORY_BYTES={24 << 30}\n" in cluster.exec(name, "env", namespace=namespace)
    cluster.delete("pod", "first", namespace=namespace)
    wait_until(
        lambda: len(cluster.get("resourceclaim", "common", namespace)["status"]["reservedFor"]) == 1, "one user", agent.check
    )
    assert len(agent.grants()) == 1


def test_one_device_for_whole_and_shares_keeps_both_apart_without_counters(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    agent.stop()
    agent.options = ("--simulated", "MI300X:1", "--single-device")
    agent.start()

    def published() -> tuple[list[str], bool]:
        """Devices, and whether there are counters."""
        specs = [item["spec"] for item in agent.slices()]
        devices = [device["name"] for spec in specs for device in spec.get("devices") or ()]
        return devices, any(spec.get("sharedCounters") for spec in specs)

    wait_for(published, lambda found: found == ([MI300X], False), "one device of one GPU, no counters", agent.check)
    cluster.apply([claim_template("whole", whole()), claim_template("half", share("95Gi", "50"))], namespace)
    cluster.apply([gpu_pod(name, "half") for name in ("one", "two")], namespace)
    for name in ("one", "two"):
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    cluster.apply(gpu_pod("all", "whole"), namespace)
    wait_until(lambda: is_waiting(cluster, "all", namespace), "the whole GPU is not free", agent.check)
    assert [grant["exclusive"] for grant in agent.grants()] == [False, False]

    cluster.delete("pod", "one", "two", namespace=namespace)

    cluster.wait("pod/all", "condition=Ready", namespace)
    cluster.apply(gpu_pod("late", "half"), namespace)
    wait_until(lambda: is_waiting(cluster, "late", namespace), "no share beside a whole GPU", agent.check)
    (grant,) = agent.grants()
    assert grant["exclusive"] is True
    assert grant["memory_bytes"] == 206141652992
