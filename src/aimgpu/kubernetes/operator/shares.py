"""What a GpuShare says, from the pods of a workload, their claims and the published GPUs. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aimgpu.domain import Level
from aimgpu.kubernetes.admission.annotations import HANDLED
from aimgpu.kubernetes.admission.pod_patch import CLAIM
from aimgpu.kubernetes.custom_resources import VERSION
from aimgpu.kubernetes.names import GROUP, MEMORY, TYPE, TYPE_SEAT
from aimgpu.kubernetes.operator.claim_index import ClaimIndex, DeviceIndex, consumed_bytes, results_of
from aimgpu.kubernetes.quantities import parse_quantity

Object = dict[str, Any]
_GB = 10**9
_SERVICE_LABEL = "serving.kserve.io/inferenceservice"
_OWNED = ("ReplicaSet", "Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob")
_HASH_LABEL = "pod-template-hash"
_LONGEST_NAME = 63
_FINISHED = ("Succeeded", "Failed")


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
    if owner is None:
        return Workload(namespace, "Pod", metadata["name"])
    suffix = f"-{labels.get(_HASH_LABEL)}"
    if owner["kind"] == "ReplicaSet" and owner["name"].endswith(suffix):
        return Workload(namespace, "Deployment", owner["name"].removesuffix(suffix))
    return Workload(namespace, owner["kind"], owner["name"])


def is_ours(pod: Mapping[str, Any]) -> bool:
    return HANDLED in ((pod.get("metadata") or {}).get("annotations") or {})


def share_status(
    pods: Sequence[Mapping[str, Any]],
    claims: ClaimIndex,
    devices: DeviceIndex,
    before: Object,
) -> Object:
    """Times of conditions that did not change are those of `before`."""
    alive = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in _FINISHED]
    replicas = [row for pod in sorted(alive, key=_name_of) for row in _replicas(pod, claims, devices)]
    status: Object = {"replicas": replicas, "conditions": [_condition(alive, replicas, before)]}
    if replicas:
        status["partitionInfo"] = replicas[0]["partitionInfo"]
        levels = [Level(row["level"]) for row in replicas if row.get("level")]
        if levels:
            status["level"] = min(levels, key=lambda level: level.rank).value
    return status


def gpu_share(workload: Workload) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "GpuShare",
        "metadata": {"name": workload.share_name, "namespace": workload.namespace},
        "spec": {"workload": {"kind": workload.kind, "name": workload.name}},
    }


def claim_name(pod: Mapping[str, Any]) -> str | None:
    """Of the claim that was made for this pod."""
    made = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    return next((each.get("resourceClaimName") for each in made if each["name"] == CLAIM), None)


def _replicas(pod: Mapping[str, Any], claims: ClaimIndex, devices: DeviceIndex) -> list[Object]:
    name = claim_name(pod)
    claim = claims.get(pod["metadata"]["namespace"], name)
    status = (claim or {}).get("status") or {}
    written = {(each["pool"], each["device"]): each for each in status.get("devices") or ()}
    rows = []
    for result in results_of(claim):
        place = result["pool"], result["device"]
        report = written.get(place) or {}
        data = report.get("data") or {}
        device = devices.find(place)
        row = {
            "pod": pod["metadata"]["name"],
            "node": (pod.get("spec") or {}).get("nodeName") or "",
            "claim": name,
            "gpu": _text(device, "gpu"),
            "level": data.get("level") or _text(device, "level"),
            "simulated": _flag(device, "simulated") or None,
            "problem": _problem(report),
            "partitionInfo": _partition_info(result, device, data, claims.taken_bytes(place)),
        }
        rows.append({key: value for key, value in row.items() if value not in ("", None)})
    return rows


def _problem(report: Mapping[str, Any]) -> str:
    """What the node wrote into the claim where it cannot prepare the device, or the device is not healthy."""
    ready: Mapping[str, Any] = next((each for each in report.get("conditions") or () if each.get("type") == "Ready"), {})
    return str(ready.get("message") or ready.get("reason") or "not ready") if ready.get("status") == "False" else ""


def _partition_info(result: Mapping[str, Any], device: Mapping[str, Any], data: Mapping[str, Any], allocated: int) -> Object:
    size = parse_quantity(((device.get("capacity") or {}).get(MEMORY) or {}).get("value") or 0)
    granted = parse_quantity(data["memory"]) if data.get("memory") else consumed_bytes(result) or size
    info = {
        "partitionId": data.get("partition") or str(result["device"]),
        "computeMode": _text(device, "computeMode"),
        "memoryMode": _text(device, "memoryMode"),
        "partitionSizeGB": _gigabytes(size),
        "allocatedMemoryGB": _gigabytes(granted),
        "availableMemoryGB": _gigabytes(max(size - (allocated or granted), 0)),
    }
    if _text(device, TYPE) == TYPE_SEAT:  # its GPU is shared by pods of other claims, and known only when it is prepared
        del info["availableMemoryGB"]
        if not data.get("memory"):
            del info["allocatedMemoryGB"]
    return {key: value for key, value in info.items() if value != ""}


def _condition(pods: Sequence[Mapping[str, Any]], replicas: Sequence[Object], before: Object) -> Object:
    served = {row["pod"] for row in replicas}
    waiting = [pod for pod in pods if pod["metadata"]["name"] not in served]
    refused = [row for row in replicas if row.get("problem")]
    if not pods:
        status, reason, message = "False", "NoPods", "no pod of this workload runs or waits"
    elif refused:
        status, reason = "False", "Refused"
        message = f"{len(refused)} of {len(pods)} pods wait: {refused[0]['pod']}: {refused[0]['node']}: {refused[0]['problem']}"
    elif waiting:
        status, reason = "False", "Waiting"
        message = f"{len(waiting)} of {len(pods)} pods wait: {_why(waiting[0])}"
    else:
        status, reason, message = "True", "Allocated", f"{len(pods)} of {len(pods)} pods have their share"
    old: Mapping[str, Any] = next(
        (each for each in before.get("conditions") or () if each.get("type") == "PartitionAllocated"), {}
    )
    found = {"type": "PartitionAllocated", "status": status, "reason": reason, "message": message}
    if old.get("status") == status and old.get("lastTransitionTime"):
        found["lastTransitionTime"] = old["lastTransitionTime"]
    return found


def _why(pod: Mapping[str, Any]) -> str:
    """The scheduler's own words for why a pod waits."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    scheduled: Mapping[str, Any] = next((each for each in conditions if each.get("type") == "PodScheduled"), {})
    if scheduled.get("status") == "False" and scheduled.get("message"):
        return f"{pod['metadata']['name']}: {scheduled['message']}"
    return f"{pod['metadata']['name']} is not placed yet"


def _text(device: Mapping[str, Any], name: str) -> str:
    return str(((device.get("attributes") or {}).get(name) or {}).get("string") or "")


def _flag(device: Mapping[str, Any], name: str) -> bool:
    return bool(((device.get("attributes") or {}).get(name) or {}).get("bool"))


def _gigabytes(count: int) -> float:
    return round(count / _GB, 3)


def _name_of(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])
