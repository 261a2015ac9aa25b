"""What the page of a cluster makes of the API server's objects."""

from typing import Any

import pytest
from tests.web.test_model_state import states

from aimgpu.kubernetes.page.observed import ClusterObjects, observe
from aimgpu.kubernetes.page.service import ReadOnlyAuthority
from aimgpu.kubernetes.serving import model_labels as labels
from aimgpu.web.gpu_rows import describe_gpus

GB = 10**9
LOCAL = {"client": ("127.0.0.1", 5), "headers": [(b"x-aimgpu-page", b"1")]}


def node(name: str = "n1", **fields: Any) -> dict[str, Any]:
    gpu = {"id": "gpu-0", "index": 0, "product": "MI300X", "vendor": "amd", "memoryBytes": 192 * GB, "layout": "CPX/NPS4"}
    return {"metadata": {"name": name}, "status": {"gpus": [gpu | fields]}}


def model(
    name: str = "chat", namespace: str = "team", replicas: int = 1, created: str = "2026-01-01T00:00:00Z"
) -> dict[str, Any]:
    annotations = {labels.MODEL: "org/Tiny-1B", labels.ENGINE: "vllm", labels.CONCURRENCY: "4"}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {labels.SERVED_MODEL: name},
            "annotations": annotations,
            "creationTimestamp": created,
        },
        "spec": {"replicas": replicas},
    }


def pod(name: str, served: str = "chat", namespace: str = "team", **condition: str) -> dict[str, Any]:
    found = condition or {"type": "Ready", "status": "True"}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {labels.SERVED_MODEL: served}},
        "spec": {"nodeName": "n1", "containers": [{"name": "engine"}]},
        "status": {"phase": "Running", "conditions": [found]},
    }


def share(pod_name: str, namespace: str = "team") -> dict[str, Any]:
    info = {"partitionId": "gpu-0/cpx-3", "partitionSizeGB": 24, "allocatedMemoryGB": 10}
    replica = {"pod": pod_name, "node": "n1", "gpu": "gpu-0", "level": "hardware", "partitionInfo": info}
    return {"metadata": {"name": "s", "namespace": namespace}, "status": {"replicas": [replica]}}


def look(**objects: Any) -> Any:
    return observe(ClusterObjects(**objects), cluster="all", taken_at=1.0)


def test_a_model_stands_on_the_partition_that_its_pod_has_a_share_of() -> None:
    seen = look(nodes=[node()], models=[model()], pods=[pod("chat-1")], shares=[share("chat-1")])
    (gpu,) = describe_gpus(seen, {})
    first, rest = gpu["partitions"]
    assert (first["id"], first["memory_bytes"], first["granted_bytes"]) == ("n1/gpu-0/cpx-3", 24 * GB, 10 * GB)
    assert [one["model"] for one in first["shares"]] == ["chat"]
    assert rest["memory_bytes"] == 168 * GB
    assert gpu["name"] == "MI300X on n1"
    assert states(seen, {}) == {"chat": ("ready", None)}


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ({"models": [model(replicas=0)]}, ("sleeping", "scaled to zero; a request wakes it")),
        ({"models": [model()]}, ("queued", "its pods are being made")),
        (
            {"models": [model()], "pods": [pod("p", type="PodScheduled", status="False", message="no GPU has room")]},
            ("queued", "no GPU has room"),
        ),
        ({"models": [model()], "pods": [pod("p", type="Ready", status="False")]}, ("loading", None)),
    ],
)
def test_what_does_not_run_gives_the_reason_that_kubernetes_gives(objects: Any, expected: tuple[str, str | None]) -> None:
    assert states(look(**objects), {})["chat"] == expected


def test_of_two_models_of_one_name_the_older_has_it() -> None:
    later = model(namespace="other", created="2026-02-01T00:00:00Z")
    seen = look(models=[later, model()], pods=[pod("a"), pod("b", namespace="other", type="Ready", status="False")])
    assert states(seen, {}) == {"chat": ("ready", None), "other/chat": ("loading", None)}


def test_a_gpu_that_is_not_well_is_named_and_one_without_shares_is_one_free_piece() -> None:
    seen = look(nodes=[node(unhealthy="ECC errors"), node("n2")])
    assert seen.device_error == "n1/gpu-0: ECC errors"
    assert [gpu["free_bytes"] for gpu in describe_gpus(seen, {})] == [192 * GB, 192 * GB]


def test_a_browser_on_this_machine_may_look_and_nobody_may_change() -> None:
    access = ReadOnlyAuthority().access(LOCAL)
    assert (access.read, access.write) == (True, False)
    assert not ReadOnlyAuthority().access({"client": ("10.0.0.7", 5), "headers": []}).read
