"""What runs of a stack in a cluster, in the words of `aimgpu ps`. Pure, from the objects."""

from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.api.foreign_objects import leaving_out, read_count
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.units import MIB

_GB = 10**9
_LONGEST_PRINTED = 600  # characters
_BAD_REASONS = (
    "CrashLoopBackOff",
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
)


def describe_models(models: Sequence[Object], pods: Sequence[Object], shares: Sequence[Object]) -> list[dict[str, Any]]:
    """One row per pod; a model without pods has one row that says why: it sleeps, or its pods are refused."""
    rows = []
    for model in sorted(models, key=served_name):
        name, workload = served_name(model), labels.find_workload(model)
        mine = [pod for pod in pods if labels.find_workload(pod) == workload]
        with leaving_out(model):
            facts = _facts(model, name)
            for pod in sorted(mine, key=_name):
                with leaving_out(pod):
                    rows.append({**facts, **_pod_row(pod, find_replica(pod, shares))})
            if not mine:
                rows.append({**facts, **_without_pods(model)})
    return rows


def served_name(item: Object) -> str:
    """What callers name it. A name with "/" would be that of a namespace: it is not taken."""
    given = str((item["metadata"].get("annotations") or {}).get(labels.NAME) or "")
    _, label = labels.find_workload(item) or ("", "None")
    return given if given and "/" not in given else label


def _facts(model: Object, name: str) -> dict[str, Any]:
    annotations, spec = model["metadata"].get("annotations") or {}, model.get("spec") or {}
    return {
        "name": name,
        "model": annotations.get(labels.MODEL),
        "engine": annotations.get(labels.ENGINE),
        "priority": annotations.get(labels.PRIORITY),
        "concurrency": read_count(annotations.get(labels.CONCURRENCY)),
        "kind": "Deployment" if "replicas" in spec else "Job" if "completions" in spec else "InferenceService",
    }


def _pod_row(pod: Object, replica: Mapping[str, Any]) -> dict[str, Any]:
    state, reason = pod_state(pod)
    if state == "loading":
        reason = reason or replica.get("problem")
    info = replica.get("partitionInfo") or {}
    return {
        "id": _name(pod),
        "state": state,
        "reason": reason,
        "node": (pod.get("spec") or {}).get("nodeName"),
        "gpu": replica.get("gpu"),
        "partition": info.get("partitionId"),
        "memory_bytes": granted_bytes(replica),
        "level": replica.get("level"),
        "restarts": sum(each.get("restartCount", 0) for each in (pod.get("status") or {}).get("containerStatuses") or ()),
    }


def _describe_crash(waiting: Object, ended: Object, *, with_log: bool) -> str:
    """The end of what it printed, where Kubernetes kept that and it is wanted, else what Kubernetes says of it."""
    after = f" (it ended with status {ended['exitCode']})" if ended.get("exitCode") is not None else ""
    printed = " ".join(str(ended.get("message") or "").split())
    if printed and with_log:
        return f"{waiting['reason']}: {printed[-_LONGEST_PRINTED:]}{after}"
    return f"{waiting['reason']}: {waiting.get('message') or ''}".rstrip(": ") + after


def _describe_end(status: Object, *, with_log: bool) -> str | None:
    """Of a program that is not started again."""
    ended = [(each.get("state") or {}).get("terminated") or {} for each in status.get("containerStatuses") or ()]
    bad = next((each for each in ended if each.get("exitCode")), None)
    return _describe_crash({"reason": bad.get("reason") or "Error"}, bad, with_log=with_log) if bad else None


def pod_state(pod: Object, *, with_log: bool = True) -> tuple[str, str | None]:
    """In our words, with the reason that Kubernetes gives where it does not run; `with_log`: and the end of what it printed."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return "draining", None
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _BAD_REASONS:
            ended = (each.get("lastState") or {}).get("terminated") or {}
            return "failed", _describe_crash(waiting, ended, with_log=with_log)
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        return "queued", scheduled.get("message")
    if (conditions.get("Ready") or {}).get("status") == "True":
        return "ready", None
    if status.get("phase") == "Failed":
        return "failed", status.get("message") or status.get("reason") or _describe_end(status, with_log=with_log)
    return "ended" if status.get("phase") == "Succeeded" else "loading", None


def granted_bytes(replica: Mapping[str, Any]) -> int | None:
    """Of a replica of a GpuShare: granted in whole MiB, written in whole MB."""
    memory = (replica.get("partitionInfo") or {}).get("allocatedMemoryGB")
    return round(memory * _GB / MIB) * MIB if memory else None


def _without_pods(model: Object) -> dict[str, Any]:
    if (model.get("spec") or {}).get("replicas") == 0:
        return {"id": None, "state": "sleeping", "reason": "scaled to zero; a request wakes it"}
    conditions = (model.get("status") or {}).get("conditions") or ()
    found = {each.get("type"): each.get("message") for each in conditions if each.get("status") == "True"}
    for kind, state in (("Failed", "failed"), ("Complete", "ended"), ("ReplicaFailure", "queued")):  # two are of Jobs
        if kind in found:
            return {"id": None, "state": state, "reason": found[kind]}
    return {"id": None, "state": "queued", "reason": "its pods are being made"}


def find_replica(pod: Object, shares: Sequence[Object]) -> Mapping[str, Any]:
    """What the GpuShares report of this pod; empty where they report nothing."""
    for share in shares:
        with leaving_out(share):
            for replica in (share.get("status") or {}).get("replicas") or ():
                if replica.get("pod") == _name(pod) and share["metadata"]["namespace"] == pod["metadata"]["namespace"]:
                    return dict(replica)
    return {}


def _label(item: Object, name: str) -> str | None:
    return (item["metadata"].get("labels") or {}).get(name)


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])
