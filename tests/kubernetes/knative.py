"""Knative Serving's own controller, webhook and queue-proxy on the test cluster: enough of it to make a revision's pods.

Neither the autoscaler nor an ingress runs: a revision has the one pod that it begins with, and no route becomes ready.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.cluster import network
from tests.cluster.cluster import Cluster
from tests.cluster.foreign import KNATIVE_CACHING_MODULE, KNATIVE_MODULE, KNATIVE_NETWORKING_MODULE, KSERVE
from tests.cluster.go_programs import build, module_folder
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until

NAMESPACE = "knative-serving"
QUEUE_IMAGE = "localhost/knative-queue:test"
_PORT = 9643
_OBJECTS = "services.serving.knative.dev,routes.serving.knative.dev,configurations.serving.knative.dev,revisions"
_PORTS = {"webhook": {"PROFILING_PORT": "9644"}, "controller": {"PROFILING_PORT": "9645", "KNATIVE_HEALTH_PROBES_PORT": "9646"}}


@contextmanager
def running_knative(cluster: Cluster) -> Iterator[list[Process]]:
    """Beside KServe, whose objects they act on; afterwards nothing of it is left, or it is about to go."""
    programs, source = build(KSERVE), module_folder(*KNATIVE_MODULE)
    crds = _install_definitions(cluster, source)
    cluster.add_program_image(QUEUE_IMAGE, programs / "queue")
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.apply([*_settings(source), *_webhook_service()], NAMESPACE)
    webhooks = _read_all(source / "config/core/webhooks")
    cluster.apply(webhooks, NAMESPACE)
    processes = [_start(cluster, programs, name) for name in _PORTS]

    def check() -> None:
        for process in processes:
            if not process.running:
                raise RuntimeError(f"a program of Knative ended:\n{process.tail()}")

    wait_until(lambda: _accepts(cluster), "Knative's webhook", check)
    try:
        yield processes
    finally:
        # While its controller runs: it has finalizers on these.
        cluster.kubectl("delete", "services.serving.knative.dev", "--all", "--all-namespaces", "--timeout=600s")
        wait_until(lambda: not cluster.kubectl("get", _OBJECTS, "--all-namespaces", "--output=name"), "its objects are gone")
        for item in webhooks:
            cluster.kubectl("delete", item["kind"], item["metadata"]["name"], f"--namespace={NAMESPACE}", "--ignore-not-found")
        for process in processes:
            process.kill()
        cluster.kubectl("delete", "crd", *crds, "--wait=false")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _install_definitions(cluster: Cluster, source: Path) -> list[str]:
    """All but that of Services, which KServe's installation brings."""
    networking, caching = module_folder(*KNATIVE_NETWORKING_MODULE), module_folder(*KNATIVE_CACHING_MODULE)
    found = _read_all(source / "config/core/300-resources") + _read_all(networking / "config") + _read_all(caching / "config")
    definitions = [item for item in found if item["kind"] == "CustomResourceDefinition"]
    names = [item["metadata"]["name"] for item in definitions]
    names.remove("services.serving.knative.dev")
    wait_until(
        lambda: (
            not cluster.kubectl("get", "crd", *names, "--ignore-not-found", "--output=name")
            and not cluster.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found", "--output=name")
        ),
        "those of an earlier Knative are gone",
    )
    cluster.apply([item for item in definitions if item["metadata"]["name"] in names])
    cluster.wait_until_served(*names)
    return names


def _settings(source: Path) -> list[dict[str, Any]]:
    """As they ship, but for images: nothing can be asked of a registry here."""
    networking = module_folder(*KNATIVE_NETWORKING_MODULE)
    found = _read_all(source / "config/core/configmaps")
    found += [item for item in _read_all(networking / "config") if item["kind"] == "ConfigMap"]
    for item in found:
        item["metadata"].pop("annotations", None)  # the checksum of the examples
        item["data"] = {}
        if item["metadata"]["name"] == "config-deployment":
            registries = "localhost,docker.io,index.docker.io"
            item["data"] = {"queue-sidecar-image": QUEUE_IMAGE, "registries-skipping-tag-resolving": registries}
    return found


def _webhook_service() -> list[dict[str, Any]]:
    """Without a selector: its endpoint is the process on the node's address."""
    port = {"name": "https-webhook", "port": 443, "protocol": "TCP", "targetPort": _PORT}
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "webhook-process", "labels": {"kubernetes.io/service-name": "webhook"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [network.ADDRESS], "conditions": {"ready": True}}],
        "ports": [{"name": "https-webhook", "port": _PORT, "protocol": "TCP"}],
    }
    return [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "webhook"}, "spec": {"ports": [port]}}, endpoints]


def _start(cluster: Cluster, programs: Path, name: str) -> Process:
    environment = {
        "KUBECONFIG": str(cluster.kubeconfig),
        "SYSTEM_NAMESPACE": NAMESPACE,
        "POD_NAME": f"{name}-0",
        "CONFIG_LOGGING_NAME": "config-logging",
        "CONFIG_OBSERVABILITY_NAME": "config-observability",
        "WEBHOOK_NAME": "webhook",
        "WEBHOOK_PORT": str(_PORT),
        **_PORTS[name],
    }
    return cluster.start(f"knative-{name}", [str(programs / name)], env=environment)


def _accepts(cluster: Cluster) -> bool:
    """Its certificate is in the configurations, and it answers: the API server calls it for each Service."""
    spec = {"template": {"spec": {"containers": [{"image": QUEUE_IMAGE}]}}}
    probe = {"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": {"name": "probe"}, "spec": spec}
    try:
        cluster.kubectl("create", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump(probe))
    except RuntimeError as error:
        if "failed calling webhook" not in str(error):
            raise
        return False
    return True


def _read_all(folder: Path) -> list[dict[str, Any]]:
    return [item for path in sorted(folder.glob("*.yaml")) for item in yaml.safe_load_all(path.read_text()) if item]
