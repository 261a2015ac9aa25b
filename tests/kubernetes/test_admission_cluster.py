"""Annotations on the real cluster: the API server calls admission, kube-scheduler places, the node agent grants."""

import base64
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.accounts import NAMESPACE
from tests.kubernetes.admission import FIRST_PORT, SERVICE, running_admission, start
from tests.kubernetes.node_agent import NodeAgent, running_agent

from aimgpu.kubernetes.cluster.admission.warning_policies import changed_pod_warning, warning_policies
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration
from aimgpu.kubernetes.vocabulary.names import WEBHOOKS as NAME
from aimgpu.kubernetes.vocabulary.namespaces import AdmittedNamespaces


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[NodeAgent]:
    with running_agent(cluster, "--simulated", "MI300X:1", "--repartition") as running:
        yield running


@pytest.fixture(scope="module")
def admission(cluster: Cluster, agent: NodeAgent) -> Iterator[list[Process]]:
    with running_admission(cluster, replicas=2) as running:
        wait_until(lambda: bool(agent.devices()), "GPUs are published", agent.check)
        yield running


def pod(name: str, annotations: dict[str, str]) -> dict[str, Any]:
    main = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [main]},
    }


def refusal(cluster: Cluster, item: dict[str, Any], namespace: str) -> str:
    with pytest.raises(RuntimeError) as refused:
        cluster.apply(item, namespace)
    return str(refused.value)


def test_two_halves_of_a_gpu_run_and_a_third_waits(
    cluster: Cluster, namespace: str, agent: NodeAgent, admission: list[Process]
) -> None:
    annotations = {"gpu-fraction": "0.5", "aim.amd.com/qos-priority": "high"}
    for name in ("one", "two"):
        cluster.apply(pod(name, annotations), namespace)
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    cluster.apply(pod("three", annotations), namespace)  # not before: pods get their claims in any order
    wait_until(lambda: _is_unschedulable(cluster, "three", namespace), "the third waits", agent.check)
    environment = cluster.exec("one", "env", namespace=namespace)
    granted = int(next(line for line in environment.splitlines() if line.startswith("AIMGPU_MEMORY_BYTES=")).partition("=")[2])
    assert 95 << 30 <= granted <= 96 << 30
    wait_until(lambda: _reported(cluster, namespace) == 2, "the driver's report in the status of both claims", agent.check)
    templates = cluster.get_all("resourceclaimtemplates", namespace)
    assert len(templates) == 1  # equal requests share one
    cluster.delete("pod", "one", namespace=namespace)
    cluster.wait("pod/three", "condition=Ready", namespace)


def test_every_refusal_reaches_the_user_with_its_reason(cluster: Cluster, namespace: str, admission: list[Process]) -> None:
    assert "between 0 and 1" in refusal(cluster, pod("bad", {"gpu-fraction": "1.5"}), namespace)
    assert "both given" in refusal(cluster, pod("bad", {"gpu-fraction": "0.5", "gpu-memory": "1"}), namespace)
    assert "does not say which model" in refusal(cluster, pod("bad", {"aim.amd.com/gpu-sharing": "true"}), namespace)
    assert "gpu-fraction-num-devices needs" in refusal(cluster, pod("bad", {"gpu-fraction-num-devices": "2"}), namespace)
    whole = pod("bad", {"gpu-memory": "1024"})
    whole["spec"]["containers"][0]["resources"] = {"limits": {"amd.com/gpu": "1"}}
    assert "amd.com/gpu" in refusal(cluster, whole, namespace)


def test_a_dry_run_makes_no_template(cluster: Cluster, namespace: str, admission: list[Process]) -> None:
    item = pod("dry", {"gpu-memory": "7777"})
    cluster.kubectl("create", "--dry-run=server", "-f", "-", f"--namespace={namespace}", stdin=json.dumps(item))
    assert cluster.get_all("resourceclaimtemplates", namespace) == []


@pytest.fixture
def labelled_only(cluster: Cluster, admission: list[Process]) -> Iterator[None]:
    cluster.apply([mutating_configuration(NAMESPACE, SERVICE, scope=AdmittedNamespaces.LABELLED), *warning_policies()])
    yield
    for item in warning_policies():
        cluster.kubectl("delete", item["kind"], item["metadata"]["name"])
    cluster.apply(mutating_configuration(NAMESPACE, SERVICE))
    wait_until(lambda: _is_given_a_claim(cluster, "default"), "all namespaces are selected again")


def test_where_namespaces_are_labelled_others_get_no_share_and_a_warning_with_the_command(
    cluster: Cluster, namespace: str, labelled_only: None
) -> None:
    def warned(kind: str) -> bool:
        return f"kubectl label namespace {namespace} aim.amd.com/admission=enabled" in _warning(cluster, kind, namespace)

    wait_until(lambda: not _is_given_a_claim(cluster, namespace), "the namespace is not selected")
    for kind in ("Deployment", "Job", "CronJob"):
        wait_until(partial(warned, kind), f"a warning for a {kind}")
    cluster.kubectl("label", "namespace", namespace, "aim.amd.com/admission=enabled")
    wait_until(lambda: _is_given_a_claim(cluster, namespace), "the namespace is selected")
    for kind in ("Deployment", "Job", "CronJob"):
        wait_for(partial(_warning, cluster, kind, namespace), lambda text: text == "", f"no warning for a {kind}")


@pytest.fixture
def warned_of_changes(cluster: Cluster) -> Iterator[None]:
    cluster.apply(list(changed_pod_warning()))
    yield
    for item in changed_pod_warning():
        cluster.kubectl("delete", item["kind"], item["metadata"]["name"])


def test_who_annotates_a_pod_that_is_there_is_warned(cluster: Cluster, namespace: str, warned_of_changes: None) -> None:
    cluster.apply(pod("there", {"example.com/other": "1"}), namespace)

    def warning(*change: str) -> str:
        words = ("annotate", "pod", "there", *change, f"--namespace={namespace}", "--dry-run=server", "--warnings-as-errors")
        try:
            cluster.kubectl(*words)
        except RuntimeError as error:
            return str(error)
        return ""

    wait_until(lambda: "the share of a GPU is that of the pod's creation" in warning("gpu-memory=2048"), "the policy's warning")
    assert "the pod's creation" in warning("aim.amd.com/compute=30%")
    assert warning("example.com/other=2", "--overwrite") == ""
    assert warning("example.com/other-") == ""


def _is_given_a_claim(cluster: Cluster, namespace: str) -> bool:
    words = ("create", "--dry-run=server", "--filename=-", f"--namespace={namespace}", "--output=json")
    made = json.loads(cluster.kubectl(*words, stdin=json.dumps(pod("asks", {"gpu-memory": "1024"}))))
    return "resourceClaims" in made["spec"]


def _warning(cluster: Cluster, kind: str, namespace: str) -> str:
    """What kubectl prints when it creates an object whose pods have an annotation of ours; empty: nothing."""
    made = pod("asks", {"gpu-memory": "1024"})
    spec: dict[str, Any] = {"template": {"metadata": {**made["metadata"], "labels": {"app": "asks"}}, "spec": made["spec"]}}
    if kind == "Deployment":
        spec["selector"] = {"matchLabels": {"app": "asks"}}
    else:
        made["spec"]["restartPolicy"] = "Never"
    if kind == "CronJob":
        spec = {"schedule": "0 0 * * *", "jobTemplate": {"spec": spec}}
    group = "apps/v1" if kind == "Deployment" else "batch/v1"
    item = {"apiVersion": group, "kind": kind, "metadata": {"name": "asks"}, "spec": spec}
    words = ("create", "--dry-run=server", "--filename=-", f"--namespace={namespace}", "--warnings-as-errors")
    try:
        cluster.kubectl(*words, stdin=json.dumps(item))
    except RuntimeError as error:
        return str(error)
    return ""


def test_certificates_of_another_program_are_served_and_trusted(
    cluster: Cluster, namespace: str, admission: list[Process], tmp_path: Path
) -> None:
    """In a folder, as cert-manager's Secret is mounted."""
    made = cluster.certificate("another-program", (f"{SERVICE}.{NAMESPACE}.svc",))
    for name, path in {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": cluster.authority.certificate}.items():
        shutil.copyfile(path, tmp_path / name)
    for number, process in enumerate(admission):
        process.stop()
        kubeconfig = cluster.folder / "admission.kubeconfig"
        admission[number] = start(cluster, kubeconfig, FIRST_PORT + number, "--certificates", str(tmp_path))

    def trusted() -> set[str]:
        kinds = ("mutatingwebhookconfiguration", "validatingwebhookconfiguration")
        return {hook["clientConfig"]["caBundle"] for kind in kinds for hook in cluster.get(kind, NAME)["webhooks"]}

    theirs = cluster.authority.certificate.read_text().strip()
    wait_until(
        lambda: all(base64.b64decode(bundle).decode().startswith(theirs) for bundle in trusted()),
        "their authority is in the configurations",
    )
    wait_until(lambda: _accepted(cluster, namespace, "trusted"), "the API server trusts them")


def test_one_replica_is_enough_and_without_any_only_annotated_pods_are_refused(
    cluster: Cluster, namespace: str, admission: list[Process]
) -> None:
    admission[0].kill()
    wait_until(lambda: _accepted(cluster, namespace, "kept"), "the other replica answers")
    admission[1].kill()
    cluster.apply(pod("plain", {}), namespace)
    assert "failed calling webhook" in refusal(cluster, pod("annotated", {"gpu-memory": "1024"}), namespace)


def _reported(cluster: Cluster, namespace: str) -> int:
    """Claims in whose status the driver says what was granted."""
    return sum(bool(claim.get("status", {}).get("devices")) for claim in cluster.get_all("resourceclaims", namespace))


def _is_unschedulable(cluster: Cluster, name: str, namespace: str) -> bool:
    conditions = cluster.get("pod", name, namespace)["status"].get("conditions") or ()
    return any(one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable" for one in conditions)


def _accepted(cluster: Cluster, namespace: str, name: str) -> bool:
    try:
        cluster.apply(pod(name, {"gpu-memory": "1024"}), namespace)
    except RuntimeError:
        return False
    return True
