"""Another share for a model that aimgpu applied: what its Deployment or InferenceService asks for is written again. Pure."""

import copy
import json
from typing import Any

from aimgpu.control.stack.stack_text import write_fields
from aimgpu.domain import Deployment
from aimgpu.errors import NotAllowed
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, INFERENCE_SERVICES
from aimgpu.kubernetes.models.serving.applier import MANAGER
from aimgpu.kubernetes.models.serving.manifests import OLD_FIRST, Manifest
from aimgpu.kubernetes.models.serving.owned_fields import owned_fields
from aimgpu.kubernetes.models.serving.share_request import request_share
from aimgpu.kubernetes.vocabulary import annotations as keys
from aimgpu.kubernetes.vocabulary import model_labels as labels

NEW_FIRST = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
_SIZES = (keys.SHARING, keys.FRACTION, keys.MEMORY, keys.NUM_DEVICES, labels.CONCURRENCY)  # of a pod's request


async def read_source(client: Client, deployment: Object) -> Object:
    """What makes the pods as it is now: the InferenceService that KServe made the Deployment from, else the Deployment."""
    namespace, name = deployment["metadata"]["namespace"], deployment["metadata"]["name"]
    service = inference_service_of(deployment)
    if service is not None:
        return {"kind": "InferenceService", **await client.get(INFERENCE_SERVICES, service, namespace)}
    return {"kind": "Deployment", **await client.get(DEPLOYMENTS, name, namespace)}


def inference_service_of(deployment: Object) -> str | None:
    """The name of the InferenceService that a Deployment belongs to."""
    owners = deployment["metadata"].get("ownerReferences") or ()
    return next((str(one["name"]) for one in owners if one.get("kind") == "InferenceService"), None)


def rewrite_share(source: Object, wanted: Deployment, *, surge: bool) -> Manifest:
    """To apply: what aimgpu applied of `source`, with the share of `wanted`. `surge`: new pods before the old ones end."""
    manifest = _owned(source)
    _set_strategy(manifest, NEW_FIRST if surge else OLD_FIRST)
    if manifest["kind"] == "Deployment":
        _write(manifest["spec"]["template"]["metadata"].setdefault("annotations", {}), wanted)
    else:
        _write(manifest["metadata"]["annotations"], wanted, keep=(labels.CONCURRENCY,))
    entry: dict[str, Any] = json.loads(source["metadata"]["annotations"][labels.ENTRY])
    entry["gpu"] = write_fields(wanted)["gpu"]
    manifest["metadata"]["annotations"][labels.ENTRY] = json.dumps(entry)
    return manifest


def strategy_of(source: Object) -> dict[str, Any] | None:
    """How its pods are replaced, to give it back after a rollout; one that an earlier rollout left counts as ours."""
    place, key = _strategy_place(source)
    found: dict[str, Any] | None = place.get(key)
    if found != NEW_FIRST:
        return found
    return OLD_FIRST if source["kind"] == "Deployment" else None


def restore_strategy(source: Object, strategy: dict[str, Any] | None) -> Manifest:
    """To apply after a rollout: all that aimgpu applied of `source`, with its strategy of before. No pod is replaced by it."""
    manifest = _owned(source)
    _set_strategy(manifest, strategy)
    return manifest


def is_rolled_out(deployment: Object, wanted: Deployment) -> bool:
    """Whether every pod has the share of `wanted` and answers, and none of before is left."""
    spec, status = deployment.get("spec") or {}, deployment.get("status") or {}
    asked = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
    if asked.get(keys.MEMORY) != request_share(wanted).annotations[keys.MEMORY]:
        return False  # KServe has not followed yet
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return False
    count = spec.get("replicas", 1)
    return all(status.get(name, 0) == count for name in ("replicas", "updatedReplicas", "availableReplicas"))


def _owned(source: Object) -> Manifest:
    manifest = owned_fields(source, MANAGER)
    if manifest is None or labels.ENTRY not in (source["metadata"].get("annotations") or {}):
        place = f"{source['kind']} {source['metadata']['namespace']}/{source['metadata']['name']}"
        raise NotAllowed(
            f"{place} was not applied by aimgpu from a stack file",
            hint="Change its annotations where it is written, or apply its stack file again.",
        )
    return manifest


def _strategy_place(item: Object) -> tuple[dict[str, Any], str]:
    """Where it stands: in a Deployment, or in the InferenceService that KServe makes one from."""
    spec: dict[str, Any] = item["spec"]
    return (spec, "strategy") if item["kind"] == "Deployment" else (spec["predictor"], "deploymentStrategy")


def _set_strategy(manifest: Manifest, strategy: dict[str, Any] | None) -> None:
    place, key = _strategy_place(manifest)
    place.pop(key, None)
    if strategy is not None:
        place[key] = copy.deepcopy(strategy)


def _write(annotations: dict[str, str], wanted: Deployment, keep: tuple[str, ...] = ()) -> None:
    share = request_share(wanted).annotations
    for key in _SIZES:
        if key not in keep:
            annotations.pop(key, None)
    annotations.update({key: value for key, value in share.items() if key in _SIZES})
