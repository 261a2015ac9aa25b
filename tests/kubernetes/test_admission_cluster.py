"""Annotations on the real cluster: the API server calls admission, kube-scheduler places, the node agent grants."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import wait_until
from tests.kubernetes.accounts import NAMESPACE
from tests.kubernetes.admission import FIRST_PORT, SERVICE, running_admission, start
from tests.kubernetes.node_agent import NodeAgent, running_agent

from aimgpu.kubernetes.admission.webhook_configurations import NAME


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
    for name in ("one", "two", "three"):
        cluster.apply(pod(name, {"gpu-fraction": "0.5", "aim.amd.com/qos-priority": "high"}), namespace)
    for name in ("one", "two"):
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    environment = cluster.exec("one", "env", namespace=namespace)
    granted = int(next(line for line in environment.splitlines() if line.startswith("AIMGPU_MEMORY_BYTES=")).partition("=")[2])
    assert 95 << 30 <= granted <= 96 << 30
    wait_until(lambda: _reported(cluster, namespace) == 2, "the driver's report in the status of both claims", agent.check)
    assert cluster.get("pod", "three", namespace)["status"]["phase"] == "Pending"
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

    wait_until(lambda: trusted() == {cluster.authority.bundle}, "their authority is in the configurations", lambda: None)
    wait_until(lambda: _accepted(cluster, namespace, "trusted"), "the API server trusts them", lambda: None)


def test_one_replica_is_enough_and_without_any_only_annotated_pods_are_refused(
    cluster: Cluster, namespace: str, admission: list[Process]
) -> None:
    admission[0].kill()
    wait_until(lambda: _accepted(cluster, namespace, "kept"), "the other replica answers", lambda: None)
    admission[1].kill()
    cluster.apply(pod("plain", {}), namespace)
    assert "failed calling webhook" in refusal(cluster, pod("annotated", {"gpu-memory": "1024"}), namespace)


def _reported(cluster: Cluster, namespace: str) -> int:
    """Claims in whose status the driver says what was granted."""
    return sum(bool(claim.get("status", {}).get("devices")) for claim in cluster.get_all("resourceclaims", namespace))


def _accepted(cluster: Cluster, namespace: str, name: str) -> bool:
    try:
        cluster.apply(pod(name, {"gpu-memory": "1024"}), namespace)
    except RuntimeError:
        return False
    return True
