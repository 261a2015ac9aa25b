"""What a GpuShare says of a workload, from its pods. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.domain import Level
from aimgpu.kubernetes.operator.pod_gpus import is_finished, node_of
from aimgpu.kubernetes.operator.shares.indexes import KnownGpus
from aimgpu.kubernetes.operator.shares.rows import rows_of

Object = dict[str, Any]


def share_status(pods: Sequence[Mapping[str, Any]], gpus: KnownGpus, before: Object) -> Object:
    """Of pods that ask for GPUs of ours. Times of conditions that did not change are those of `before`."""
    alive = [pod for pod in pods if not is_finished(pod)]
    replicas = [row for pod in sorted(alive, key=_name_of) for row in rows_of(pod, gpus)]
    status: Object = {"replicas": replicas, "conditions": [_condition(alive, replicas, before)]}
    if replicas:
        status["partitionInfo"] = replicas[0]["partitionInfo"]
        levels = [Level(row["level"]) for row in replicas if row.get("level")]
        if levels:
            status["level"] = min(levels, key=lambda level: level.rank).value
    return status


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
    node = node_of(pod)
    return f"{pod['metadata']['name']} " + (f"is not started on {node} yet" if node else "is not placed yet")


def _name_of(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])
