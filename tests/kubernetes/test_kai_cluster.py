"""KAI-Scheduler's real programs place pods by its annotations, and the node agent enforces what KAI granted."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.foreign import KAI, needs
from tests.cluster.waiting import wait_until
from tests.kubernetes.example_manifests import granted_bytes, read_example, with_stand_in
from tests.kubernetes.kai import PRODUCT, QUEUE, RESERVATIONS, SCHEDULER, running_kai_agent
from tests.kubernetes.node_agent import NodeAgent

from aimgpu.hardware.simulated import find_product
from aimgpu.kubernetes.vocabulary.served_model import PodModel, size_model
from aimgpu.sizing import built_in
from aimgpu.units import MIB

pytestmark = needs(KAI)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
GPU_MEMORY = find_product(PRODUCT).memory_bytes


@pytest.fixture(scope="module")
def agent(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeAgent]:
    with running_kai_agent(cluster, tmp_path_factory.mktemp("plugin")) as running:
        yield running


def pod(name: str, annotations: dict[str, str]) -> dict[str, Any]:
    main = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations, "labels": {"kai.scheduler/queue": QUEUE}},
        "spec": {"schedulerName": SCHEDULER, "terminationGracePeriodSeconds": 0, "containers": [main]},
    }


def run(cluster: Cluster, namespace: str, name: str, annotations: dict[str, str]) -> dict[str, str]:
    """What its container sees. One pod at a time: KAI 0.12.0 may drop a reservation while it binds two (see the docs)."""
    cluster.apply(pod(name, annotations), namespace)
    cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    printed = cluster.exec(name, "env", namespace=namespace)
    return dict(line.partition("=")[::2] for line in printed.splitlines())


def offers_gpus(agent: NodeAgent) -> bool:
    """Whether its device plugin has registered since it was started."""
    return agent.process is not None and "plugin.registered" in agent.process.written()


def end(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    """Nothing is left for KAI to place the pods of the next test beside."""
    cluster.delete("pod", "--all", namespace=namespace)
    wait_until(lambda: not agent.grants(), "grants are given back", agent.check)
    wait_until(lambda: not cluster.get_all("pods", RESERVATIONS), "KAI's reservations are gone", agent.check)


def test_pods_that_kai_placed_are_held_to_what_kai_granted(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    half = run(cluster, namespace, "half", {"gpu-fraction": "0.5"})
    part = run(cluster, namespace, "part", {"gpu-fraction": "0.4"})
    fixed = run(cluster, namespace, "fixed", {"gpu-memory": "20000"})
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
    wait_until(lambda: offers_gpus(agent), "GPUs for KAI again", agent.check)
    assert sorted(grant["memory_bytes"] for grant in agent.grants()) == before
    end(cluster, namespace, agent)


def test_the_pods_of_the_examples_are_held_to_what_they_ask(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    granted = {}
    for file in ("kai-fraction.yaml", "kai-memory.yaml"):
        [item] = read_example(file)
        name = item["metadata"]["name"]
        cluster.apply(with_stand_in(item), namespace)
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
        granted[name] = granted_bytes(cluster, name, namespace)
    assert granted == {"gpu-sharing": GPU_MEMORY // 2 // MIB * MIB, "gpu-memory": 2000 * MIB}
    end(cluster, namespace, agent)


def test_parts_of_two_gpus_and_a_size_found_from_the_model(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    both = run(cluster, namespace, "both", {"gpu-fraction": "0.3", "gpu-fraction-num-devices": "2"})
    alone = run(cluster, namespace, "sized", {"aim.amd.com/gpu-sharing": "true", "aim.amd.com/model": MODEL})
    assert int(both["AIMGPU_MEMORY_BYTES"]) == 2 * (GPU_MEMORY * 3 // 10 // MIB * MIB)
    assert len(set(both["NVIDIA_VISIBLE_DEVICES"].split(","))) == 2
    needed = size_model(PodModel(name=MODEL), built_in()).total_bytes
    assert needed <= int(alone["AIMGPU_MEMORY_BYTES"]) < needed + 2 * MIB  # KAI got it as gpu-memory
    end(cluster, namespace, agent)


def test_what_kai_refuses_is_refused_and_partitions_are_not_for_kai(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    for annotations, words in (
        ({"gpu-fraction": "1.2"}, "gpu-fraction cannot be '1.2'"),
        ({"gpu-fraction": "0.5", "gpu-memory": "100"}, "both given"),
        ({"gpu-fraction": "0.5", "aim.amd.com/compute-mode": "CPX"}, "KAI-Scheduler places no partitions"),
    ):
        with pytest.raises(RuntimeError, match=words):
            cluster.apply(pod("bad", annotations), namespace)
