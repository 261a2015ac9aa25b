"""KAI-Scheduler's real programs place pods by its annotations, and the node agent enforces what KAI granted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.foreign import KAI, KSERVE, needs
from tests.cluster.waiting import wait_until
from tests.kubernetes.admission import running_admission
from tests.kubernetes.kai import QUEUE, RESERVATIONS, SCHEDULER, running_kai
from tests.kubernetes.kserve import running_kserve
from tests.kubernetes.node_agent import ACCOUNT, NAMESPACE, NodeAgent, running_agent

from aimgpu.hardware.simulated import find_product
from aimgpu.kubernetes.admission.served_model import PodModel, size_model
from aimgpu.kubernetes.agent.access_rules import kai_rules
from aimgpu.sizing import built_in
from aimgpu.units import MIB

pytestmark = needs(KAI, KSERVE)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
PRODUCT = "H200-141"
GPU_MEMORY = find_product(PRODUCT).memory_bytes
PLUGIN = "version: v1\n"  # whole GPUs, for KAI's reservation pods


@pytest.fixture(scope="module")
def agent(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeAgent]:
    """With our device plugin in the place of NVIDIA's; the node has two simulated GPUs."""
    config = Path(tmp_path_factory.mktemp("plugin")) / "config.yaml"
    config.write_text(PLUGIN)
    rbac = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": "node-agent-kai"}}
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "node-agent-kai"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "node-agent-kai"},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
    }
    cluster.apply([role | {"rules": kai_rules()}, binding])
    options = ("--simulated", f"{PRODUCT}:2", "--kai", "--device-plugin", str(config))
    with running_kai(cluster), running_agent(cluster, *options) as running, running_admission(cluster):
        wait_until(lambda: allocatable(cluster) == 2, "two GPUs for KAI", running.check)
        yield running
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", "node-agent-kai")


def allocatable(cluster: Cluster) -> int:
    return int(cluster.get("node", "node1")["status"]["allocatable"].get("nvidia.com/gpu", 0))


def pod(name: str, annotations: dict[str, str]) -> dict[str, Any]:
    main = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations, "labels": {"kai.scheduler/queue": QUEUE}},
        "spec": {"schedulerName": SCHEDULER, "terminationGracePeriodSeconds": 0, "containers": [main]},
    }


def environment(cluster: Cluster, name: str, namespace: str) -> dict[str, str]:
    cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    printed = cluster.exec(name, "env", namespace=namespace)
    return dict(line.partition("=")[::2] for line in printed.splitlines())


def test_pods_that_kai_placed_are_held_to_what_kai_granted(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    cluster.apply(
        [pod("half", {"gpu-fraction": "0.5"}), pod("part", {"gpu-fraction": "0.4"}), pod("fixed", {"gpu-memory": "20000"})],
        namespace,
    )
    half, part, fixed = (environment(cluster, name, namespace) for name in ("half", "part", "fixed"))
    assert half["GPU_PORTION"] == "0.50"  # written by KAI
    assert int(half["AIMGPU_MEMORY_BYTES"]) == GPU_MEMORY // 2 // MIB * MIB
    assert int(part["AIMGPU_MEMORY_BYTES"]) == GPU_MEMORY * 4 // 10 // MIB * MIB
    assert int(fixed["AIMGPU_MEMORY_BYTES"]) == 20000 * MIB
    for found in (half, part, fixed):  # on the GPU that KAI chose
        assert found["AIM_PARTITION_STABLE_ID"].partition("/")[0] == found["NVIDIA_VISIBLE_DEVICES"]
    # Reservation pods hold whole GPUs, and are not tenants of them.
    assert cluster.get_all("pods", RESERVATIONS)
    wait_until(lambda: len(agent.grants()) == 3, "three tenants and none of KAI's own", agent.check)
    assert not any(grant["exclusive"] for grant in agent.grants())
    # After a restart of the agent the same is held.
    before = sorted(grant["memory_bytes"] for grant in agent.grants())
    agent.restart()
    assert sorted(grant["memory_bytes"] for grant in agent.grants()) == before
    cluster.delete("pod", "--all", namespace=namespace)
    wait_until(lambda: not agent.grants(), "grants are given back", agent.check)


def test_parts_of_two_gpus_and_a_size_found_from_the_model(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    sized = pod("sized", {"aim.amd.com/gpu-sharing": "true", "aim.amd.com/model": MODEL})
    cluster.apply([pod("both", {"gpu-fraction": "0.3", "gpu-fraction-num-devices": "2"}), sized], namespace)
    both, alone = (environment(cluster, name, namespace) for name in ("both", "sized"))
    assert int(both["AIMGPU_MEMORY_BYTES"]) == 2 * (GPU_MEMORY * 3 // 10 // MIB * MIB)
    assert len(set(both["NVIDIA_VISIBLE_DEVICES"].split(","))) == 2
    needed = size_model(PodModel(name=MODEL), built_in()).total_bytes
    assert needed <= int(alone["AIMGPU_MEMORY_BYTES"]) < needed + 2 * MIB  # KAI got it as gpu-memory
    cluster.delete("pod", "--all", namespace=namespace)
    wait_until(lambda: not agent.grants(), "grants are given back", agent.check)


def test_what_kai_refuses_is_refused_and_partitions_are_not_for_kai(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    for annotations, words in (
        ({"gpu-fraction": "1.2"}, "gpu-fraction cannot be '1.2'"),
        ({"gpu-fraction": "0.5", "gpu-memory": "100"}, "both given"),
        ({"gpu-fraction": "0.5", "aim.amd.com/compute-mode": "CPX"}, "KAI-Scheduler places no partitions"),
    ):
        with pytest.raises(RuntimeError, match=words):
            cluster.apply(pod("bad", annotations), namespace)


def test_an_inference_service_through_kserve_and_kai_is_enforced(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    server = ["/bin/httpd", "-f", "-p", "8080"]
    main = {"name": "kserve-container", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": server}
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": "chat",
            "labels": {"kai.scheduler/queue": QUEUE},
            "annotations": {"gpu-fraction": "0.25", "serving.kserve.io/autoscalerClass": "none"},
        },
        "spec": {"predictor": {"schedulerName": SCHEDULER, "minReplicas": 1, "maxReplicas": 1, "containers": [main]}},
    }
    with running_kserve(cluster):
        cluster.apply(service, namespace)
        cluster.wait("inferenceservice/chat", "condition=Ready", namespace)
        (made,) = cluster.get_all("pods", namespace)
        found = environment(cluster, made["metadata"]["name"], namespace)
        assert found["GPU_PORTION"] == "0.25"
        assert int(found["AIMGPU_MEMORY_BYTES"]) == GPU_MEMORY // 4 // MIB * MIB
        assert len(cluster.get_all("replicasets", namespace)) == 1
        cluster.kubectl("delete", "inferenceservice", "chat", f"--namespace={namespace}")
        wait_until(lambda: not agent.grants(), "the grant is given back", agent.check)
