"""KAI-Scheduler's real programs on the test cluster, with a queue for tests."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import network
from tests.cluster.cluster import Cluster
from tests.cluster.foreign import KAI, KAI_MODULE
from tests.cluster.go_programs import build, module_folder
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until
from tests.kubernetes.admission import running_admission
from tests.kubernetes.node_agent import ACCOUNT, NAMESPACE, NodeAgent, running_agent

from aimgpu.kubernetes.node.agent.access_rules import kai_rules

PRODUCT = "H200-141"
QUEUE = "default-queue"
SCHEDULER = "kai-scheduler"
RESERVATIONS = "kai-resource-reservation"
RESERVATION_IMAGE = "localhost/kai-reservation:test"
RUNTIME_CLASS = "nvidia"
_NAMESPACES = ("kai-scheduler", RESERVATIONS, "kai-scale-adjust")
_PRIORITIES = {"train": 50, "build-preemptible": 75, "build": 100, "inference": 125}
_PORT = 9644
_GPUS = 4
_RESERVATION_SECONDS = 120  # then KAI gives up a reservation pod and tries again: well before a test gives up
_CONDITION = {"name": "kai", "expression": f"object.spec.schedulerName == '{SCHEDULER}'"}
_SHOWN_LOGS = {"kai-scheduler", "kai-binder"}
_NO_METRICS = "--metrics-bind-address=0"


@contextmanager
def running_kai(cluster: Cluster) -> Iterator[list[Process]]:
    """With its CRDs, queues, webhooks and a stand-in for the program that asks NVML; afterwards nothing of it is left."""
    programs = build(KAI)
    definitions = sorted((module_folder(*KAI_MODULE) / "deployments/kai-scheduler/crds").glob("*.yaml"))
    wait_until(lambda: not _left(cluster), "an earlier KAI is gone")
    cluster.apply("\n---\n".join(path.read_text() for path in definitions))
    crds = _definitions(cluster)
    cluster.wait_until_served(*(name.partition("/")[2] for name in crds))
    cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in _NAMESPACES])
    cluster.apply(_reservation_account(), RESERVATIONS)
    cluster.add_image(RESERVATION_IMAGE, programs={"reserve": "tests.programs.kai_reservation"}, command=("/opt/reserve",))
    objects = [
        *_queues(),
        *_priorities(),
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": RUNTIME_CLASS}, "handler": "runc"},
    ]
    hooks = _webhooks(cluster)
    cluster.apply(objects)
    processes = [_start(cluster, programs, name, flags) for name, flags in _programs().items()]
    cluster.shown_logs |= _SHOWN_LOGS
    wait_until(
        lambda: "Serving webhook server" in processes[0].written(),
        "KAI's admission",
        lambda: _check(processes),
    )
    cluster.apply(hooks)
    try:
        yield processes
    finally:
        cluster.shown_logs -= _SHOWN_LOGS
        for item in (*hooks, *objects):
            cluster.kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found", "--wait=false")
        for process in processes:
            process.kill()
        cluster.delete("pod", "--all", namespace=RESERVATIONS)
        cluster.kubectl("delete", *crds, "--wait=false")
        cluster.kubectl("delete", "namespace", *_NAMESPACES, "--wait=false")


@contextmanager
def running_kai_agent(cluster: Cluster, folder: Path) -> Iterator[NodeAgent]:
    """KAI and a node agent that enforces what it grants; our device plugin, in the place of NVIDIA's, offers the GPUs.

    Twice as many as a test shares: the kubelet gives a reservation pod no GPU whose last one is still ending, and KAI waits
    for a reservation pod that was refused as if it were slow.
    """
    config = folder / "config.yaml"
    config.write_text("version: v1\n")  # whole GPUs, for KAI's reservation pods
    rbac = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": "node-agent-kai"}}
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "node-agent-kai"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "node-agent-kai"},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
    }
    cluster.apply([role | {"rules": kai_rules()}, binding])
    options = ("--simulated", f"{PRODUCT}:{_GPUS}", "--kai", "--device-plugin", str(config))
    with running_kai(cluster), running_agent(cluster, *options) as running, running_admission(cluster):
        wait_until(lambda: _allocatable(cluster) == _GPUS, "GPUs for KAI", running.check)
        yield running
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", "node-agent-kai")


def _allocatable(cluster: Cluster) -> int:
    return int(cluster.get("node", "node1")["status"]["allocatable"].get("nvidia.com/gpu", 0))


def _check(processes: list[Process]) -> None:
    for process in processes:
        if not process.running:
            raise RuntimeError(f"{process.name} ended:\n{process.tail()}")


def _definitions(cluster: Cluster) -> list[str]:
    found = cluster.kubectl("get", "crd", "--output=name").split()
    return [name for name in found if name.endswith((".run.ai", ".kai.scheduler"))]


def _left(cluster: Cluster) -> bool:
    """Of an earlier one: they go in the background."""
    namespaces = cluster.kubectl("get", "namespace", *_NAMESPACES, "--ignore-not-found", "--output=name")
    return bool(namespaces or _definitions(cluster))


def _programs() -> dict[str, list[str]]:
    probe = "--health-probe-bind-address=127.0.0.1:"
    sharing = ["--gpu-sharing-enabled=true", "--gpu-pod-runtime-class-name="]
    reservation = [
        f"--resource-reservation-pod-image={RESERVATION_IMAGE}",
        f"--resource-reservation-allocation-timeout={_RESERVATION_SECONDS}",
        f"--runtime-class-name={RUNTIME_CLASS}",
    ]
    return {
        "admission": [f"--webhook-addr={_PORT}", *sharing, _NO_METRICS, f"{probe}8191"],
        "podgrouper": [_NO_METRICS, f"{probe}8192"],
        "podgroupcontroller": ["--enable-podgroup-webhook=false", f"{probe}8193"],
        "queuecontroller": ["--enable-webhook=false", "--metrics-listen-address=127.0.0.1:8194"],
        "binder": [_NO_METRICS, f"{probe}8195", *reservation],
        "scheduler": ["--listen-address=127.0.0.1:8196", "--plugin-server-port=8197", "--schedule-period=1s"],
    }


def _start(cluster: Cluster, programs: Path, name: str, flags: list[str]) -> Process:
    folder = cluster.folder / "kai"
    serving = folder / "k8s-webhook-server" / "serving-certs"
    if not serving.exists():
        serving.mkdir(parents=True)
        certificate = cluster.certificate("kai", (network.ADDRESS,))
        shutil.copyfile(certificate.certificate, serving / "tls.crt")
        shutil.copyfile(certificate.key, serving / "tls.key")
    environment = {"KUBECONFIG": str(cluster.kubeconfig), "TMPDIR": str(folder)}
    return cluster.start(f"kai-{name}", [str(programs / name), *flags], env=environment)


def _queues() -> list[dict[str, Any]]:
    unlimited = {"quota": -1, "limit": -1, "overQuotaWeight": 1}
    resources = dict.fromkeys(("cpu", "gpu", "memory"), unlimited)
    parent = "default-parent-queue"
    specs = {parent: {"resources": resources}, QUEUE: {"parentQueue": parent, "resources": resources}}
    return [
        {"apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": name}, "spec": spec}
        for name, spec in specs.items()
    ]


def _priorities() -> list[dict[str, Any]]:
    return [
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value}
        for name, value in _PRIORITIES.items()
    ]


def _reservation_account() -> list[dict[str, Any]]:
    """As KAI's chart: the reservation program writes into its own pod."""
    rbac = "rbac.authorization.k8s.io"
    name = {"name": RESERVATIONS}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": name,
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "patch"]}],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": name,
            "roleRef": {"apiGroup": rbac, "kind": "Role", **name},
            "subjects": [{"kind": "ServiceAccount", "namespace": RESERVATIONS, **name}],
        },
    ]


def _webhooks(cluster: Cluster) -> list[dict[str, Any]]:
    found = []
    for kind, path, operations in (
        ("MutatingWebhookConfiguration", "mutate", ["CREATE"]),
        ("ValidatingWebhookConfiguration", "validate", ["CREATE", "UPDATE"]),
    ):
        hook: dict[str, Any] = {
            "name": "admission.run.ai",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "clientConfig": {"url": f"https://{network.ADDRESS}:{_PORT}/{path}--v1-pod", "caBundle": cluster.authority.bundle},
            "matchConditions": [_CONDITION],
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": operations, "resources": ["pods"]}],
        }
        if path == "mutate":
            hook["reinvocationPolicy"] = "IfNeeded"
        metadata = {"name": "kai-admission"}
        found.append({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": metadata, "webhooks": [hook]})
    return found
