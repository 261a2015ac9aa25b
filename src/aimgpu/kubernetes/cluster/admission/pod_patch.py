"""The change of a pod that gives its container the claim: a JSON patch, empty where the pod has it already."""

from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.kubernetes.cluster.admission.replicas import ReplicaChoice
from aimgpu.kubernetes.vocabulary.annotations import FRACTION, HANDLED, MEMORY, NUM_DEVICES, RESOURCE, GpuRequest
from aimgpu.kubernetes.vocabulary.names import LABEL_SHARE

CLAIM = "aim-gpu"
_KINDS = ("containers", "initContainers")

Patch = list[dict[str, Any]]


def patch_pod(pod: Mapping[str, Any], request: GpuRequest, template: str, arguments: Sequence[str]) -> Patch:
    """`arguments` are appended to those of the container. Patching twice changes nothing."""
    spec = pod["spec"]
    patch: Patch = []
    claims = spec.get("resourceClaims") or []
    if not any(claim.get("name") == CLAIM for claim in claims):
        claim = {"name": CLAIM, "resourceClaimTemplateName": template}
        patch += _append("/spec/resourceClaims", claims, claim)
    for kind in _KINDS:
        for index, container in enumerate(spec.get(kind) or ()):
            if container.get("name") == request.container:
                patch += _patch_container(f"/spec/{kind}/{index}", container, arguments)
    metadata = pod.get("metadata") or {}
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    if LABEL_SHARE not in labels:
        if not labels:
            patch.append({"op": "add", "path": "/metadata/labels", "value": {LABEL_SHARE: "true"}})
        else:
            patch.append({"op": "add", "path": f"/metadata/labels/{_escape(LABEL_SHARE)}", "value": "true"})
    if annotations.get(HANDLED) != template:
        patch.append({"op": "add", "path": f"/metadata/annotations/{_escape(HANDLED)}", "value": template})
    return patch


def patch_replicas(pod: Mapping[str, Any], request: GpuRequest, choice: ReplicaChoice, arguments: Sequence[str]) -> Patch:
    """A limit of the device plugin's resource in place of a claim. Patching twice changes nothing."""
    patch: Patch = []
    for kind in _KINDS:
        for index, container in enumerate(pod["spec"].get(kind) or ()):
            if container.get("name") == request.container:
                path = f"/spec/{kind}/{index}"
                patch += _limit(path, container.get("resources") or {}, choice) + _append_arguments(path, container, arguments)
    if ((pod.get("metadata") or {}).get("annotations") or {}).get(RESOURCE) != choice.name:
        patch.append({"op": "add", "path": f"/metadata/annotations/{_escape(RESOURCE)}", "value": choice.name})
    return patch


def _limit(path: str, resources: Mapping[str, Any], choice: ReplicaChoice) -> Patch:
    wanted, patch = str(choice.count), list[dict[str, Any]]()
    if not resources:
        return [{"op": "add", "path": f"{path}/resources", "value": {"limits": {choice.name: wanted}}}]
    for part in ("limits", "requests"):  # the API server copies limits to requests before admission is asked
        amounts = resources.get(part) or {}
        if not amounts and part == "limits":
            patch.append({"op": "add", "path": f"{path}/resources/limits", "value": {choice.name: wanted}})
        elif amounts and str(amounts.get(choice.name)) != wanted:
            patch.append({"op": "add", "path": f"{path}/resources/{part}/{_escape(choice.name)}", "value": wanted})
    return patch


def annotate_request(pod: Mapping[str, Any], request: GpuRequest) -> Patch:
    """The size that was found, as KAI-Scheduler reads it; nothing where the pod has one of its own."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    if request.memory_mib is None or MEMORY in annotations or FRACTION in annotations:
        return []
    found = [{"op": "add", "path": f"/metadata/annotations/{MEMORY}", "value": str(request.memory_mib)}]
    if request.devices > 1:
        found.append({"op": "add", "path": f"/metadata/annotations/{NUM_DEVICES}", "value": str(request.devices)})
    return found


def _patch_container(path: str, container: Mapping[str, Any], arguments: Sequence[str]) -> Patch:
    resources = container.get("resources") or {}
    claims = resources.get("claims") or []
    patch: Patch = []
    if not any(claim.get("name") == CLAIM for claim in claims):
        if not resources:
            patch.append({"op": "add", "path": f"{path}/resources", "value": {"claims": [{"name": CLAIM}]}})
        else:
            patch += _append(f"{path}/resources/claims", claims, {"name": CLAIM})
    return patch + _append_arguments(path, container, arguments)


def _append_arguments(path: str, container: Mapping[str, Any], arguments: Sequence[str]) -> Patch:
    given = [str(word) for word in container.get("args") or ()]
    missing = [word for word in arguments if word.partition("=")[0] not in {each.partition("=")[0] for each in given}]
    return [{"op": "add", "path": f"{path}/args", "value": [*given, *missing]}] if missing else []


def _append(path: str, present: Sequence[Any], item: object) -> Patch:
    if present:
        return [{"op": "add", "path": f"{path}/-", "value": item}]
    return [{"op": "add", "path": path, "value": [item]}]


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
