"""Why the pods of a model are where they are, and what every other GPU of the cluster lacks. Pure.

kube-scheduler decides, and writes down no more than the outcome: what it chose stands in the pod, its ResourceClaim and the
GpuShare, what it refused in the condition of a pod that waits. What each GPU would offer is judged here, on the same objects.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aimgpu.control.observation import Observation
from aimgpu.control.plan.prepared import ask_for
from aimgpu.domain import Ask, Instance, Refusal
from aimgpu.domain.codec import encode
from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.models.page.cluster_sizing import size_in_cluster, snapshot_of
from aimgpu.kubernetes.models.page.observed import ClusterObjects, name_models
from aimgpu.kubernetes.models.serving.model_status import find_replica, granted_bytes
from aimgpu.placement import Snapshot, decision_to_json
from aimgpu.placement.explain import DeviceVerdict, Explanation, Verdict, explain
from aimgpu.placement.fit import free_bytes
from aimgpu.placement.preemption.planner import ask_again
from aimgpu.units import format_bytes
from aimgpu.web.sources import Json

_GB = 10**9
_MOST_DEVICES = 64
_NOTE = (
    "Judged on what the GpuNodes and GpuShares show now, with this pod taken out."
    " Taints, affinity, CPU and memory of nodes are judged by kube-scheduler alone."
)


def explain_pods(objects: ClusterObjects, seen: Observation, name: str) -> list[Json]:
    """One explanation for each pod of the model; one without pods has the reason for that."""
    item = dict(name_models(objects.models)).get(name)
    if item is None:
        return []
    namespace = item["metadata"]["namespace"]
    pods = {pod["metadata"]["name"]: pod for pod in objects.pods if pod["metadata"]["namespace"] == namespace}
    snapshot = snapshot_of(seen)
    return [_explain(one, pods.get(one.id), objects.shares, seen, snapshot) for one in seen.instances if one.deployment == name]


def _explain(instance: Instance, pod: Object | None, shares: Sequence[Object], seen: Observation, snapshot: Snapshot) -> Json:
    if pod is None:
        return {"instance": instance.id, "facts": [_sentence(instance.reason or "no pod")], "devices": [], "note": None}
    facts = [*_scheduling(pod), *_allocation(find_replica(pod, shares))]
    try:
        found = _judge(instance, seen, snapshot)
    except AimGpuError as error:  # an unknown model whose memory is not given
        facts.append(f"What it needs is not known, so GPUs cannot be compared: {error.message}.")
        return {"instance": instance.id, "facts": facts, "devices": [], "note": None}
    if not instance.grants and not isinstance(found.decision, Refusal):
        facts.append("By memory alone a GPU has room for it now; kube-scheduler tries again as soon as something changes.")
    devices = _verdicts(instance, found, snapshot)
    return {
        "instance": instance.id,
        "facts": facts,
        "decision": None if instance.grants else decision_to_json(found.decision),
        "devices": encode(tuple(devices[:_MOST_DEVICES])),
        "left_out": max(0, len(devices) - _MOST_DEVICES),
        "note": _NOTE,
    }


def _scheduling(pod: Object) -> Iterator[str]:
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    scheduled: Mapping[str, Any] = next(
        (one for one in status.get("conditions") or () if one.get("type") == "PodScheduled"), {}
    )
    if scheduled.get("status") == "False":
        yield f"kube-scheduler has no place for it: {_sentence(str(scheduled.get('message') or 'it gives no reason'))}"
    elif spec.get("nodeName"):
        at = f" at {scheduled['lastTransitionTime']}" if scheduled.get("lastTransitionTime") else ""
        yield f"kube-scheduler chose node {spec['nodeName']}{at}."
    else:
        yield "kube-scheduler has not looked at it yet."
    if spec.get("nodeSelector"):
        wanted = ", ".join(f"{key}={value}" for key, value in sorted(spec["nodeSelector"].items()))
        yield f"Its pod runs only on nodes with {wanted}."


def _allocation(replica: Mapping[str, Any]) -> Iterator[str]:
    info = replica.get("partitionInfo") or {}
    if info.get("partitionId"):
        by = f"ResourceClaim {replica['claim']} holds" if replica.get("claim") else "It has"
        held = granted_bytes(replica)
        size = round(float(info.get("partitionSizeGB") or 0) * _GB)
        share = f"{format_bytes(held, up=True)} of {info['partitionId']}" if held else str(info["partitionId"])
        whole = f", which has {format_bytes(size)}" if size else ""
        level = f", enforced at level {replica['level']}" if replica.get("level") else ""
        yield f"{by} {share}{whole}{level}."
    if replica.get("problem"):
        yield f"The node cannot prepare it: {_sentence(str(replica['problem']))}"


def _judge(instance: Instance, seen: Observation, snapshot: Snapshot) -> Explanation:
    if instance.id in snapshot.running:
        return explain(snapshot.without_instance(instance.id), ask_again(snapshot, instance.id))
    wanted = next(one for one in seen.deployments if one.name == instance.deployment)
    ask: Ask = ask_for(size_in_cluster(wanted, seen), instance.replica)
    return explain(snapshot, ask)


def _verdicts(instance: Instance, found: Explanation, snapshot: Snapshot) -> list[DeviceVerdict]:
    """The GPU that it has is the chosen one, whichever would be chosen here now; then those that would do."""
    held = {grant.device_id: grant.partition_id for grant in instance.grants}
    states = {state.device.id: state for _, state in snapshot.devices()}
    verdicts = []
    for one in found.devices:
        partition = states[one.device_id].device.partition(held.get(one.device_id, ""))
        if one.device_id in held:
            free = (
                f": {format_bytes(max(0, free_bytes(states[one.device_id], partition)))} stays free there" if partition else ""
            )
            verdicts.append(replace(one, verdict=Verdict.CHOSEN, text=f"{held[one.device_id]}{free}"))
        elif held and one.verdict is Verdict.CHOSEN:
            verdicts.append(replace(one, verdict=Verdict.WOULD_DO))
        else:
            verdicts.append(one)
    order = tuple(Verdict)
    return sorted(verdicts, key=lambda one: order.index(one.verdict))


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
