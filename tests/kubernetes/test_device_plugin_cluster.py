"""The device plugin with a real kubelet: time-sliced AMD GPUs, repartitioning, restarts, health."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.accounts import NAMESPACE, make_account
from tests.kubernetes.admission import running_admission
from tests.kubernetes.node_agent import NodeAgent, running_agent

from aimgpu.kubernetes.cluster.operator.access_rules import cluster_role_rules, namespaced_rules, role_rules
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions

CONFIG = """
version: v1
flags: {migStrategy: mixed}
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: true
    resources:
    - {name: amd.com/spx_nps1, replicas: 2, rename: amd.com/gpu.shared}
    - {name: amd.com/cpx_nps1, replicas: 3}
"""
GPU = "sim-mi300x-0"


@pytest.fixture(scope="module")
def agent(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeAgent]:
    path = Path(tmp_path_factory.mktemp("plugin")) / "config.yaml"
    path.write_text(CONFIG)
    options = ("--simulated", "MI300X:1", "--no-dra", "--device-plugin", str(path))
    with running_agent(cluster, *options, waits_for="plugin.registered") as running:
        yield running
    cluster.kubectl("delete", "gpunodes", "--all", check=False)  # what the plugin offered is over


@pytest.fixture(scope="module")
def operator(cluster: Cluster, agent: NodeAgent) -> Iterator[Process]:
    """With its own rights."""
    cluster.apply(custom_resource_definitions())
    for name in ("gpunodes", "gpushares", "partitionplans"):
        cluster.wait_until_served(f"{name}.aim.amd.com")
    environment = {
        "KUBECONFIG": str(make_account(cluster, "operator", [*cluster_role_rules(), *namespaced_rules()], role_rules()))
    }
    command = [sys.executable, "-m", "aimgpu.kubernetes.cluster.operator", "--namespace", NAMESPACE]
    running = cluster.start("operator-replicas", command, env=environment)
    yield running
    running.stop()


def allocatable(cluster: Cluster, name: str) -> int:
    return int(cluster.get("node", "node1")["status"]["allocatable"].get(name, 0))


def pod(name: str, resource: str, count: int = 1) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sleep", "100000"],
        "resources": {"limits": {resource: str(count)}},
    }
    spec = {"terminationGracePeriodSeconds": 0, "restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def is_running(cluster: Cluster, wanted: dict[str, Any], namespace: str) -> bool:
    """Made again if it was refused, as by a controller: a kubelet that has just started may not have listed devices yet."""
    name = wanted["metadata"]["name"]
    cluster.apply(wanted, namespace)
    status = cluster.get("pod", name, namespace)["status"]
    if status.get("reason") == "UnexpectedAdmissionError":
        cluster.delete("pod", name, namespace=namespace)
    return bool(status.get("phase") == "Running")


def test_two_pods_share_an_amd_gpu_the_third_waits_and_starts_when_one_ends(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    wait_until(lambda: allocatable(cluster, "amd.com/gpu.shared") == 2, "two replicas", agent.check)
    cluster.apply([pod(name, "amd.com/gpu.shared") for name in ("one", "two")], namespace)
    for name in ("one", "two"):
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    environment = cluster.exec("one", "env", namespace=namespace)
    assert f"AIMGPU_MEMORY_BYTES={206141652992 // 2 // (1 << 20) * (1 << 20)}" in environment
    assert f"AIM_PARTITION_STABLE_ID={GPU}/spx-0" in environment
    assert "AIMGPU_LEVEL=none" in environment
    cluster.apply(pod("three", "amd.com/gpu.shared"), namespace)
    cluster.delete("pod", "one", namespace=namespace)
    cluster.wait("pod/three", "condition=Ready", namespace)
    # The kubelet does not report that a container has ended: the agent asks it now and then.
    wait_for(agent.grants, lambda grants: len(grants) == 2, "the grants of the pods that run", agent.check)
    wanted = {"amd.com/gpu.replicas": "2", "amd.com/gpu.compute-memory-partition": "spx_nps1"}
    wait_for(
        lambda: cluster.get("node", "node1")["metadata"]["labels"],
        lambda labels: wanted.items() <= labels.items(),
        "the node's labels",
        agent.check,
    )
    cluster.delete("pod", "--all", namespace=namespace)
    wait_until(lambda: not agent.grants(), "grants of pods that are gone are given back", agent.check)


def test_an_annotated_pod_gets_a_replica_where_no_node_has_the_dra_driver(
    cluster: Cluster, namespace: str, agent: NodeAgent, operator: Process
) -> None:
    wait_until(lambda: not cluster.get_all("resourceslices"), "slices of former agents are gone", agent.check)
    wait_until(lambda: _offers(cluster), "what the plugin offers is in the GpuNode", agent.check)
    half = pod("half", "cpu")
    half["metadata"]["annotations"] = {"gpu-fraction": "0.5"}
    with running_admission(cluster) as (server,):
        wait_until(lambda: _applied(cluster, half, namespace), "admission knows the replicas", lambda: _running(server))
        cluster.wait("pod/half", "condition=Ready", namespace)
        more = {**half, "metadata": {"name": "more", "annotations": {"gpu-fraction": "0.6"}}}
        with pytest.raises(RuntimeError, match="are asked for"):
            cluster.apply(more, namespace)
    found = cluster.get("pod", "half", namespace)
    assert found["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "1", "amd.com/gpu.shared": "1"}
    assert "resourceClaims" not in found["spec"]
    row = _check_share(cluster, namespace, "half", operator)
    assert (row["resource"], row["partitionInfo"]["partitionId"]) == ("amd.com/gpu.shared", f"{GPU}/spx-0")
    half = row["partitionInfo"]["partitionSizeGB"] / 2
    assert row["partitionInfo"]["allocatedMemoryGB"] == pytest.approx(half, rel=0.001)
    cluster.delete("pod", "--all", namespace=namespace)


def _check_share(cluster: Cluster, namespace: str, name: str, operator: Process) -> dict[str, Any]:
    """The one row of the pod's GpuShare, which has the level and partition that the plugin gave to its container."""
    status = wait_for(
        lambda: _share_status(cluster, namespace),
        lambda status: "level" in status and status["conditions"][0]["status"] == "True",
        "a share with a level",
        lambda: _running(operator),
    )
    (row,) = status["replicas"]
    environment = cluster.exec(name, "env", namespace=namespace)
    info = row["partitionInfo"]
    assert (row["pod"], row["gpu"]) == (name, GPU)
    assert f"AIMGPU_LEVEL={row['level']}\n" in environment
    assert f"AIM_PARTITION_STABLE_ID={info['partitionId']}\n" in environment
    assert f"AIM_COMPUTE_MODE={info['computeMode']}\n" in environment
    assert info["availableMemoryGB"] == pytest.approx(info["partitionSizeGB"] - info["allocatedMemoryGB"], abs=0.002)
    return dict(row)


def _share_status(cluster: Cluster, namespace: str) -> dict[str, Any]:
    found = cluster.get_all("gpushares", namespace)
    return dict(found[0].get("status") or {}) if found else {}


def _applied(cluster: Cluster, item: dict[str, Any], namespace: str) -> bool:
    try:
        cluster.apply(item, namespace)
    except RuntimeError:  # refused
        return False
    return True


def _offers(cluster: Cluster) -> bool:
    return any((one.get("status") or {}).get("resources") for one in cluster.get_all("gpunodes"))


def _running(server: Process) -> None:
    assert server.running, server.tail()


def test_more_than_one_replica_is_refused_and_the_pod_says_why(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    cluster.apply(pod("greedy", "amd.com/gpu.shared", 2), namespace)
    cluster.wait("pod/greedy", "jsonpath={.status.phase}=Failed", namespace)
    status = cluster.get("pod", "greedy", namespace)["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "maximum request size for shared resources is 1" in status["message"]


def test_a_repartition_and_a_restart_of_the_kubelet_are_followed_without_a_restart_of_the_agent(
    cluster: Cluster, namespace: str, agent: NodeAgent, operator: Process
) -> None:
    agent.set_simulated_state(devices={GPU: {"layout": "CPX/NPS1", "pending_memory_mode": None}})
    wait_until(lambda: allocatable(cluster, "amd.com/cpx_nps1") == 24, "24 replicas of 8 partitions", agent.check)
    registered = agent.log().count("plugin.registered")
    agent.node.restart_kubelet(kill=True)
    wait_for(
        agent.log,
        lambda log: "kubelet.restarted" in log and log.count("plugin.registered") > registered,
        "registered again",
        agent.check,
    )
    wait_until(lambda: is_running(cluster, pod("cpx", "amd.com/cpx_nps1"), namespace), "a pod runs", agent.check)
    row = _check_share(cluster, namespace, "cpx", operator)
    assert (row["resource"], row["partitionInfo"]["computeMode"]) == ("amd.com/cpx_nps1", "CPX")  # one of eight partitions

    agent.set_simulated_state(faults={GPU: "lost"})
    wait_until(lambda: allocatable(cluster, "amd.com/cpx_nps1") == 0, "no healthy replica", agent.check)
    agent.set_simulated_state(faults={})
    wait_until(lambda: allocatable(cluster, "amd.com/cpx_nps1") == 24, "healthy again", agent.check)
    cluster.delete("pod", "--all", namespace=namespace)
    agent.set_simulated_state(devices={})
