"""Which workload a pod belongs to, and the GpuShare of one. Pure."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.kubernetes.vocabulary.custom_resources import VERSION
from aimgpu.kubernetes.vocabulary.names import GROUP

Object = dict[str, Any]
_SERVICE_LABEL = "serving.kserve.io/inferenceservice"
_HASH_LABEL = "pod-template-hash"
_LONGEST_NAME = 63


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """What a user deployed: an InferenceService, a Deployment, a Job, or a pod by itself."""

    namespace: str
    kind: str
    name: str

    @property
    def share_name(self) -> str:
        """Of its GpuShare; names that would be too long end in a hash of the whole."""
        full = f"{self.kind.lower()}-{self.name}"
        if len(full) <= _LONGEST_NAME:
            return full
        return f"{full[: _LONGEST_NAME - 9]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def workload_of(pod: Mapping[str, Any]) -> Workload:
    """By its labels and owner references alone: no other object is read."""
    metadata = pod["metadata"]
    namespace, labels = metadata["namespace"], metadata.get("labels") or {}
    if labels.get(_SERVICE_LABEL):
        return Workload(namespace, "InferenceService", labels[_SERVICE_LABEL])
    owner = next((each for each in metadata.get("ownerReferences") or () if each.get("controller")), None)
    if owner is None or owner["kind"] == "Node":  # a node owns the pods of its kubelet's own files
        return Workload(namespace, "Pod", metadata["name"])
    suffix = f"-{labels.get(_HASH_LABEL)}"
    if owner["kind"] == "ReplicaSet" and owner["name"].endswith(suffix):
        return Workload(namespace, "Deployment", owner["name"].removesuffix(suffix))
    return Workload(namespace, owner["kind"], owner["name"])


def gpu_share(workload: Workload) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "GpuShare",
        "metadata": {"name": workload.share_name, "namespace": workload.namespace},
        "spec": {"workload": {"kind": workload.kind, "name": workload.name}},
    }
