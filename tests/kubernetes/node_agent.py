"""The node agent on the test cluster, as a process with the rights of its service account, and pods with claims."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.node import Node
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until

from aimgpu.kubernetes.node.agent.access_rules import cluster_role_rules
from aimgpu.kubernetes.node.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.vocabulary import names

NAMESPACE, ACCOUNT = "aimgpu", "node-agent"


@dataclass(slots=True)
class NodeAgent:
    cluster: Cluster
    node: Node
    options: Sequence[str]
    kubeconfig: Path
    state: Path
    process: Process | None = None
    waits_for: str = "kubelet.registered"  # in its log, before it is of use

    def start(self, *, wait: bool = True) -> None:
        command = [sys.executable, "-m", "aimgpu.kubernetes.node.agent", "--node-name", self.node.name]
        command += [
            "--state",
            str(self.state),
            *([] if "--metrics-port" in self.options else ["--metrics-port", "0"]),
            "--interval",
            "1",
            *self.options,
        ]
        process = self.process = self.node.start("agent", command, env={"KUBECONFIG": str(self.kubeconfig)})
        if wait:
            wait_until(lambda: self.waits_for in process.written(), "registration with the kubelet", self.check)

    def log(self) -> str:
        """Of this agent: the file has those of agents before it on the same cluster too."""
        return self.process.written() if self.process else ""

    def check(self) -> None:
        assert self.process is not None
        if not self.process.running:
            raise RuntimeError(f"the agent ended:\n{self.process.tail()}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def stop(self) -> None:
        assert self.process is not None
        self.process.stop()

    def restart(self) -> None:
        self.kill()
        self.start()

    def slices(self) -> list[dict[str, Any]]:
        found = self.cluster.get_all("resourceslices")
        return [item for item in found if item["spec"]["driver"] == names.DRIVER]

    def devices(self) -> dict[str, dict[str, Any]]:
        return {device["name"]: device for item in self.slices() for device in item["spec"].get("devices") or ()}

    def simulated_state(self) -> dict[str, Any]:
        path = self.state / "simulated-gpus.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def set_simulated_state(self, **changes: object) -> None:
        path = self.state / "simulated-gpus.json"
        fresh = path.with_suffix(".fresh")
        fresh.write_text(json.dumps({**self.simulated_state(), **changes}))
        fresh.rename(path)

    def grants(self) -> list[dict[str, Any]]:
        """Live grants of the node's ledger, read beside the agent."""
        script = (
            "import json, sys; from pathlib import Path; from aimgpu.ledger import read_grants; "
            "from aimgpu.domain.codec import encode; print(json.dumps([encode(g) for g in read_grants(Path(sys.argv[1]))]))"
        )
        found: list[dict[str, Any]] = json.loads(self.node.run(sys.executable, "-c", script, str(self.state / "ledger.db")))
        return found

    def cdi_files(self) -> list[str]:
        folder = self.node.path("/run/cdi")
        return sorted(path.name for path in folder.glob("*") if names.DRIVER in path.name) if folder.exists() else []


def account_kubeconfig(cluster: Cluster, node: str) -> Path:
    """A token bound to the node, as a pod of the DaemonSet has: the API lets it write statuses of claims on that node only."""
    bound = ["--bound-object-kind=Node", f"--bound-object-name={node}"]
    token = cluster.kubectl("create", "token", ACCOUNT, f"--namespace={NAMESPACE}", "--duration=24h", *bound).strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = cluster.folder / f"node-agent-{node}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def running_agent(cluster: Cluster, *options: str, node: int = 0, waits_for: str = "kubelet.registered") -> Iterator[NodeAgent]:
    """With the DeviceClasses installed; afterwards nothing of it is left."""
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "node-agent"}}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "node-agent"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "node-agent"},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": NAMESPACE}}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    cluster.apply([namespace, role | {"rules": cluster_role_rules()}, binding, *device_classes()])
    cluster.apply(account, NAMESPACE)
    chosen = cluster.nodes[node]
    state = cluster.folder / f"agent-state-{chosen.name}"
    agent = NodeAgent(cluster, chosen, options, account_kubeconfig(cluster, chosen.name), state)
    agent.waits_for = waits_for
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()
        wait_until(
            lambda: not advertised(cluster, chosen.name), "the kubelet withdraws what a device plugin offered", lambda: None
        )
        if os.environ.get("AIMGPU_CLUSTER_LOGS") and agent.process:
            shutil.copy(agent.process.log, os.environ["AIMGPU_CLUSTER_LOGS"])
        for item in agent.slices():
            cluster.kubectl("delete", "resourceslice", item["metadata"]["name"])
        cluster.kubectl("delete", "gpunode", chosen.name, check=False)  # where a test has installed the definitions
        for installed in (*device_classes(), role, binding):
            cluster.kubectl("delete", installed["kind"].lower(), installed["metadata"]["name"], "--ignore-not-found")
        shutil.rmtree(state, ignore_errors=True)


def advertised(cluster: Cluster, node: str) -> list[str]:
    """Extended resources that the node still has: the kubelet reports seldom, and the next agent would refuse the node."""
    allocatable = cluster.get("node", node)["status"].get("allocatable") or {}
    return [name for name, count in allocatable.items() if name.startswith(("amd.com/", "nvidia.com/")) and count != "0"]


def share(memory: str | None = None, compute: str | None = None, **request: Any) -> dict[str, Any]:
    """A request for a share."""
    capacity = {name: value for name, value in (("memory", memory), ("compute", compute)) if value is not None}
    exactly = {"deviceClassName": names.SHARED_CLASS, **request}
    if capacity:
        exactly["capacity"] = {"requests": capacity}
    return {"name": "gpu", "exactly": exactly}


def whole() -> dict[str, Any]:
    return {"name": "gpu", "exactly": {"deviceClassName": names.WHOLE_CLASS}}


def partition(profile: str) -> dict[str, Any]:
    expression = f"device.attributes['{names.DRIVER}'].partitionProfile == '{profile}'"
    return {
        "name": "gpu",
        "exactly": {"deviceClassName": names.PARTITION_CLASS, "selectors": [{"cel": {"expression": expression}}]},
    }


def claim_template(name: str, *requests: dict[str, Any], config: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    devices: dict[str, Any] = {"requests": list(requests)}
    if config:
        devices["config"] = config
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": devices}},
    }


def parameters(**values: str) -> list[dict[str, Any]]:
    body = {"apiVersion": names.PARAMETERS_VERSION, "kind": names.PARAMETERS_KIND, **values}
    return [{"opaque": {"driver": names.DRIVER, "parameters": body}}]


def gpu_pod(
    name: str, template: str, *, containers: list[dict[str, Any]] | None = None, command: list[str] | None = None
) -> dict[str, Any]:
    """A pod with a claim of that template, named gpu in the pod."""
    default = [
        {
            "name": "main",
            "image": BUSYBOX_IMAGE,
            "imagePullPolicy": "Never",
            "command": command or ["/bin/sleep", "100000"],
            "resources": {"claims": [{"name": "gpu"}]},
        }
    ]
    spec = {
        "terminationGracePeriodSeconds": 0,
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
        "containers": containers or default,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
