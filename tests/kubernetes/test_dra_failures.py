"""Programs of the node killed at random moments, sick GPUs, servers without features, and rivals for the same GPUs."""

import random
import time
from collections.abc import Iterator

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.kubernetes_versions import BETA_FROM, chosen_minor
from tests.cluster.requirements import missing
from tests.cluster.waiting import wait_for, wait_until
from tests.examples import examples
from tests.kubernetes.node_agent import NodeAgent, claim_template, gpu_pod, running_agent, share, whole

ROUNDS = examples(2)
GPU = "sim-mi300x-0"


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[NodeAgent]:
    with running_agent(cluster, "--simulated", "MI300X:1", "--repartition") as running:
        yield running


def kill(victim: str, agent: NodeAgent) -> None:
    if victim == "agent":
        agent.kill()
        agent.start(wait=False)
    elif victim == "kubelet":
        agent.node.restart_kubelet(kill=True)
    else:
        agent.node.restart_containerd(kill=True)


def check_grants(agent: NodeAgent) -> None:
    """Never more than the GPU has, and nothing twice."""
    grants = agent.grants()
    assert sum(grant["memory_bytes"] for grant in grants) <= 206141652992
    assert len({grant["instance_id"] for grant in grants}) == len(grants)


def test_kills_at_any_moment_lead_to_running_pods_and_to_nothing_left(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    choose = random.Random(15)
    cluster.apply(claim_template("third", share("60Gi", "33")), namespace)
    for number in range(ROUNDS):
        pods = [f"pod-{number}-{index}" for index in range(3)]
        cluster.apply([gpu_pod(name, "third") for name in pods], namespace)
        time.sleep(choose.uniform(0, 1.0))
        kill(choose.choice(["agent", "agent", "kubelet", "containerd"]), agent)
        check_grants(agent)
        for name in pods:
            cluster.wait(f"pod/{name}", "condition=Ready", namespace)
        check_grants(agent)
        assert len(agent.grants()) == 3
        cluster.kubectl("delete", "pod", *pods, f"--namespace={namespace}", "--grace-period=1", "--wait=false")
        time.sleep(choose.uniform(0, 2.0))
        kill(choose.choice(["agent", "agent", "kubelet", "containerd"]), agent)
        check_grants(agent)
        cluster.wait(" ".join(f"pod/{name}" for name in pods[:1]), "delete", namespace)
        wait_until(lambda: not agent.grants() and not agent.cdi_files(), "everything given back", agent.check)


def test_a_sick_gpu_is_tainted_its_pods_are_evicted_and_it_comes_back(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    cluster.apply(claim_template("some", share("1Gi")), namespace)
    cluster.apply(gpu_pod("patient", "some"), namespace)
    cluster.wait("pod/patient", "condition=Ready", namespace)

    agent.set_simulated_state(faults={GPU: "lost"})

    cluster.wait("pod/patient", "delete", namespace)
    cluster.apply(gpu_pod("next", "some"), namespace)
    # The evicted pod's process may outlive its claim for a moment, and is a stranger then.
    unhealthy = ("gpu.aim.amd.com/unhealthy", "NoExecute")
    wait_for(
        agent.devices,
        lambda devices: unhealthy in [(taint["key"], taint["effect"]) for taint in devices[GPU]["taints"]],
        "a taint that evicts",
        agent.check,
    )
    agent.set_simulated_state(faults={})
    cluster.wait("pod/next", "condition=Ready", namespace)


def test_a_gpu_that_a_stranger_uses_is_not_given_to_pods(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    agent.set_simulated_state(foreign=[{"device": GPU, "pid": 1, "name": "python", "memory_bytes": 1 << 30}])
    wait_for(
        agent.devices,
        lambda devices: [taint["key"] for taint in devices[GPU]["taints"]] == ["gpu.aim.amd.com/foreign-processes"],
        "a taint",
        agent.check,
    )
    agent.set_simulated_state(foreign=[])
    wait_until(lambda: not agent.devices()[GPU].get("taints"), "no taint", agent.check)


def test_a_claim_deleted_by_force_while_the_agent_was_down_is_released(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    cluster.apply(claim_template("some", share("1Gi")), namespace)
    cluster.apply(gpu_pod("gone", "some"), namespace)
    cluster.wait("pod/gone", "condition=Ready", namespace)
    agent.kill()
    cluster.kubectl("delete", "pod", "gone", f"--namespace={namespace}", "--grace-period=0", "--force")
    wait_until(lambda: not cluster.get_all("resourceclaims", namespace), "the claim is deleted")
    assert len(agent.grants()) == 1
    agent.start()
    wait_until(lambda: not agent.grants(), "the grant is released", agent.check)


def test_a_second_agent_waits_and_a_rival_driver_is_refused_by_name(cluster: Cluster, agent: NodeAgent) -> None:
    rival = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "node1-rival"},
        "spec": {
            "driver": "gpu.amd.com",
            "nodeName": "node1",
            "pool": {"name": "node1", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0"}],
        },
    }
    second = NodeAgent(cluster, agent.node, agent.options, agent.kubeconfig, agent.state)
    kept = agent.process
    second.start(wait=False)
    wait_until(lambda: "another manager owns" in second.log(), "it waits for the first, by name", second.check)
    second.stop()
    agent.stop()
    cluster.apply(rival)
    try:
        second.start(wait=False)
        assert second.process is not None
        second.process.popen.wait()
        assert "the DRA driver gpu.amd.com publishes devices of this node" in second.process.written()
    finally:
        cluster.kubectl("delete", "resourceslice", "node1-rival")
        agent.process = kept
        agent.start()


@pytest.mark.cluster
@pytest.mark.skipif(chosen_minor() < BETA_FROM, reason="some of these gates came later")
def test_a_server_without_the_features_gets_what_it_can_keep_and_the_log_names_the_gates() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    gates = ("DRAConsumableCapacity", "DRAPartitionableDevices", "DRADeviceTaints", "DRAResourceClaimDeviceStatus")
    dependent = ("DRADeviceTaintRules", "DRADeviceBindingConditions", "DRAResourceClaimGranularStatusAuthorization")
    with (
        Cluster(feature_gates=dict.fromkeys((*gates, *dependent), False)) as older,
        running_agent(older, "--simulated", "MI300X:1", "--repartition") as agent,
    ):
        wait_until(lambda: list(agent.devices()) == [GPU], "the whole GPU only", agent.check)
        lacking = ("DRAConsumableCapacity: no shares of a GPU", "DRAPartitionableDevices")
        wait_for(agent.log, lambda log: all(gate in log for gate in lacking), "the log names both gates", agent.check)
        older.apply(claim_template("whole", whole()))
        older.apply(gpu_pod("owner", "whole"))
        older.wait("pod/owner", "condition=Ready")
        unseen = "DRAResourceClaimDeviceStatus: claims do not show what was granted"
        wait_for(agent.log, lambda log: unseen in log, "the log names the gate of the device status", agent.check)
        older.delete("pod", "owner")
