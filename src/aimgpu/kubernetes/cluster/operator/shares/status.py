"""What a GpuShare says of a workload, from its pods. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.domain import Level
from aimgpu.kubernetes.cluster.operator.pod_gpus import claims_of, is_finished, node_of, results_of
from aimgpu.kubernetes.cluster.operator.shares.indexes import KnownGpus
from aimgpu.kubernetes.cluster.operator.shares.room import find_room
from aimgpu.kubernetes.cluster.operator.shares.rows import rows_of
from aimgpu.kubernetes.cluster.placer.pods import is_gated
from aimgpu.kubernetes.vocabulary.annotations import DEFAULT_SCHEDULER, asks_in_vain
from aimgpu.kubernetes.vocabulary.names import HINT, UNHINTED

Object = dict[str, Any]


def share_status(pods: Sequence[Mapping[str, Any]], gpus: KnownGpus, before: Object) -> Object:
    """Of pods that ask for GPUs of ours. Times of conditions that did not change are those of `before`."""
    alive = [pod for pod in pods if not is_finished(pod)]
    replicas = [row for pod in sorted(alive, key=_name_of) for row in rows_of(pod, gpus)]
    status: Object = {"replicas": replicas, "conditions": [_condition(alive, replicas, gpus, before)]}
    if replicas:
        status["partitionInfo"] = replicas[0]["partitionInfo"]
        levels = [Level(row["level"]) for row in replicas if row.get("level")]
        if levels:
            status["level"] = min(levels, key=lambda level: level.rank).value
    return status


def _condition(pods: Sequence[Mapping[str, Any]], replicas: Sequence[Object], gpus: KnownGpus, before: Object) -> Object:
    served = {row["pod"] for row in replicas}
    waiting = [pod for pod in pods if pod["metadata"]["name"] not in served or not _is_prepared(pod, gpus)]
    refused = [row for row in replicas if row.get("problem")]
    missed = [pod for pod in pods if asks_in_vain(pod)]
    if not pods:
        status, reason, message = "False", "NoPods", "no pod of this workload runs or waits"
    elif missed:
        status, reason = "False", "NotAdmitted"
        message = (
            f"{len(missed)} of {len(pods)} pods have no share of a GPU: {missed[0]['metadata']['name']} was created while "
            "admission was down or did not select its namespace. Create it again (`aimgpu k8s status` shows what is missing)"
        )
    elif refused:
        status, reason = "False", "Refused"
        message = f"{len(refused)} of {len(pods)} pods wait: {refused[0]['pod']}: {refused[0]['node']}: {refused[0]['problem']}"
    elif waiting:
        status, reason = "False", "Waiting"
        message = f"{len(waiting)} of {len(pods)} pods wait: {_why(waiting[0], pods, gpus)}"
    else:
        status, reason, message = "True", "Allocated", f"{len(pods)} of {len(pods)} pods have their share{_placed(pods)}"
    old: Mapping[str, Any] = next(
        (each for each in before.get("conditions") or () if each.get("type") == "PartitionAllocated"), {}
    )
    found = {"type": "PartitionAllocated", "status": status, "reason": reason, "message": message}
    if old.get("status") == status and old.get("lastTransitionTime"):
        found["lastTransitionTime"] = old["lastTransitionTime"]
    return found


def _is_prepared(pod: Mapping[str, Any], gpus: KnownGpus) -> bool:
    """Whether its node has made its claims true: as the node wrote into them, or as its containers show."""
    status = pod.get("status") or {}
    if status.get("phase") != "Pending" or any(one.get("containerID") for one in status.get("containerStatuses") or ()):
        return True
    claims = [gpus.claims.get(pod["metadata"]["namespace"], one.name) for one in claims_of(pod)]
    return all((one.get("status") or {}).get("devices") for one in claims if one is not None and results_of(one))


def _why(pod: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], gpus: KnownGpus) -> str:
    """Why a pod waits, in kube-scheduler's words, what is free, and which pod ahead of it takes that."""
    namespace = pod["metadata"]["namespace"]
    reason = gpus.reasons.get((namespace, pod["metadata"]["name"]))
    words = (f"{pod['metadata']['name']}: {reason}" if reason else _words(pod)) + _placed([pod])
    if is_gated(pod):  # many wait so at once, and what is free is looked at for each of them by the placer
        return words
    claims = [gpus.claims.get(namespace, one.name) for one in claims_of(pod)]
    open_claims = [one for one in claims if one is not None and "allocation" not in (one.get("status") or {})]
    rooms = [room for one in open_claims if (room := find_room(one.get("spec") or {}, gpus)) is not None and not room.now]
    if node_of(pod) or not rooms:
        return words
    parts = [words, rooms[0].text]
    hashes = {(one["metadata"].get("labels") or {}).get("pod-template-hash") for one in pods}
    before = [one for one in pods if node_of(one) and _hash(one) != _hash(pod)] if len(hashes) > 1 else []
    if before:
        parts.append(
            f"{before[0]['metadata']['name']} of the version before has its share until this pod is ready: "
            "set maxSurge: 0 and maxUnavailable: 1 in the update strategy"
        )
    return "; ".join(parts)


def _placed(pods: Sequence[Mapping[str, Any]]) -> str:
    """What became of the placer's hints; empty where kube-scheduler followed them, or there were none."""
    found = []
    for pod in pods:
        name, notes = pod["metadata"]["name"], pod["metadata"].get("annotations") or {}
        if node_of(pod) and notes.get(HINT, node_of(pod)) != node_of(pod):
            found.append(f"{name} is on {node_of(pod)}, not on {notes[HINT]} as hinted")
        elif UNHINTED in notes:
            found.append(f"{name} was left to kube-scheduler: {notes[UNHINTED]}")
    return f"; {found[0]}{f' ({len(found) - 1} more like it)' if len(found) > 1 else ''}" if found else ""


def _hash(pod: Mapping[str, Any]) -> str:
    return str((pod["metadata"].get("labels") or {}).get("pod-template-hash") or "")


def _words(pod: Mapping[str, Any]) -> str:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    scheduled: Mapping[str, Any] = next((each for each in conditions if each.get("type") == "PodScheduled"), {})
    if scheduled.get("status") == "False" and scheduled.get("message"):
        return f"{pod['metadata']['name']}: {scheduled['message']}"
    node = node_of(pod)
    scheduler = str((pod.get("spec") or {}).get("schedulerName") or DEFAULT_SCHEDULER)
    unplaced = "is not placed yet" + (f", and {scheduler} gives no reason" if scheduler != DEFAULT_SCHEDULER else "")
    return f"{pod['metadata']['name']} " + (f"is not started on {node} yet" if node else unplaced)


def _name_of(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])
