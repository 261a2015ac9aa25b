"""Time-slicing set up, verified, diagnosed and undone on a real API server, with our device plugin and a real kubelet."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.node_agent import NAMESPACE, NodeAgent, running_agent

from aimgpu.cli.main import run_command
from aimgpu.kubernetes.node.agent.access_rules import role_rules

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kubernetes" / "ollama-time-sliced.yaml"
NODE = "node1"
OPERATOR = "gpu-operator"
OURS = ("--plugin", "aim", "--namespace", NAMESPACE, "--node", NODE)
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[NodeAgent]:
    """Our device plugin on a simulated H200, with the rights of the chart; nothing is shared before it is set up."""
    rbac = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {"name": "node-agent"}, "rules": role_rules()}
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "node-agent"},
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "node-agent"},
        "subjects": [{"kind": "ServiceAccount", "name": "node-agent", "namespace": NAMESPACE}],
    }
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.apply([role, binding], NAMESPACE)
    options = ("--simulated", "H200-141:1", "--no-dra", "--device-plugin-config", "time-slicing-config")
    with running_agent(cluster, *options, "--namespace", NAMESPACE, waits_for="plugin.not_configured") as running:
        yield running
    cluster.kubectl("delete", "configmap", "time-slicing-config", f"--namespace={NAMESPACE}", "--ignore-not-found")
    cluster.kubectl("label", "node", NODE, "aim.amd.com/device-plugin.config-", "nvidia.com/device-plugin.config-")


@pytest.fixture
def timeslicing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("KUBECONFIG", str(cluster.outside_kubeconfig))

    def run(*words: str, status: int = 0) -> Any:
        capsys.readouterr()
        limits = ("--timeout", "300") if words[0] == "verify" else ()
        found = run_command(["timeslicing", *words, *limits, "--json"])
        printed = capsys.readouterr()
        assert found == status, printed.err + printed.out
        return json.loads(printed.out or printed.err)

    return run


def problems(found: list[dict[str, str]]) -> dict[str, str]:
    return {each["check"]: each["text"] for each in found if each["health"] == "problem"}


def test_nodes_and_plugins_that_are_not_there_are_named(cluster: Cluster, timeslicing: Run) -> None:
    missing = timeslicing("apply", "--replicas", "4", status=2)["error"]
    assert "nvidia-device-plugin-daemonset" in missing["message"]
    unknown = timeslicing("apply", "--replicas", "4", "--namespace", OPERATOR, "--node", "nowhere", status=2)["error"]
    assert "nowhere" in unknown["message"]


def test_apply_verify_doctor_and_undo_with_our_plugin(
    cluster: Cluster, namespace: str, agent: NodeAgent, timeslicing: Run
) -> None:
    before = problems(timeslicing("doctor", *OURS, status=1))
    assert set(before) == {"configmap", "node label"}

    wanted = ("apply", *OURS, "--resource", "nvidia.com/gpu", "--replicas", "4")
    assert timeslicing(*wanted, "--dry-run")["changed"] is False
    assert "time-slicing-config" not in cluster.kubectl("get", "configmaps", f"--namespace={NAMESPACE}")
    applied = timeslicing(*wanted)
    assert applied["changed"]
    assert "+aim.amd.com/device-plugin.config: share4" in applied["diff"]
    assert not applied["restarted"]  # the agent follows
    assert timeslicing(*wanted) == {**applied, "changed": False, "diff": []}

    seen = timeslicing("verify", *OURS, "--image", BUSYBOX_IMAGE, "--pod-namespace", namespace)
    assert seen[0]["replicas"]["allocatable"] == 4
    assert seen[0]["pod_ran"]
    assert problems(timeslicing("doctor", *OURS)) == {}
    assert cluster.get_all("pods", namespace) == []  # the test pod is gone
    wait_until(lambda: not agent.grants(), "the kubelet has ended its container", agent.check)

    # The text of the key changes: our plugin follows without a restart, and a pod too many is explained.
    timeslicing(*wanted[:-1], "2", "--key", "share4")
    assert timeslicing("verify", *OURS, "--no-pod")[0]["replicas"]["allocatable"] == 2
    for name in ("one", "two", "three"):
        cluster.apply(gpu_pod(name), namespace)
    wait_until(lambda: waiting(cluster, namespace) == 1, "one pod that finds no replica", agent.check)
    pending = problems(timeslicing("doctor", *OURS, status=1))
    assert "Insufficient nvidia.com/gpu" in pending["pending pods"]
    cluster.delete("pod", "--all", namespace=namespace)

    cluster.kubectl("label", "node", NODE, "--overwrite", "aim.amd.com/device-plugin.config=share9")
    assert "is not a key of the ConfigMap" in problems(timeslicing("doctor", *OURS, status=1))["node label"]
    cluster.kubectl("label", "node", NODE, "--overwrite", "aim.amd.com/device-plugin.config=share4")

    undone = timeslicing("apply", *OURS, "--undo")  # of the change to two
    assert "+        replicas: 4" in undone["diff"]
    assert timeslicing("verify", *OURS, "--no-pod")[0]["replicas"]["allocatable"] == 4
    assert "nothing to undo" in timeslicing("apply", *OURS, "--undo", status=2)["error"]["message"]

    cluster.kubectl("delete", "configmap", "time-slicing-config", f"--namespace={NAMESPACE}")
    cluster.kubectl("label", "node", NODE, "aim.amd.com/device-plugin.config-")
    wait_until(lambda: advertised(cluster) == 0, "nothing is advertised, as before", agent.check)


def test_the_ollama_example_runs_on_time_sliced_gpus(
    cluster: Cluster, namespace: str, agent: NodeAgent, timeslicing: Run
) -> None:
    """The manifest as it is; a stand-in answers to the image's name."""
    models = ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct")
    sized = timeslicing("recommend", *models, "--gpu", "H100-80")
    deployment, service = yaml.safe_load_all(EXAMPLE.read_text())
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["OLLAMA_MAX_LOADED_MODELS"] == str(sized["max_loaded_models"])
    assert sized["replicas"] == 4

    timeslicing("apply", *OURS, "--resource", "nvidia.com/gpu", "--replicas", "4")
    timeslicing("verify", *OURS, "--no-pod")
    cluster.add_image(container["image"], programs={"ollama": "tests.programs.fake_ollama"}, command=("/opt/ollama", "serve"))
    cluster.apply([deployment, service], namespace)
    cluster.wait("deployment/ollama", "condition=Available", namespace)
    pods = cluster.get_all("pods", namespace, "app=ollama")
    assert len(pods) == 3
    printed = cluster.exec(pods[0]["metadata"]["name"], "env", namespace=namespace)
    assert "OLLAMA_MAX_LOADED_MODELS=2" in printed
    quarter = int(next(line for line in printed.splitlines() if line.startswith("AIMGPU_MEMORY_BYTES=")).partition("=")[2])
    assert quarter >= sized["replica_memory_bytes"]  # an H200 has more than the H100 it was sized for
    cluster.kubectl("delete", "deployment/ollama", f"--namespace={namespace}", "--wait=false")
    cluster.delete("pod", "--all", namespace=namespace)


POLICY_CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "clusterpolicies.nvidia.com"},
    "spec": {
        "group": "nvidia.com",
        "scope": "Cluster",
        "names": {"kind": "ClusterPolicy", "plural": "clusterpolicies", "singular": "clusterpolicy"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


@pytest.fixture
def operator(cluster: Cluster) -> Iterator[None]:
    """What NVIDIA's operator leaves in a cluster, as far as this is concerned; its plugin only logs a complaint."""
    cluster.apply([POLICY_CRD, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR}}])
    cluster.wait_until_served("clusterpolicies.nvidia.com")
    policy = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "cluster-policy"}}
    cluster.apply(policy | {"spec": {"devicePlugin": {"enabled": True}}})
    labels = {"app": "nvidia-device-plugin-daemonset"}
    container = {
        "name": "nvidia-device-plugin",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", "echo 'E1115 Failed to initialize NVML'; sleep 100000"],
    }
    daemon_set = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "nvidia-device-plugin-daemonset"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
            },
        },
    }
    cluster.apply(daemon_set, OPERATOR)
    cluster.kubectl("rollout", "status", "daemonset/nvidia-device-plugin-daemonset", f"--namespace={OPERATOR}")
    wait_for(
        lambda: cluster.kubectl("logs", "daemonset/nvidia-device-plugin-daemonset", f"--namespace={OPERATOR}", check=False),
        bool,
        "the plugin's complaint",
    )
    yield
    cluster.kubectl("delete", "crd", "clusterpolicies.nvidia.com")
    cluster.kubectl("delete", "daemonset", "nvidia-device-plugin-daemonset", f"--namespace={OPERATOR}")
    cluster.kubectl("delete", "namespace", OPERATOR, "--wait=false")


@pytest.mark.usefixtures("operator")
def test_nvidias_operator_is_set_up_restarted_only_for_changed_text_and_put_back(cluster: Cluster, timeslicing: Run) -> None:
    def restarts() -> str:
        template = cluster.get("daemonset", "nvidia-device-plugin-daemonset", OPERATOR)["spec"]["template"]["metadata"]
        return str((template.get("annotations") or {}).get("kubectl.kubernetes.io/restartedAt", ""))

    def policy() -> Any:
        return cluster.get("clusterpolicy", "cluster-policy")["spec"]["devicePlugin"]

    first = timeslicing("apply", "--node", NODE, "--replicas", "4")
    assert not first["restarted"]  # the operator restarts its plugin for the ClusterPolicy
    assert policy() == {"enabled": True, "config": {"name": "time-slicing-config"}}
    assert cluster.get("node", NODE)["metadata"]["labels"]["nvidia.com/device-plugin.config"] == "share4"
    assert not timeslicing("apply", "--node", NODE, "--replicas", "8")["restarted"]  # another key
    assert restarts() == ""

    found = timeslicing("doctor", "--node", NODE, status=1)
    assert "Failed to initialize NVML" in next(each["text"] for each in found if each["check"] == "plugin logs")
    assert "allocatable" in problems(found)  # nothing advertises nvidia.com/gpu as eight

    assert timeslicing("apply", "--node", NODE, "--replicas", "6", "--key", "share8")["restarted"]
    assert restarts() != ""
    timeslicing("apply", "--undo")
    data = cluster.get("configmap", "time-slicing-config", OPERATOR)["data"]
    assert yaml.safe_load(data["share8"])["sharing"]["timeSlicing"]["resources"][0]["replicas"] == 8

    cluster.kubectl("delete", "configmap", "time-slicing-config", f"--namespace={OPERATOR}")
    cluster.kubectl("label", "node", NODE, "nvidia.com/device-plugin.config-")
    timeslicing("apply", "--node", NODE, "--replicas", "4")
    timeslicing("apply", "--undo")
    assert "time-slicing-config" not in cluster.kubectl("get", "configmaps", f"--namespace={OPERATOR}")
    assert "nvidia.com/device-plugin.config" not in cluster.get("node", NODE)["metadata"]["labels"]


def gpu_pod(name: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sleep", "100000"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def advertised(cluster: Cluster) -> int:
    return int(cluster.get("node", NODE)["status"]["allocatable"].get("nvidia.com/gpu", 0))


def waiting(cluster: Cluster, namespace: str) -> int:
    """Pods that the scheduler has looked at and not placed, while the others run."""
    pods = cluster.get_all("pods", namespace)
    running = sum(pod["status"]["phase"] == "Running" for pod in pods)
    conditions = [each for pod in pods for each in pod["status"].get("conditions") or ()]
    refused = sum(each["type"] == "PodScheduled" and each["status"] == "False" for each in conditions)
    return refused if running == len(pods) - refused else 0
