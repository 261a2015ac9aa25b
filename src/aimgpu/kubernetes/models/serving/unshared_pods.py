"""Pods that ask for a share of a GPU by annotation and have none, because admission did not see their creation."""

from collections.abc import Mapping
from typing import Any

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api.client import Client, Object, Resource
from aimgpu.kubernetes.api.resources import MUTATING_WEBHOOKS, NAMESPACES, PODS
from aimgpu.kubernetes.vocabulary.annotations import asks_in_vain
from aimgpu.kubernetes.vocabulary.names import LABEL_SHARE, WEBHOOKS
from aimgpu.kubernetes.vocabulary.namespaces import admits, explain_unadmitted

_FORBIDDEN = 403
_FINISHED = ("Succeeded", "Failed")
_SHOWN = 5


async def describe_unshared_pods(client: Client, namespace: str) -> list[str]:
    """One note about the pods of the namespace, with what to do; none where every pod has what it asks for."""
    pods, _ = await client.list(PODS, namespace, labels=f"!{LABEL_SHARE}")
    names = sorted(str(pod["metadata"]["name"]) for pod in pods if _lacks_share(pod))
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    listed = ", ".join(names[:_SHOWN]) + more
    advice = await _advise(client, namespace)
    return [f"pods that ask for a share of a GPU and run without one: {listed}. {advice}"]


def _lacks_share(pod: Mapping[str, Any]) -> bool:
    finished = (pod.get("status") or {}).get("phase") in _FINISHED or pod["metadata"].get("deletionTimestamp")
    return asks_in_vain(pod) and not finished


async def _advise(client: Client, name: str) -> str:
    namespace, webhooks = await _find(client, NAMESPACES, name), await _find(client, MUTATING_WEBHOOKS, WEBHOOKS)
    if not namespace or not webhooks:
        return "Check the labels of the namespace and whether the chart is installed, then create them again."
    if not admits(webhooks, namespace):
        advice = explain_unadmitted(webhooks, namespace)
        return f"The admission webhooks do not select namespace {name}. {advice}, then create them again."
    return "They were created before their namespace was selected, or while admission was down: create them again."


async def _find(client: Client, resource: Resource, name: str) -> Object | None:
    try:
        return await client.find(resource, name)
    except ClusterFailed as error:
        if error.status == _FORBIDDEN:
            return None
        raise
