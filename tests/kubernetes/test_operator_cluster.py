"""The operator on the real cluster: GpuShares follow workloads, one of two operators leads."""

import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.accounts import NAMESPACE, make_account
from tests.kubernetes.admission import running_admission
from tests.kubernetes.admission import start as start_admission
from tests.kubernetes.chaos import Chaos
from tests.kubernetes.node_agent import NodeAgent, claim_template, gpu_pod, running_agent
from tests.kubernetes.node_agent import partition as a_partition
from tests.kubernetes.node_agent import share as a_share
from tests.kubernetes.store_contract import check_cordons, check_objects

from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.operator.access_rules import cluster_role_rules, namespaced_rules, role_rules
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions

REPARTITIONING = "aim.amd.com/repartitioning"


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[NodeAgent]:
    with running_agent(cluster, "--simulated", "MI300X:1") as running, running_admission(cluster):
        wait_until(lambda: bool(running.devices()), "GPUs are published", running.check)
        yield running


@pytest.fixture(scope="module")
def operators(cluster: Cluster, agent: NodeAgent) -> Iterator[list[Process]]:
    cluster.apply(custom_resource_definitions())
    cluster.wait_until_served("gpunodes.aim.amd.com", "gpushares.aim.amd.com", "partitionplans.aim.amd.com")
    kubeconfig = make_account(cluster, "operator", [*cluster_role_rules(), *namespaced_rules()], role_rules())
    assert kubeconfig == cluster.folder / "operator.kubeconfig"
    started = [start_operator(cluster, number) for number in range(2)]
    wait_until(lambda: leaders(started) != [], "an operator leads", lambda: None)
    yield started
    for process in started:
        process.stop()
    cluster.kubectl("delete", "crd", "gpushares.aim.amd.com", "gpunodes.aim.amd.com", "partitionplans.aim.amd.com")


def start_operator(cluster: Cluster, number: int) -> Process:
    command = [
        sys.executable,
        "-m",
        "aimgpu.kubernetes.cluster.operator",
        "--namespace",
        NAMESPACE,
        "--keep-templates-seconds",
        "2",
    ]
    return cluster.start(f"operator-{number}", command, env={"KUBECONFIG": str(cluster.folder / "operator.kubeconfig")})


def leaders(processes: list[Process]) -> list[Process]:
    """Who leads now: on a machine that does much else one may have lost the lead to the other before."""
    logs = {one.name: one.written() for one in processes if one.running}
    leading = [name for name, log in logs.items() if log.rfind("leader.elected") > log.rfind("leader.lost")]
    return [one for one in processes if one.name in leading]


def leader(processes: list[Process]) -> Process:
    return wait_for(lambda: leaders(processes), lambda found: len(found) == 1, "one operator leads")[0]


def container(**more: Any) -> dict[str, Any]:
    return {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"], **more}


def deployment(name: str, replicas: int) -> dict[str, Any]:
    template = {
        "metadata": {"labels": {"app": name}, "annotations": {"gpu-fraction": "0.4"}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container()]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def limited_pod(name: str, resource: str) -> dict[str, Any]:
    found = gpu_pod(name, "unused", containers=[container(resources={"limits": {resource: "1"}})])
    del found["spec"]["resourceClaims"]
    return found


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
    found = wait_for(
        lambda: share(cluster, name, namespace),
        lambda found: len(found["status"]["replicas"]) == 2 and found["status"]["conditions"][0]["status"] == "True",
        "two shares",
    )
    status = found["status"]
    assert status["partitionInfo"]["computeMode"] == "SPX"
    assert status["partitionInfo"]["allocatedMemoryGB"] == pytest.approx(
        0.4 * status["partitionInfo"]["partitionSizeGB"], rel=0.01
    )

    cluster.kubectl("scale", "deployment/web", "--replicas=3", f"--namespace={namespace}")
    wait_for(
        lambda: condition(cluster, name, namespace),
        lambda found: found["status"] == "False" and "1 of 3 pods wait" in found["message"],
        "the third waits",
    )

    version = share(cluster, name, namespace)["metadata"]["resourceVersion"]
    cluster.kubectl("annotate", "pods", "--selector=app=web", "touched=yes", f"--namespace={namespace}")
    cluster.kubectl("delete", "deployment", "web", f"--namespace={namespace}")
    wait_until(lambda: share(cluster, name, namespace) == {}, "the share goes with its workload", lambda: None)
    assert version


def test_pods_with_claims_of_their_own_or_plain_limits_have_shares(
    cluster: Cluster, namespace: str, operators: list[Process]
) -> None:
    cluster.apply(claim_template("own", a_share("8Gi")), namespace)
    cluster.apply([gpu_pod("own", "own"), limited_pod("plain", "aim.amd.com/gpu-shared")], namespace)
    for name in ("own", "plain"):
        wait_until(partial(is_prepared, cluster, f"pod-{name}", namespace), "a share", lambda: None)
    own, plain = (share(cluster, f"pod-{name}", namespace)["status"] for name in ("own", "plain"))
    assert own["partitionInfo"]["allocatedMemoryGB"] == pytest.approx(8.59, abs=0.001)
    assert own["replicas"][0]["claim"].startswith("own-gpu-")
    assert plain["replicas"][0]["claim"].startswith("plain-")
    assert plain["partitionInfo"]["partitionId"] == own["partitionInfo"]["partitionId"] == "sim-mi300x-0/spx-0"
    assert plain["level"] == own["level"] == "none"  # as of simulated GPUs

    cluster.apply(limited_pod("whole", "aim.amd.com/gpu"), namespace)  # kube-scheduler has made no claim for it
    wait_until(lambda: condition(cluster, "pod-whole", namespace).get("reason") == "Waiting", "it waits", lambda: None)
    cluster.delete("pod", "--all", namespace=namespace)
    wait_until(lambda: cluster.get_all("gpushares", namespace) == [], "the shares go", lambda: None)


def is_prepared(cluster: Cluster, name: str, namespace: str) -> bool:
    info = share(cluster, name, namespace).get("status", {}).get("partitionInfo") or {}
    return "/" in info.get("partitionId", "")


def written_versions(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Versions of what the operator and admission write, by kind and name."""
    kinds = "gpushares,partitionplans,resourceclaimtemplates,customresourcedefinitions"
    items = json.loads(cluster.kubectl("get", kinds, f"--namespace={namespace}", "--output=json"))["items"]
    ours = [one for one in items if one["kind"] != "CustomResourceDefinition" or one["spec"]["group"] == "aim.amd.com"]
    return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in ours}


def is_settled(found: dict[str, Any]) -> bool:
    """The node has prepared it, and what pods of tests before held has been returned."""
    info = found["status"].get("partitionInfo") or {"partitionId": ""}
    if "/" not in info["partitionId"]:
        return False
    return bool(abs(info["partitionSizeGB"] - info["allocatedMemoryGB"] - info["availableMemoryGB"]) < 1)  # of 206 GB


def test_the_other_operator_takes_over_and_shares_stay(cluster: Cluster, namespace: str, operators: list[Process]) -> None:
    cluster.apply(deployment("kept", 1), namespace)
    wait_until(lambda: condition(cluster, "deployment-kept", namespace).get("status") == "True", "a share", lambda: None)
    before = share(cluster, "deployment-kept", namespace)["metadata"]["uid"]
    leading = leader(operators)
    wait_until(
        lambda: is_settled(share(cluster, "deployment-kept", namespace)), "all of the GPU but its part is free", lambda: None
    )
    cluster.apply(plan("noticed", layout={"computeMode": "CPX"}, dryRun=True))
    wait_until(lambda: "would be evicted" in message_of(cluster, "noticed"), "a preview", lambda: None)
    versions = written_versions(cluster, namespace)
    leading.kill()
    assert leader(operators) is not leading
    cluster.apply(plan("noticed-later", layout={"computeMode": "CPX"}, dryRun=True))
    wait_until(lambda: "would be evicted" in message_of(cluster, "noticed-later"), "it has looked at all", lambda: None)
    assert versions.items() <= written_versions(cluster, namespace).items()  # nothing that was right was written again
    cluster.kubectl("delete", "partitionplans", "--all")
    cluster.apply(deployment("late", 1), namespace)
    wait_until(
        lambda: condition(cluster, "deployment-late", namespace).get("status") == "True", "the other leads", lambda: None
    )
    assert share(cluster, "deployment-kept", namespace)["metadata"]["uid"] == before
    cluster.kubectl("delete", "deployment", "kept", "late", f"--namespace={namespace}")
    wait_until(lambda: share(cluster, "deployment-late", namespace) == {}, "shares go", lambda: None)


def test_the_api_server_of_the_tests_in_process_is_held_to_what_the_real_one_does(cluster: Cluster, namespace: str) -> None:
    async def check() -> None:
        async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
            await check_objects(client, namespace)
            await check_cordons(client, "contract")

    asyncio.run(check())


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
    moved = deployment("moved", 1)
    moved["spec"]["template"]["metadata"]["annotations"] = {"gpu-memory": "8192"}  # fits a partition of any layout
    cluster.apply(moved, namespace)
    wait_until(lambda: condition(cluster, "deployment-moved", namespace).get("status") == "True", "a share", lambda: None)
    cluster.apply(plan("preview", layout={"computeMode": "CPX"}, dryRun=True))
    wait_until(lambda: "1 pods would be evicted" in message_of(cluster, "preview"), "a preview", lambda: None)

    cluster.apply(plan("cpx", layout={"computeMode": "CPX"}))
    wait_until(lambda: phase_of(cluster, "cpx") in ("Succeeded", "Failed"), "the plan ends", lambda: None)

    assert phase_of(cluster, "cpx") == "Succeeded", message_of(cluster, "cpx")
    assert agent.simulated_state()["devices"]["sim-mi300x-0"]["layout"] == "CPX/NPS1"
    wait_until(lambda: node_is_free(cluster), "the node is open again", lambda: None)
    for layout in ("CPX", "DPX", "QPX"):  # the evicted pod's replacement is placed on what is there then
        if layout != "CPX":
            cluster.apply(plan(layout.lower(), layout={"computeMode": layout}))
            wait_until(partial(has_ended, cluster, layout.lower()), "the plan ends", lambda: None)
            assert phase_of(cluster, layout.lower()) == "Succeeded", message_of(cluster, layout.lower())
        cluster.kubectl("rollout", "status", "deployment/moved", f"--namespace={namespace}", "--timeout=600s")
        wait_until(
            lambda: condition(cluster, "deployment-moved", namespace).get("status") == "True", "the pod runs", lambda: None
        )
        assert share(cluster, "deployment-moved", namespace)["status"]["partitionInfo"]["computeMode"] == layout
        assert agent.simulated_state()["devices"]["sim-mi300x-0"]["layout"] == f"{layout}/NPS1"
    cluster.kubectl("delete", "deployment", "moved", f"--namespace={namespace}")
    cluster.apply(plan("back", layout={"computeMode": "SPX"}))
    wait_until(lambda: phase_of(cluster, "back") == "Succeeded", "as before", lambda: None)
    cluster.kubectl("delete", "partitionplans", "--all")


def has_ended(cluster: Cluster, name: str) -> bool:
    return phase_of(cluster, name) in ("Succeeded", "Failed")


def taint_keys(cluster: Cluster) -> set[str]:
    return {str(taint["key"]) for taint in cluster.get("node", "node1")["spec"].get("taints") or ()}


def node_is_free(cluster: Cluster) -> bool:
    node = cluster.get("node", "node1")
    held = node["spec"].get("unschedulable") or "aim.amd.com/partition-plan" in node["metadata"]["labels"]
    return not held and not {"amd-dcm", REPARTITIONING} & taint_keys(cluster)


def test_a_plan_deleted_under_way_lets_its_node_go_and_a_cordon_of_a_person_stays(
    cluster: Cluster, namespace: str, agent: NodeAgent, operators: list[Process]
) -> None:
    cluster.apply(deployment("staying", 1), namespace)
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "staying"}}}
    cluster.apply(
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "staying"}, "spec": spec}, namespace
    )
    wait_until(lambda: condition(cluster, "deployment-staying", namespace).get("status") == "True", "a share", lambda: None)
    for restarted in (False, True):
        cluster.apply(plan("dropped", layout={"computeMode": "CPX"}))
        wait_until(lambda: "are to be evicted" in node_message(cluster, "dropped"), "it drains", lambda: None)
        assert cluster.get("node", "node1")["spec"]["unschedulable"]
        assert REPARTITIONING in taint_keys(cluster)
        if restarted:  # the next leader finds the node held for a plan that it has never seen
            leading = operators.index(leader(operators))
            operators[leading].stop()
            cluster.kubectl("delete", "partitionplan", "dropped")
            operators[leading] = start_operator(cluster, leading)
        else:
            cluster.kubectl("delete", "partitionplan", "dropped")
        wait_until(lambda: node_is_free(cluster), "the node is let go", lambda: None)

    cluster.kubectl("cordon", "node1")
    cluster.apply(plan("dropped", layout={"computeMode": "CPX"}))
    wait_until(lambda: "are to be evicted" in node_message(cluster, "dropped"), "it drains again", lambda: None)
    cluster.kubectl("delete", "partitionplan", "dropped")
    held = "aim.amd.com/partition-plan"
    wait_until(lambda: held not in cluster.get("node", "node1")["metadata"]["labels"], "the plan lets go", lambda: None)
    assert cluster.get("node", "node1")["spec"]["unschedulable"]
    assert REPARTITIONING not in taint_keys(cluster)
    cluster.kubectl("uncordon", "node1")
    cluster.kubectl("delete", "deployment/staying", "pdb/staying", f"--namespace={namespace}")
    wait_until(lambda: share(cluster, "deployment-staying", namespace) == {}, "the share goes", lambda: None)


def node_message(cluster: Cluster, name: str) -> str:
    nodes = cluster.get("partitionplan", name).get("status", {}).get("nodes") or [{}]
    return str(nodes[0].get("message"))


def test_an_automatic_plan_finds_the_layout_that_a_pending_pod_needs(
    cluster: Cluster, namespace: str, agent: NodeAgent, operators: list[Process]
) -> None:
    waiting = deployment("partition", 1)
    waiting["spec"]["template"]["metadata"]["annotations"] = {"aim.amd.com/compute-mode": "CPX"}
    cluster.apply([waiting, claim_template("own", a_partition("cpx")), gpu_pod("own", "own")], namespace)
    cluster.apply(limited_pod("plain", "aim.amd.com/gpu-partition"), namespace)
    cluster.apply(plan("auto", auto={"policy": "Propose", "minPendingSeconds": 0}))
    wait_until(lambda: "3 pods wait; CPX/NPS1 on node1" in message_of(cluster, "auto"), "a proposal", lambda: None)
    assert len(cluster.get_all("partitionplans")) == 1

    cluster.apply(plan("auto", auto={"policy": "Apply", "minPendingSeconds": 0}))
    for name in ("deployment-partition", "pod-own", "pod-plain"):
        wait_until(partial(is_prepared, cluster, name, namespace), "it has its partition", lambda: None)
    assert agent.simulated_state()["devices"]["sim-mi300x-0"]["layout"] == "CPX/NPS1"
    with pytest.raises(RuntimeError, match="give either layout, or auto"):
        cluster.apply(plan("both", auto={"policy": "Propose"}, layout={"computeMode": "CPX"}))

    cluster.kubectl("delete", "partitionplan", "auto")
    left = ("deployment/partition", "pod/own", "pod/plain", "resourceclaimtemplate/own")
    cluster.kubectl("delete", *left, f"--namespace={namespace}")
    templates = "resourceclaimtemplates"
    wait_until(lambda: cluster.get_all(templates, namespace) == [], "unused claim templates go", lambda: None)
    cluster.apply(plan("back", layout={"computeMode": "SPX"}))
    wait_until(lambda: phase_of(cluster, "back") == "Succeeded", "as before", lambda: None)
    cluster.kubectl("delete", "partitionplans", "--all")


def test_a_plan_for_the_device_config_manager_leaves_the_layout_to_it(
    cluster: Cluster, agent: NodeAgent, operators: list[Process]
) -> None:
    cluster.apply(plan("dcm", layout={"computeMode": "CPX", "memoryMode": "NPS1"}, applier="DeviceConfigManager"))
    wait_until(lambda: phase_of(cluster, "dcm") == "WaitingForDriver", "the manager has its order", lambda: None)
    node = cluster.get("node", "node1")
    assert node["metadata"]["labels"]["dcm.amd.com/gpu-config-profile"] == "cpx_nps1_all"
    assert any(taint["key"] == "amd-dcm" for taint in node["spec"]["taints"])
    assert not cluster.get("gpunode", "node1")["spec"].get("layouts")  # our agent wants nothing

    devices = agent.simulated_state()["devices"]  # in the manager's place
    devices["sim-mi300x-0"]["layout"] = "CPX/NPS1"
    agent.set_simulated_state(devices=devices)
    wait_until(lambda: phase_of(cluster, "dcm") == "Succeeded", "read back", lambda: None)
    wait_until(lambda: node_is_free(cluster), "the node is open again", lambda: None)

    cluster.apply(plan("dropped", layout={"computeMode": "SPX", "memoryMode": "NPS1"}, applier="DeviceConfigManager"))
    wait_until(lambda: phase_of(cluster, "dropped") == "WaitingForDriver", "another order", lambda: None)
    cluster.kubectl("delete", "partitionplan", "dropped")
    wait_until(lambda: node_is_free(cluster), "neither cordon nor taint is left", lambda: None)

    cluster.apply(plan("agent", layout={"computeMode": "SPX"}))
    wait_until(lambda: phase_of(cluster, "agent") == "Failed", "never both", lambda: None)
    assert "Device Config Manager" in message_of(cluster, "agent")
    cluster.kubectl("label", "node", "node1", "dcm.amd.com/gpu-config-profile-")
    cluster.kubectl("delete", "partitionplans", "--all")
    cluster.apply(plan("back", layout={"computeMode": "SPX"}))
    wait_until(lambda: phase_of(cluster, "back") == "Succeeded", "as before", lambda: None)
    cluster.kubectl("delete", "partitionplans", "--all")


def phase_of(cluster: Cluster, name: str) -> str:
    return str(cluster.get("partitionplan", name).get("status", {}).get("phase"))


def message_of(cluster: Cluster, name: str) -> str:
    return str(cluster.get("partitionplan", name).get("status", {}).get("message"))


def test_kills_of_operator_admission_and_api_server_leave_ledger_and_truth_equal(
    cluster: Cluster, namespace: str, agent: NodeAgent, operators: list[Process]
) -> None:
    """`AIMGPU_CHAOS_STEPS=200` for the long variant."""
    steps, seed = int(os.environ.get("AIMGPU_CHAOS_STEPS", "12")), int(os.environ.get("AIMGPU_CHAOS_SEED", "4"))
    dice = random.Random(seed)
    admission = [cluster.process("admission-9443")]

    def restart_operator() -> None:
        number = dice.randrange(2)
        operators[number].kill()
        operators[number] = start_operator(cluster, number)

    def restart_admission() -> None:
        admission[0].kill()
        admission[0] = start_admission(cluster, cluster.folder / "admission.kubeconfig", 9443)

    def restart_api() -> None:
        cluster.process("kube-apiserver").kill()
        cluster.restart("kube-apiserver")

    kills = {"operator": restart_operator, "admission": restart_admission, "api": restart_api}
    chaos = Chaos(cluster, namespace, kills, seed)
    chaos.run(steps)
    chaos.settle(agent.grants)
    summary = f"{steps} steps, seed {seed}: {chaos.made} pods made, {len(chaos.alive)} left, killed {chaos.killed}"
    (cluster.folder / "logs" / "chaos.log").write_text(summary)
    cluster.delete("pod", "--all", namespace=namespace)
    chaos.alive.clear()
    chaos.settle(agent.grants)
    admission[0].stop()
