"""KServe's real controller makes the pods, the API server calls admission, kube-scheduler places, the node agent grants."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.foreign import KAI, KSERVE, needs
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.admission import running_admission
from tests.kubernetes.kai import PRODUCT, QUEUE, SCHEDULER, running_kai_agent
from tests.kubernetes.knative import running_knative
from tests.kubernetes.kserve import ENGINE_IMAGE, running_kserve
from tests.kubernetes.node_agent import NodeAgent, running_agent

from aimgpu.domain import Footprint, Vendor
from aimgpu.hardware.simulated import find_product
from aimgpu.kubernetes.vocabulary.served_model import PodModel, size_model
from aimgpu.sizing import built_in
from aimgpu.units import MIB

pytestmark = needs(KSERVE, KAI)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SERVER = ["/bin/httpd", "-f", "-p", "8080"]  # KServe looks at this port
SHARING = "aim.amd.com/gpu-sharing"


@pytest.fixture(scope="module")
def kserve(cluster: Cluster) -> Iterator[None]:
    with running_kserve(cluster):
        yield


@pytest.fixture(scope="module")
def agent(
    cluster: Cluster, kserve: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeAgent]:
    """Where a test asks for it with KAI-Scheduler, which places then."""
    if getattr(request, "param", None) == "kai":
        with running_kai_agent(cluster, tmp_path_factory.mktemp("plugin")) as running:
            yield running
        return
    with running_agent(cluster, "--simulated", "MI300X:1") as running, running_admission(cluster):
        wait_until(lambda: bool(running.devices()), "GPUs are published", running.check)
        yield running


def model_service(
    name: str, annotations: dict[str, str], *arguments: str, predictor: dict[str, Any] | None = None
) -> dict[str, Any]:
    """An InferenceService of a model on the runtime for vLLM."""
    model: dict[str, Any] = {"modelFormat": {"name": "vLLM"}, "storageUri": f"hf://{MODEL}"}
    if arguments:
        model["args"] = list(arguments)
    spec = {"predictor": {"minReplicas": 1, "maxReplicas": 1, "model": model, **(predictor or {})}}
    return service(name, annotations, spec)


def service(name: str, annotations: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "annotations": {"serving.kserve.io/autoscalerClass": "none", **annotations}}
    return {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": metadata, "spec": spec}


def llm_service(name: str, annotations: dict[str, str], **variables: str) -> dict[str, Any]:
    """An LLMInferenceService on KServe's own template, with our stand-in for its image."""
    env = [{"name": key, "value": value} for key, value in variables.items()]
    main = {"name": "main", "image": ENGINE_IMAGE, "env": env, "securityContext": {"runAsNonRoot": False}}
    main["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/true"]}}}  # the template sleeps for 15 seconds
    spec = {
        "model": {"uri": f"hf://{MODEL}", "name": MODEL},
        "replicas": 1,
        "annotations": annotations,
        "template": {"containers": [main]},
    }
    metadata = {"name": name, "annotations": annotations}
    return {"apiVersion": "serving.kserve.io/v1alpha2", "kind": "LLMInferenceService", "metadata": metadata, "spec": spec}


def only_pod(cluster: Cluster, namespace: str, selector: str) -> dict[str, Any]:
    (pod,) = wait_for(lambda: cluster.get_all("pods", namespace, selector), bool, f"a pod of {selector}")
    return pod


def granted_bytes(cluster: Cluster, pod: dict[str, Any], namespace: str, container: str) -> int:
    name = pod["metadata"]["name"]
    try:
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    except RuntimeError as error:
        logs = cluster.kubectl("logs", name, "--all-containers", "--tail=30", f"--namespace={namespace}", check=False)
        raise RuntimeError(f"{error}\n{logs}") from error
    printed = cluster.exec(pod["metadata"]["name"], "env", namespace=namespace, container=container)
    return int(next(line for line in printed.splitlines() if line.startswith("AIMGPU_MEMORY_BYTES=")).partition("=")[2])


def arguments_of(pod: dict[str, Any], container: str) -> dict[str, str]:
    found = next(each for each in pod["spec"]["containers"] if each["name"] == container)
    return {name: value for name, _, value in (word.partition("=") for word in found["args"])}


def need(**settings: int) -> Footprint:
    return size_model(PodModel(name=MODEL, is_vllm=True, **settings), built_in(), Vendor.AMD)


def refusal(cluster: Cluster, item: dict[str, Any], namespace: str) -> str:
    with pytest.raises(RuntimeError) as refused:
        cluster.apply(item, namespace)
    return str(refused.value)


def test_a_service_is_sized_from_its_model_and_arguments_and_makes_one_replica_set(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    cluster.apply(model_service("chat", {SHARING: "true"}, "--max-model-len=4096", "--max-num-seqs=4"), namespace)
    pod = only_pod(cluster, namespace, "serving.kserve.io/inferenceservice=chat")
    granted = granted_bytes(cluster, pod, namespace, "kserve-container")
    footprint = need(context_tokens=4096, sequences=4, concurrency=4)
    assert footprint.total_bytes <= granted < footprint.total_bytes + 2 * MIB
    arguments = arguments_of(pod, "kserve-container")
    assert arguments["--max-model-len"] == "4096"
    assert arguments["--max-num-seqs"] == "4"
    kv_bytes = int(arguments["--kv-cache-memory-bytes"])
    assert footprint.least_bytes + kv_bytes <= granted
    cluster.wait("inferenceservice/chat", "condition=Ready", namespace)
    (claim,) = cluster.get_all("resourceclaims", namespace)
    assert claim["status"]["reservedFor"][0]["name"] == pod["metadata"]["name"]
    # Nothing is written into the object after its creation, so nothing rolls out again.
    made = cluster.get("inferenceservice", "chat", namespace)
    ours = {name for name in made["metadata"]["annotations"] if name.startswith("aim.amd.com/")}
    assert ours == {SHARING}
    assert made["metadata"]["generation"] == 1
    assert len(cluster.get_all("replicasets", namespace)) == 1
    assert len(cluster.get_all("pods", namespace)) == 1
    cluster.kubectl("delete", "inferenceservice", "chat", f"--namespace={namespace}")
    wait_until(lambda: not agent.grants(), "the grant is given back", agent.check)


def test_fractions_and_memory_pass_through_kserve(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    cluster.apply(model_service("part", {"gpu-fraction": "0.25"}), namespace)
    main = {"name": "kserve-container", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": SERVER}
    cluster.apply(service("plain", {"gpu-memory": "8192"}, {"predictor": {"maxReplicas": 1, "containers": [main]}}), namespace)
    part = only_pod(cluster, namespace, "serving.kserve.io/inferenceservice=part")
    plain = only_pod(cluster, namespace, "serving.kserve.io/inferenceservice=plain")
    quarter = granted_bytes(cluster, part, namespace, "kserve-container")
    assert quarter == pytest.approx(206141652992 // 4, abs=MIB)
    # vLLM gets all of its share, however long its context may be.
    kv_bytes = int(arguments_of(part, "kserve-container")["--kv-cache-memory-bytes"])
    assert quarter * 0.9 < need().least_bytes + kv_bytes <= quarter
    assert granted_bytes(cluster, plain, namespace, "kserve-container") == 8192 * MIB
    cluster.kubectl("delete", "inferenceservice", "part", "plain", f"--namespace={namespace}")
    wait_until(lambda: not agent.grants(), "the grants are given back", agent.check)


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"gpu-fraction": "1.5"}, "gpu-fraction cannot be '1.5'"),
        ({"gpu-memory": "8Gi"}, "gpu-memory cannot be '8Gi'"),
        ({"gpu-fraction": "0.5", "gpu-memory": "100"}, "both given"),
        ({SHARING: "yes"}, f"{SHARING} cannot be 'yes'"),
        ({SHARING: "true", "aim.amd.com/compute-mode": "SPX", "aim.amd.com/memory-mode": "NPS4"}, "no GPU can be in SPX"),
        ({SHARING: "true", "aim.amd.com/isolation": "strong"}, "aim.amd.com/isolation cannot be"),
    ],
)
def test_bad_values_are_refused_when_the_service_is_created(
    cluster: Cluster, namespace: str, agent: NodeAgent, annotations: dict[str, str], words: str
) -> None:
    assert words in refusal(cluster, model_service("bad", annotations), namespace)
    assert words in refusal(cluster, llm_service("bad", annotations), namespace)


def test_a_model_that_nothing_is_known_of_is_refused_when_the_service_is_created(
    cluster: Cluster, namespace: str, agent: NodeAgent
) -> None:
    unknown = model_service("bad", {SHARING: "true"})
    unknown["spec"]["predictor"]["model"]["storageUri"] = "hf://acme/never-heard-of"
    assert "nothing is known about the model 'acme/never-heard-of'" in refusal(cluster, unknown, namespace)


@pytest.fixture
def knative(cluster: Cluster, kserve: None) -> Iterator[None]:
    with running_knative(cluster):
        yield


def test_pods_that_knative_makes_of_a_service_are_granted_their_share(
    cluster: Cluster, namespace: str, agent: NodeAgent, knative: None
) -> None:
    """KServe writes Knative's Service, Knative's controller the revision and its pod, with Knative's own queue-proxy."""
    annotations = {"gpu-memory": "8192", "serving.kserve.io/deploymentMode": "Knative"}
    hurried = {"timeout": 1}  # Knative gives its pods so much time to end; they drain for half a minute
    cluster.apply(model_service("lambda", annotations, "--max-model-len=4096", predictor=hurried), namespace)
    pod = only_pod(cluster, namespace, "serving.kserve.io/inferenceservice=lambda")
    (revision,) = cluster.get_all("revisions.serving.knative.dev", namespace)
    assert pod["metadata"]["labels"]["serving.knative.dev/revision"] == revision["metadata"]["name"]
    assert granted_bytes(cluster, pod, namespace, "kserve-container") == 8192 * MIB
    assert "--kv-cache-memory-bytes" in arguments_of(pod, "kserve-container")
    assert [each["name"] for each in pod["spec"]["containers"] if each.get("resources", {}).get("claims")] == [
        "kserve-container"
    ]
    # Knative refuses fields that it does not know: the claim is in the pod alone, and nothing rolls out again.
    assert "resourceClaims" not in revision["spec"]
    assert len(cluster.get_all("replicasets", namespace)) == 1
    cluster.kubectl("delete", "inferenceservice", "lambda", f"--namespace={namespace}")
    wait_until(lambda: not agent.grants(), "the grant is given back", agent.check)


def test_an_llm_inference_service_gets_its_claim_and_its_arguments(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    cluster.apply(
        llm_service("llm", {SHARING: "true"}, VLLM_ADDITIONAL_ARGS="--max-model-len=4096 --max-num-seqs=2"), namespace
    )
    pod = only_pod(cluster, namespace, "app.kubernetes.io/name=llm")
    granted = granted_bytes(cluster, pod, namespace, "main")
    footprint = need(context_tokens=4096, sequences=2, concurrency=2)
    assert footprint.total_bytes <= granted < footprint.total_bytes + 2 * MIB
    assert footprint.least_bytes + int(arguments_of(pod, "main")["--kv-cache-memory-bytes"]) <= granted
    assert len(cluster.get_all("replicasets", namespace)) == 1
    cluster.kubectl("delete", "llminferenceservice", "llm", f"--namespace={namespace}")


@pytest.mark.parametrize("agent", ["kai"], indirect=True)
def test_an_inference_service_through_kserve_and_kai_is_enforced(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    main = {"name": "kserve-container", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": SERVER}
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": "chat",
            "labels": {"kai.scheduler/queue": QUEUE},
            "annotations": {"gpu-fraction": "0.25", "serving.kserve.io/autoscalerClass": "none"},
        },
        "spec": {"predictor": {"schedulerName": SCHEDULER, "minReplicas": 1, "maxReplicas": 1, "containers": [main]}},
    }
    cluster.apply(service, namespace)
    cluster.wait("inferenceservice/chat", "condition=Ready", namespace)
    (made,) = cluster.get_all("pods", namespace)
    whole = find_product(PRODUCT).memory_bytes
    assert granted_bytes(cluster, made, namespace, "kserve-container") == whole // 4 // MIB * MIB
    assert "GPU_PORTION=0.25" in cluster.exec(made["metadata"]["name"], "env", namespace=namespace)  # written by KAI
    assert len(cluster.get_all("replicasets", namespace)) == 1
    cluster.kubectl("delete", "inferenceservice", "chat", f"--namespace={namespace}")
    wait_until(lambda: not agent.grants(), "the grant is given back", agent.check)
