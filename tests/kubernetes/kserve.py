"""KServe's real controllers on the test cluster: InferenceServices in Standard mode, and LLMInferenceServices."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tests.cluster import network
from tests.cluster.cluster import Cluster
from tests.cluster.foreign import KNATIVE_MODULE, KSERVE, KSERVE_MODULE
from tests.cluster.go_programs import build, module_folder
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until

NAMESPACE = "kserve"
STORAGE_IMAGE = "localhost/storage-initializer:test"
ENGINE_IMAGE = "docker.io/vllm/vllm-openai:v0.19.0"
RUNTIME = "vllm"
_PORTS = {"manager": 9543, "llmisvc": 9545}
_COPIES_NOTHING = ("/bin/sh", "-c", "exit 0", "storage-initializer")


@contextmanager
def running_kserve(cluster: Cluster) -> Iterator[list[Process]]:
    """With its CRDs, webhooks and a runtime for vLLM; afterwards nothing of it is left, or it is about to go."""
    programs = build(KSERVE)
    source = module_folder(*KSERVE_MODULE)
    definitions = [*(source / "config/crd/full").glob("serving.kserve.io_*.yaml")]
    definitions += [*(source / "config/crd/full/clusterstoragecontainer").glob("serving*.yaml")]
    definitions += [*(source / "config/crd/full/llmisvc").glob("serving*.yaml")]
    # What KServe hands over to Knative, which acts on it where `tests.kubernetes.knative` runs it.
    knative = module_folder(*KNATIVE_MODULE) / "config/core/300-resources/service.yaml"
    crds = [f"{path.stem.partition('_')[2]}.serving.kserve.io" for path in definitions]
    crds.append("services.serving.knative.dev")
    wait_until(lambda: not _present(cluster, crds), "those of an earlier KServe are gone")
    for path in (*definitions, knative):
        wait_until(partial(_installed, cluster, path), path.name)
    cluster.wait_until_served(*crds)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.apply([_settings(source), _autoscaler()], NAMESPACE)
    cluster.apply(
        [yaml.safe_load(path.read_text()) for path in sorted((source / "config/llmisvcconfig").glob("config-llm-*.yaml"))],
        NAMESPACE,
    )
    cluster.add_image(STORAGE_IMAGE, entrypoint=_COPIES_NOTHING)
    cluster.add_image(ENGINE_IMAGE, programs={"vllm": "tests.programs.fake_vllm"})
    webhooks = _webhooks(cluster, source / "config/webhook/manifests.yaml", "manager")
    processes = [_start(cluster, programs, name) for name in _PORTS]
    cluster.apply(webhooks)
    cluster.apply(_runtime())
    try:
        yield processes
    finally:
        # While its controllers run: they have finalizers on these, and a CRD goes only with its last object.
        for kind in ("llminferenceservices", "inferenceservices", "llminferenceserviceconfigs"):
            cluster.kubectl("delete", f"{kind}.serving.kserve.io", "--all", "--all-namespaces", "--timeout=600s")
        for hook in webhooks:
            cluster.kubectl("delete", hook["kind"], hook["metadata"]["name"], "--ignore-not-found")
        cluster.kubectl("delete", "clusterservingruntime", RUNTIME, "--ignore-not-found")
        for process in processes:
            process.kill()
        cluster.kubectl("delete", "crd", *crds, "--wait=false")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _present(cluster: Cluster, crds: list[str]) -> bool:
    namespace = cluster.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found", "--output=name")
    return bool(namespace or cluster.kubectl("get", "crd", *crds, "--ignore-not-found", "--output=name"))


def _installed(cluster: Cluster, path: Path) -> bool:
    """The definition of InferenceServices has 2 MB, which a busy API server may not manage within its own time limit."""
    try:
        cluster.apply(path)
    except RuntimeError as error:
        if "Timeout" not in str(error):
            raise
        return False
    return True


def _settings(source: Path) -> dict[str, Any]:
    """No ingress, Standard mode, and an image that exists here."""
    found: dict[str, Any] = yaml.safe_load((source / "config/configmap/inferenceservice.yaml").read_text())
    data = found["data"]
    data.pop("_example", None)
    data["deploy"] = json.dumps({"defaultDeploymentMode": "Standard"})
    data["ingress"] = json.dumps(json.loads(data["ingress"]) | {"disableIngressCreation": True})
    data["storageInitializer"] = json.dumps(json.loads(data["storageInitializer"]) | {"image": STORAGE_IMAGE})
    return found


def _autoscaler() -> dict[str, Any]:
    """Knative's own settings, which KServe reads."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "config-autoscaler"}, "data": {}}


def _webhooks(cluster: Cluster, manifests: Path, name: str) -> list[dict[str, Any]]:
    found = [each for each in yaml.safe_load_all(manifests.read_text()) if each]
    for configuration in found:
        configuration["metadata"].pop("creationTimestamp", None)
        for hook in configuration["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            url = f"https://{network.ADDRESS}:{_PORTS[name]}{path}"
            hook["clientConfig"] = {"url": url, "caBundle": cluster.authority.bundle}
            hook["admissionReviewVersions"] = ["v1", "v1beta1"]
    return found


def _start(cluster: Cluster, programs: Path, name: str) -> Process:
    folder = cluster.folder / f"kserve-{name}"
    serving = folder / "k8s-webhook-server" / "serving-certs"
    serving.mkdir(parents=True, exist_ok=True)
    certificate = cluster.certificate(f"kserve-{name}", (network.ADDRESS,))
    shutil.copyfile(certificate.certificate, serving / "tls.crt")
    shutil.copyfile(certificate.key, serving / "tls.key")
    port = _PORTS[name]
    flags = [f"--webhook-port={port}", f"--health-probe-addr=127.0.0.1:{port + 1000}"]
    flags += ["--metrics-addr=0"] + (["--metrics-secure=false"] if name == "llmisvc" else [])
    environment = {"KUBECONFIG": str(cluster.kubeconfig), "POD_NAMESPACE": NAMESPACE, "TMPDIR": str(folder)}
    environment["KNATIVE_CONFIG_AUTOSCALER_NAMESPACE"] = NAMESPACE
    process = cluster.start(f"kserve-{name}", [str(programs / name), *flags], env=environment)

    def check() -> None:
        if not process.running:
            raise RuntimeError(f"KServe's {name} ended:\n{process.tail()}")

    wait_until(lambda: "Serving webhook server" in process.written(), f"KServe's {name}", check)
    return process


def _runtime() -> dict[str, Any]:
    container = {
        "name": "kserve-container",
        "image": ENGINE_IMAGE,
        "command": ["vllm", "serve", "/mnt/models"],
        "args": ["--port=8080", "--served-model-name={{.Name}}"],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8080}, "periodSeconds": 1},
        "ports": [{"containerPort": 8080, "protocol": "TCP"}],
    }
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ClusterServingRuntime",
        "metadata": {"name": RUNTIME},
        "spec": {"supportedModelFormats": [{"name": "vLLM", "autoSelect": True}], "containers": [container]},
    }
