"""What a container sees of a GPU: its device nodes, its environment, its cap, and nothing else."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.cluster import PYTHON_IMAGE, Cluster
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.emulated_node import EmulatedNode, emulate
from tests.kubernetes.node_agent import NodeAgent, claim_template, gpu_pod, parameters, running_agent, share, whole

from aimgpu.domain import Vendor
from aimgpu.sizing.overhead import CONTEXT_BYTES

GREEDY = """
import ctypes, time
hip = ctypes.CDLL("libamdhip64.so.7")
taken, pointer = 0, ctypes.c_void_p()
while hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 28)) == 0:
    taken += 1 << 28
print(taken, flush=True)
time.sleep(100000)
"""


@pytest.fixture(scope="module")
def emulated(cluster: Cluster) -> EmulatedNode:
    return emulate(cluster.nodes[0], cluster.folder, gpus=2)


@pytest.fixture(scope="module")
def agent(cluster: Cluster, emulated: EmulatedNode) -> Iterator[NodeAgent]:
    with running_agent(cluster, *emulated.options) as running:
        yield running


def tenant(name: str, template: str, emulated: EmulatedNode, *, user: int = 0) -> dict[str, Any]:
    """A pod whose program takes memory until it is refused."""
    driver = str(emulated.driver)
    container = {
        "name": "main",
        "image": PYTHON_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", GREEDY],
        "env": [{"name": "LD_LIBRARY_PATH", "value": driver}, {"name": "AIMGPU_SOFTWARE_GPU", "value": f"{driver}/state"}],
        "volumeMounts": [{"name": "driver", "mountPath": driver}],
        "securityContext": {"runAsUser": user},
        "resources": {"claims": [{"name": "gpu"}]},
    }
    pod = gpu_pod(name, template, containers=[container])
    pod["spec"]["volumes"] = [{"name": "driver", "hostPath": {"path": driver}}]
    return pod


def taken(cluster: Cluster, name: str, namespace: str, agent: NodeAgent) -> int:
    wait_until(
        lambda: bool(cluster.kubectl("logs", name, f"--namespace={namespace}", check=False)), "a printed line", agent.check
    )
    return int(cluster.kubectl("logs", name, f"--namespace={namespace}").split()[0])


def test_tenants_of_one_gpu_get_their_cap_and_not_a_byte_more(
    cluster: Cluster, namespace: str, agent: NodeAgent, emulated: EmulatedNode
) -> None:
    same = {"selectors": [{"cel": {"expression": "device.attributes['gpu.aim.amd.com'].index == 0"}}]}
    enforced = parameters(isolation="enforced")
    cluster.apply(claim_template("large", share("20Gi", "50", **same), config=enforced), namespace)
    cluster.apply(claim_template("small", share("3Gi", "10", **same), config=enforced), namespace)
    cluster.apply([tenant("large", "large", emulated), tenant("small", "small", emulated, user=1000)], namespace)
    for name, cap in (("large", 20 << 30), ("small", 3 << 30)):
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
        got = taken(cluster, name, namespace, agent)
        step, context = 1 << 28, CONTEXT_BYTES[Vendor.AMD]  # what the driver keeps for a process is counted too
        assert got == (cap - context) // step * step, name
        environment = cluster.exec(name, "env", namespace=namespace)
        assert "AIMGPU_LEVEL=runtime" in environment
        assert "HSA_CU_MASK=" in environment


def test_a_pod_keeps_what_it_preloads_itself_and_its_cap_holds(
    cluster: Cluster, namespace: str, agent: NodeAgent, emulated: EmulatedNode
) -> None:
    cluster.apply(claim_template("small", share("3Gi"), config=parameters(isolation="enforced")), namespace)
    own = str(emulated.driver / "libnvidia-ml.so.1")
    pod = tenant("own", "small", emulated)
    pod["spec"]["containers"][0]["env"].append({"name": "LD_PRELOAD", "value": own})
    cluster.apply(pod, namespace)
    cluster.wait("pod/own", "condition=Ready", namespace)
    assert taken(cluster, "own", namespace, agent) < 3 << 30
    maps = cluster.exec("own", "cat", "/proc/1/maps", namespace=namespace)
    assert own in maps
    assert "/libaimgpu.so" in maps


def test_an_image_without_glibc_is_refused_before_its_program_starts_where_limits_were_promised(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    """The image of busybox has no loader at all."""
    cluster.apply(claim_template("small", share("3Gi"), config=parameters(isolation="enforced")), namespace)
    cluster.apply(gpu_pod("musl", "small"), namespace)

    def states() -> str:
        return json.dumps(cluster.get("pod", "musl", namespace)["status"].get("containerStatuses", []))

    wait_for(states, lambda text: "its image has no glibc" in text, "the reason", agent.check)


def test_a_container_has_the_device_nodes_of_its_gpu_only(
    cluster: Cluster, namespace: str, agent: NodeAgent, emulated: EmulatedNode
) -> None:
    second = {"selectors": [{"cel": {"expression": "device.attributes['gpu.aim.amd.com'].index == 1"}}]}
    gpu = whole()
    gpu["exactly"] |= second
    cluster.apply(claim_template("second", gpu, config=parameters(isolation="hardware")), namespace)
    cluster.apply(gpu_pod("owner", "second"), namespace)
    cluster.wait("pod/owner", "condition=Ready", namespace)

    assert {device["attributes"]["numaNode"]["int"] for device in agent.devices().values()} == {0}
    assert cluster.exec("owner", "ls", "/dev/dri", namespace=namespace).split() == ["renderD136"]
    assert "character special" in cluster.exec("owner", "stat", "/dev/kfd", namespace=namespace)
    environment = cluster.exec("owner", "env", namespace=namespace)
    assert "ROCR_VISIBLE_DEVICES=GPU-" in environment
    assert "AIMGPU_LEVEL=hardware" in environment
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "none"},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {
                        "name": "main",
                        "image": "localhost/busybox:test",
                        "imagePullPolicy": "Never",
                        "command": ["/bin/sleep", "1000"],
                    }
                ],
            },
        },
        namespace,
    )
    cluster.wait("pod/none", "condition=Ready", namespace)
    assert "dri" not in cluster.exec("none", "ls", "/dev", namespace=namespace).split()


def test_isolation_that_cannot_be_had_is_refused_and_the_pod_says_why(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    cluster.apply(claim_template("strict", share("1Gi"), config=parameters(isolation="hardware")), namespace)
    cluster.apply(gpu_pod("strict", "strict"), namespace)

    def reason() -> str:
        return cluster.kubectl("get", "events", f"--namespace={namespace}", "--output=jsonpath={.items[*].message}")

    wait_until(lambda: "can be enforced at level runtime at most, hardware was promised" in reason(), "an event", agent.check)
    # The agent writes into the claim after it has answered the kubelet, which tries again and again.
    (claim,) = wait_for(
        lambda: cluster.get_all("resourceclaims", namespace),
        lambda claims: claims[0]["status"]["devices"][0]["conditions"],
        "the status of the claim",
        agent.check,
    )
    (condition,) = claim["status"]["devices"][0]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "NotPrepared")
    assert "hardware was promised" in condition["message"]
    wait_for(agent.grants, lambda grants: grants == [], "nothing is held", agent.check)
