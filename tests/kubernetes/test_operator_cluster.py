"""The operator on the real cluster: GpuShares follow workloads, one of two operators leads."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until
from tests.kubernetes.accounts import NAMESPACE, make_account
from tests.kubernetes.admission import running_admission
from tests.kubernetes.node_agent import NodeAgent, running_agent

from aimgpu.kubernetes.custom_resources import custom_resource_definitions
from aimgpu.kubernetes.operator.access_rules import cluster_role_rules, role_rules


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[NodeAgent]:
    with running_agent(cluster, "--simulated", "MI300X:1") as running, running_admission(cluster):
        wait_until(lambda: bool(running.devices()), "GPUs are published", running.check)
        yield running


@pytest.fixture(scope="module")
def operators(cluster: Cluster, agent: NodeAgent) -> Iterator[list[Process]]:
    cluster.apply(custom_resource_definitions())
    for name in ("gpunodes", "gpushares", "partitionplans"):
        cluster.wait(f"crd/{name}.aim.amd.com", "condition=Established")
    kubeconfig = make_account(cluster, "operator", cluster_role_rules(), role_rules())
    command = [sys.executable, "-m", "aimgpu.kubernetes.operator", "--namespace", NAMESPACE]
    started = [cluster.start(f"operator-{number}", command, env={"KUBECONFIG": str(kubeconfig)}) for number in range(2)]
    wait_until(lambda: leaders(started) != [], "an operator leads", lambda: None)
    yield started
    for process in started:
        process.stop()
    cluster.kubectl("delete", "crd", "gpushares.aim.amd.com", "gpunodes.aim.amd.com", "partitionplans.aim.amd.com")


def leaders(processes: list[Process]) -> list[Process]:
    return [one for one in processes if one.running and "leader.elected" in one.log.read_text(errors="replace")]


def deployment(name: str, replicas: int) -> dict[str, Any]:
    main = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"]}
    template = {
        "metadata": {"labels": {"app": name}, "annotations": {"gpu-fraction": "0.4"}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [main]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def share(cluster: Cluster, name: str, namespace: str) -> dict[str, Any]:
    text = cluster.kubectl("get", "gpushare", name, f"--namespace={namespace}", "--output=json", check=False)
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def condition(cluster: Cluster, name: str, namespace: str) -> dict[str, Any]:
    conditions = share(cluster, name, namespace).get("status", {}).get("conditions") or [{}]
    found: dict[str, Any] = conditions[0]
    return found


def test_a_share_follows_its_workload(cluster: Cluster, namespace: str, operators: list[Process]) -> None:
    name = "deployment-web"
    cluster.apply(deployment("web", 2), namespace)
    wait_until(lambda: condition(cluster, name, namespace).get("status") == "True", "two shares", lambda: None)
    status = share(cluster, name, namespace)["status"]
    assert len(status["replicas"]) == 2
    assert status["partitionInfo"]["computeMode"] == "SPX"
    assert status["partitionInfo"]["allocatedMemoryGB"] == pytest.approx(
        0.4 * status["partitionInfo"]["partitionSizeGB"], rel=0.01
    )

    cluster.kubectl("scale", "deployment/web", "--replicas=3", f"--namespace={namespace}")
    wait_until(lambda: condition(cluster, name, namespace).get("status") == "False", "the third waits", lambda: None)
    assert "1 of 3 pods wait" in condition(cluster, name, namespace)["message"]

    version = share(cluster, name, namespace)["metadata"]["resourceVersion"]
    cluster.kubectl("annotate", "pods", "--selector=app=web", "touched=yes", f"--namespace={namespace}")
    cluster.kubectl("delete", "deployment", "web", f"--namespace={namespace}")
    wait_until(lambda: share(cluster, name, namespace) == {}, "the share goes with its workload", lambda: None)
    assert version


def test_the_other_operator_takes_over_and_shares_stay(cluster: Cluster, namespace: str, operators: list[Process]) -> None:
    cluster.apply(deployment("kept", 1), namespace)
    wait_until(lambda: condition(cluster, "deployment-kept", namespace).get("status") == "True", "a share", lambda: None)
    before = share(cluster, "deployment-kept", namespace)["metadata"]["uid"]
    leading = leaders(operators)
    assert len(leading) == 1
    leading[0].kill()
    cluster.apply(deployment("late", 1), namespace)
    wait_until(
        lambda: condition(cluster, "deployment-late", namespace).get("status") == "True", "the other leads", lambda: None
    )
    assert share(cluster, "deployment-kept", namespace)["metadata"]["uid"] == before
    cluster.kubectl("delete", "deployment", "kept", "late", f"--namespace={namespace}")
    wait_until(lambda: share(cluster, "deployment-late", namespace) == {}, "shares go", lambda: None)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"computeMode": "SPX", "memoryMode": "NPS4"}, "no GPU can have these compute and memory modes together"),
        ({"computeMode": "CPX", "mig": "1g.10gb"}, "either computeMode"),
        ({}, "either computeMode"),
        ({"computeMode": "ABC"}, "Unsupported value"),
    ],
)
def test_plans_that_no_gpu_can_have_are_refused_by_the_schema(
    cluster: Cluster, operators: list[Process], layout: dict[str, str], reason: str
) -> None:
    plan = {
        "apiVersion": "aim.amd.com/v1alpha1",
        "kind": "PartitionPlan",
        "metadata": {"name": "bad"},
        "spec": {"layout": layout},
    }
    with pytest.raises(RuntimeError, match=reason):
        cluster.apply(plan)


def plan(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "aim.amd.com/v1alpha1", "kind": "PartitionPlan", "metadata": {"name": name}, "spec": spec}


def test_a_plan_evicts_repartitions_and_lets_pods_in_again(
    cluster: Cluster, namespace: str, agent: NodeAgent, operators: list[Process]
) -> None:
    cluster.apply(deployment("moved", 1), namespace)
    wait_until(lambda: condition(cluster, "deployment-moved", namespace).get("status") == "True", "a share", lambda: None)
    cluster.apply(plan("preview", layout={"computeMode": "CPX"}, dryRun=True))
    wait_until(lambda: "1 pods would be evicted" in message_of(cluster, "preview"), "a preview", lambda: None)

    cluster.apply(plan("cpx", layout={"computeMode": "CPX"}))
    wait_until(lambda: phase_of(cluster, "cpx") in ("Succeeded", "Failed"), "the plan ends", lambda: None)

    assert phase_of(cluster, "cpx") == "Succeeded", message_of(cluster, "cpx")
    assert agent.simulated_state()["devices"]["sim-mi300x-0"]["layout"] == "CPX/NPS1"
    assert not cluster.get("node", "node1")["spec"].get("unschedulable")
    cluster.kubectl("delete", "deployment", "moved", f"--namespace={namespace}")
    cluster.apply(plan("back", layout={"computeMode": "SPX"}))
    wait_until(lambda: phase_of(cluster, "back") == "Succeeded", "as before", lambda: None)
    cluster.kubectl("delete", "partitionplans", "--all")


def phase_of(cluster: Cluster, name: str) -> str:
    return str(cluster.get("partitionplan", name).get("status", {}).get("phase"))


def message_of(cluster: Cluster, name: str) -> str:
    return str(cluster.get("partitionplan", name).get("status", {}).get("message"))
