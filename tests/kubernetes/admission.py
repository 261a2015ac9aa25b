"""The admission server on the test cluster, as processes with the rights of its service account."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.cluster import network
from tests.cluster.cluster import Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until

from aimgpu.kubernetes.admission.access_rules import cluster_role_rules, role_rules
from aimgpu.kubernetes.admission.webhook_configurations import NAME, mutating_configuration, validating_configuration

NAMESPACE, SERVICE = "aim-gpu-sharing", "aim-gpu-sharing-admission"
FIRST_PORT = 9443


def kubeconfig_of(cluster: Cluster, account: str) -> Path:
    token = cluster.kubectl("create", "token", account, f"--namespace={NAMESPACE}", "--duration=24h").strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = cluster.folder / f"{account}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def start(cluster: Cluster, kubeconfig: Path, port: int) -> Process:
    command = [sys.executable, "-m", "aimgpu.kubernetes.admission", "--port", str(port), "--namespace", NAMESPACE]
    process = cluster.start(f"admission-{port}", command, env={"KUBECONFIG": str(kubeconfig)})

    def check() -> None:
        if not process.running:
            raise RuntimeError(f"the admission server ended:\n{process.tail()}")

    wait_until(lambda: "admission.listening" in process.log.read_text(errors="replace"), "the admission server", check)
    return process


@contextmanager
def running_admission(cluster: Cluster, *, replicas: int = 1) -> Iterator[list[Process]]:
    """With its webhook configurations installed; afterwards nothing of it is left."""
    rbac, account = "rbac.authorization.k8s.io", {"kind": "ServiceAccount", "name": "admission", "namespace": NAMESPACE}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "admission"}}, NAMESPACE)
    for kind, rules in (("ClusterRole", cluster_role_rules()), ("Role", role_rules(SERVICE))):
        scope = "default" if kind == "ClusterRole" else NAMESPACE
        cluster.apply({"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": {"name": "admission"}, "rules": rules}, scope)
        binding = {
            "apiVersion": f"{rbac}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": "admission"},
            "roleRef": {"apiGroup": rbac, "kind": kind, "name": "admission"},
            "subjects": [account],
        }
        cluster.apply(binding, scope)
    ports = [FIRST_PORT + number for number in range(replicas)]
    cluster.apply(_service(ports), NAMESPACE)
    cluster.apply([mutating_configuration(NAMESPACE, SERVICE), validating_configuration(NAMESPACE, SERVICE)])
    kubeconfig = kubeconfig_of(cluster, "admission")
    processes = [start(cluster, kubeconfig, port) for port in ports]
    try:
        yield processes
    finally:
        for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            cluster.kubectl("delete", kind, NAME, "--ignore-not-found")
        for process in processes:
            process.stop()
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _service(ports: list[int]) -> list[dict[str, Any]]:
    """A Service without a selector: its endpoints are the processes on the node's address."""
    slices = [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{SERVICE}-{port}", "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [network.ADDRESS], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        }
        for port in ports
    ]
    port = {"name": "https", "port": 443, "protocol": "TCP", "targetPort": FIRST_PORT}
    return [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE}, "spec": {"ports": [port]}}, *slices]
