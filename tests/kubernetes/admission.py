"""The admission server on the test cluster, as processes with the rights of its service account."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import network
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until
from tests.kubernetes.accounts import NAMESPACE, make_account

from aimgpu.kubernetes.cluster.admission.access_rules import cluster_role_rules, role_rules
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration, validating_configuration
from aimgpu.kubernetes.vocabulary.names import WEBHOOKS as NAME

SERVICE = "aim-gpu-sharing-admission"
FIRST_PORT = 9443
_OF_SERVICE = "kubernetes.io/service-name"


def start(cluster: Cluster, kubeconfig: Path, port: int, *options: str) -> Process:
    command = [sys.executable, "-m", "aimgpu.kubernetes.cluster.admission", "--port", str(port), "--namespace", NAMESPACE]
    process = cluster.start(f"admission-{port}", [*command, *options], env={"KUBECONFIG": str(kubeconfig)})

    def check() -> None:
        if not process.running:
            raise RuntimeError(f"the admission server ended:\n{process.tail()}")

    wait_until(lambda: "admission.listening" in process.written(), "the admission server", check)
    return process


@contextmanager
def running_admission(cluster: Cluster, *, replicas: int = 1, placed: str = "none") -> Iterator[list[Process]]:
    """With its webhook configurations installed; afterwards nothing of it is left."""
    kubeconfig = make_account(cluster, "admission", cluster_role_rules(), role_rules(SERVICE))
    ports = [FIRST_PORT + number for number in range(replicas)]
    cluster.apply(_service(ports), NAMESPACE)
    cluster.apply([mutating_configuration(NAMESPACE, SERVICE, placed=placed), validating_configuration(NAMESPACE, SERVICE)])
    processes = [start(cluster, kubeconfig, port) for port in ports]
    try:
        wait_until(lambda: _answers(cluster), "the API server calls the webhooks")
        yield processes
    finally:
        for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            cluster.kubectl("delete", kind, NAME, "--ignore-not-found")
        for process in processes:
            process.stop()
        cluster.kubectl("delete", "service", SERVICE, f"--namespace={NAMESPACE}")
        # Nothing owns these: the next one with fewer replicas would be called at a port where no one listens.
        cluster.kubectl("delete", "endpointslice", f"--selector={_OF_SERVICE}={SERVICE}", f"--namespace={NAMESPACE}")
        cluster.kubectl("delete", "secret", SERVICE, f"--namespace={NAMESPACE}", "--ignore-not-found")  # its owner has gone


def _answers(cluster: Cluster) -> bool:
    """The API server knows the configurations, their authority and an endpoint: a pod gets a share, or a refusal of ours."""
    main = {"name": "main", "image": BUSYBOX_IMAGE}
    metadata = {"name": "asks", "annotations": {"gpu-memory": "1024"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [main]}}
    words = ("create", "--dry-run=server", "--filename=-", "--output=json")
    try:
        made = json.loads(cluster.kubectl(*words, stdin=json.dumps(pod)))
    except RuntimeError as error:
        return "failed calling webhook" not in str(error)
    # A claim, or a replica of a device plugin.
    return "resourceClaims" in made["spec"] or bool(made["spec"]["containers"][0].get("resources"))


def _service(ports: list[int]) -> list[dict[str, Any]]:
    """A Service without a selector: its endpoints are the processes on the node's address."""
    slices = [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{SERVICE}-{port}", "labels": {_OF_SERVICE: SERVICE}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [network.ADDRESS], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        }
        for port in ports
    ]
    port = {"name": "https", "port": 443, "protocol": "TCP", "targetPort": FIRST_PORT}
    return [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE}, "spec": {"ports": [port]}}, *slices]
