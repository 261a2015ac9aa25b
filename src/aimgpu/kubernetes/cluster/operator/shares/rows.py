"""What one pod holds of GPUs, a row per device: from its claims, or from what its node's device plugin offers. Pure."""

from collections.abc import Mapping
from typing import Any

from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.cluster.operator.pod_gpus import (
    CLASS_OF_RESOURCE,
    claims_of,
    is_marked,
    is_reserved_for,
    limits_of,
    mapped_resources,
    node_of,
    results_of,
)
from aimgpu.kubernetes.cluster.operator.shares.indexes import KnownGpus, consumed_bytes
from aimgpu.kubernetes.vocabulary.annotations import asks_in_vain
from aimgpu.kubernetes.vocabulary.names import MEMORY, TYPE, TYPE_SEAT

Object = dict[str, Any]
_GB = 10**9


def asks(pod: Mapping[str, Any], gpus: KnownGpus) -> bool:
    """Whether a pod wants or has GPUs of ours."""
    if is_marked(pod) or asks_in_vain(pod):
        return True
    namespace = pod["metadata"]["namespace"]
    if any(gpus.claims.get(namespace, claim.name) is not None for claim in claims_of(pod)):
        return True
    node = node_of(pod)
    if node:
        nodes = gpus.nodes
        return any(nodes.offer(node, name) is not None or nodes.held(pod, name) for name in _plugin_limits(pod))
    return any(name in CLASS_OF_RESOURCE or gpus.nodes.is_offered(name) for name in limits_of(pod))


def rows_of(pod: Mapping[str, Any], gpus: KnownGpus) -> list[Object]:
    """Empty: it waits."""
    namespace = pod["metadata"]["namespace"]
    rows = []
    for each in claims_of(pod):
        claim = gpus.claims.get(namespace, each.name)
        if claim is not None and (not each.shared or is_reserved_for(claim, pod)):
            rows += _claim_rows(pod, claim, gpus)
    return [*rows, *_plugin_rows(pod, gpus)]


def _claim_rows(pod: Mapping[str, Any], claim: Mapping[str, Any], gpus: KnownGpus) -> list[Object]:
    written = {(each["pool"], each["device"]): each for each in (claim.get("status") or {}).get("devices") or ()}
    rows = []
    for result in results_of(claim):
        place = result["pool"], result["device"]
        report = written.get(place) or {}
        data = report.get("data") or {}
        device = gpus.devices.find(place)
        row = {
            "pod": pod["metadata"]["name"],
            "node": node_of(pod),
            "claim": claim["metadata"]["name"],
            "gpu": _text(device, "gpu"),
            "level": data.get("level") or _text(device, "level"),
            "simulated": _flag(device, "simulated") or None,
            "problem": _problem(report),
            "partitionInfo": _partition_info(result, device, data, gpus.claims.taken_bytes(place)),
        }
        rows.append(_known(row))
    return rows


def _plugin_rows(pod: Mapping[str, Any], gpus: KnownGpus) -> list[Object]:
    """A row per replica, once the kubelet has allocated them: that is when it takes the pod on."""
    node, rows = node_of(pod), list[Object]()
    if not node or not (pod.get("status") or {}).get("startTime"):
        return rows
    for name, count in _plugin_limits(pod).items():
        row = {"pod": pod["metadata"]["name"], "node": node, "resource": name}
        held = gpus.nodes.held(pod, name)
        if len(held) > count:  # a pod of this name that is ending is among them: whose is whose is not known
            held = []
        rows += [_known({**row, **_replica(one, gpus.nodes.find_partition(node, one["partition"]))}) for one in held]
        offer = gpus.nodes.offer(node, name)
        if offer is not None:  # the node has not reported them yet
            rows += [_known({**row, **_replica(offer, gpus.nodes.only_partition(node))})] * (count - len(held))
    return rows


def _plugin_limits(pod: Mapping[str, Any]) -> dict[str, int]:
    answered = mapped_resources(pod)
    return {name: count for name, count in limits_of(pod).items() if name not in answered}


def _replica(one: Mapping[str, Any], place: tuple[Mapping[str, Any], Mapping[str, Any]] | None) -> Object:
    """`one`: what the node reports of this pod's replica, or else what it offers; `place`: the GPU and its partition."""
    gpu, partition = place or ({}, {})
    size, granted = partition.get("memoryBytes", one.get("partitionBytes")), partition.get("grantedBytes")
    info = {
        "partitionId": one.get("partition") or partition.get("id"),
        "computeMode": gpu.get("computeMode") or one.get("computeMode"),
        "memoryMode": gpu.get("memoryMode") or one.get("memoryMode"),
        "partitionSizeGB": _gigabytes(size),
        "allocatedMemoryGB": _gigabytes(one.get("memoryBytes")),
        "availableMemoryGB": None if size is None or granted is None else _gigabytes(max(size - granted, 0)),
    }
    found = {"gpu": gpu.get("id"), "level": one.get("level"), "simulated": gpu.get("simulated") or None}
    return {**found, "partitionInfo": _known(info)}


def _problem(report: Mapping[str, Any]) -> str:
    """What the node wrote into the claim where it cannot prepare the device, or the device is not healthy."""
    ready: Mapping[str, Any] = next((each for each in report.get("conditions") or () if each.get("type") == "Ready"), {})
    return str(ready.get("message") or ready.get("reason") or "not ready") if ready.get("status") == "False" else ""


def _partition_info(result: Mapping[str, Any], device: Mapping[str, Any], data: Mapping[str, Any], allocated: int) -> Object:
    size = parse_quantity(((device.get("capacity") or {}).get(MEMORY) or {}).get("value") or 0) or None
    granted = parse_quantity(data["memory"]) if data.get("memory") else consumed_bytes(result) or size
    left = None if size is None or granted is None else max(size - (allocated or granted), 0)
    info = {
        "partitionId": data.get("partition") or str(result["device"]),
        "computeMode": _text(device, "computeMode"),
        "memoryMode": _text(device, "memoryMode"),
        "partitionSizeGB": _gigabytes(size),
        "allocatedMemoryGB": _gigabytes(granted),
        "availableMemoryGB": _gigabytes(left),
    }
    if _text(device, TYPE) == TYPE_SEAT:  # its GPU is shared by pods of other claims, and known only when it is prepared
        del info["availableMemoryGB"]
        if not data.get("memory"):
            del info["allocatedMemoryGB"]
    return _known(info)


def _text(device: Mapping[str, Any], name: str) -> str:
    return str(((device.get("attributes") or {}).get(name) or {}).get("string") or "")


def _flag(device: Mapping[str, Any], name: str) -> bool:
    return bool(((device.get("attributes") or {}).get(name) or {}).get("bool"))


def _gigabytes(count: int | None) -> float | None:
    return None if count is None else round(count / _GB, 3)


def _known(fields: Mapping[str, Any]) -> Object:
    return {key: value for key, value in fields.items() if value not in ("", None)}
