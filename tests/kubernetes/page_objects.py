"""Objects of a small cluster, as the API server has them: a node with one GPU, a model, its pod and its share."""

from typing import Any

from aimgpu.kubernetes.vocabulary import model_labels as labels

GB = 10**9


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
    info = {"partitionId": "gpu-0/cpx-3", "partitionSizeGB": 24, "allocatedMemoryGB": 10.737}
    replica = {"pod": pod_name, "node": "n1", "gpu": "gpu-0", "level": "hardware", "partitionInfo": info}
    return {"metadata": {"name": "s", "namespace": namespace}, "status": {"replicas": [replica]}}


def finished(ended: float = 10.0, instance: str = "team/chat-1", seconds: float = 1.0) -> dict[str, Any]:
    """A request as a gateway reports it."""
    return {
        "model": "chat",
        "instance": instance,
        "caller": "alice",
        "priority": "high",
        "status": 200,
        "code": None,
        "streamed": True,
        "queued_seconds": 0.0,
        "first_byte_seconds": 0.1,
        "tokens": 7,
        "recalls": 0,
        "ended": ended,
        "seconds": seconds,
    }
