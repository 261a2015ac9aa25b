"""AdmissionReviews answered: pods get claims, bad annotations are refused, whatever is not ours passes untouched. Pure."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aimgpu.domain import Footprint
from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.kubernetes.cluster.admission.claims import claim_template, seat_template
from aimgpu.kubernetes.cluster.admission.inventory import ProductMemory, PublishedGpus
from aimgpu.kubernetes.cluster.admission.pod_patch import Patch, annotate_request, patch_pod, patch_replicas
from aimgpu.kubernetes.cluster.admission.replicas import OfferedReplicas, choose_replicas_of
from aimgpu.kubernetes.vocabulary.annotations import (
    COMPUTE,
    KAI,
    MODEL,
    PRIORITY,
    SHARING,
    GpuRequest,
    containers_of,
    parse_annotations,
)
from aimgpu.kubernetes.vocabulary.model_labels import NAME, SERVED_MODEL
from aimgpu.kubernetes.vocabulary.names import GATE
from aimgpu.kubernetes.vocabulary.served_model import (
    PodModel,
    engine_words,
    find_model,
    size_model,
    takes_arguments,
)
from aimgpu.sizing import Catalogue
from aimgpu.sizing.surplus import spend_surplus
from aimgpu.units import MIB

_REFUSED = 422
_NOT_ENFORCED = "KAI-Scheduler enforces nothing, and no node agent runs with --kai: this pod can take all of its GPU"
_KV_FLAG = "--kv-cache-memory-bytes"
_SHARING_FLAGS = (_KV_FLAG, "--max-model-len", "--max-num-seqs")
_UTILIZATION = "--gpu-memory-utilization"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What becomes of a pod: a patch, and the template that its claim is made from (None: none is needed)."""

    patch: Patch
    template: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What admission knows of the cluster."""

    gpus: PublishedGpus
    catalogue: Catalogue
    replicas: OfferedReplicas = field(default_factory=OfferedReplicas)

    def products(self, request: GpuRequest, *, kai: bool = False) -> tuple[ProductMemory, ...]:
        return self.gpus.shared_products(request.compute_mode, request.memory_mode, kai=kai)


def review_pod(pod: Mapping[str, Any], namespace: str, cluster: Cluster) -> Admitted:
    """Raises InvalidInput with what is wrong with its annotations."""
    annotations, spec = _annotations(pod), pod.get("spec") or {}
    request = parse_annotations(annotations, spec)
    if request is None:
        return Admitted(patch=[])
    kai = spec.get("schedulerName") == KAI
    model = find_model(annotations, spec, request.container)
    footprint = _footprint(request, model, cluster)
    if request.sized_by_model:
        if footprint is None:
            raise InvalidInput(
                f"{SHARING}: container {request.container!r} does not say which model it serves, so its share cannot be sized",
                hint=f"Give gpu-memory (MiB) or gpu-fraction, or name the model in the annotation {MODEL}.",
            )
        request = replace(request, memory_mib=-(-footprint.total_bytes // MIB), devices=max(request.devices, _ranks(model)))
    if not kai and not cluster.gpus.published and cluster.replicas.by_name():
        return _admit_replicas(pod, request, (model, footprint), cluster)
    products = cluster.products(request, kai=kai) if kai or request.fraction_ppm is not None else ()
    # KAI-Scheduler places its pods itself, by its own annotations; the claim only brings them to the node agent.
    name = _served_name(pod) or (model.name if model is not None else None)
    template = seat_template(request, namespace, name) if kai else claim_template(request, products, namespace, name)
    if kai and not products:
        return Admitted(patch=annotate_request(pod, request), warnings=(_NOT_ENFORCED,))
    arguments, warnings = _arguments(request, model, footprint, products, spec)
    patch = patch_pod(pod, request, template["metadata"]["name"], arguments)
    if kai:
        patch += annotate_request(pod, request)
    return Admitted(patch=patch, template=template, warnings=warnings)


def gate_pod(pod: Mapping[str, Any]) -> Admitted:
    """For the placer, which takes the gate away again. The API server asks for the right pods only (`placement_conditions`)."""
    gates = (pod.get("spec") or {}).get("schedulingGates") or []
    if any(gate.get("name") == GATE for gate in gates):
        return Admitted(patch=[])
    if gates:
        return Admitted(patch=[{"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": GATE}}])
    return Admitted(patch=[{"op": "add", "path": "/spec/schedulingGates", "value": [{"name": GATE}]}])


def _served_name(pod: Mapping[str, Any]) -> str | None:
    """What callers of the model's pods write, where they have one."""
    return _annotations(pod).get(NAME) or ((pod.get("metadata") or {}).get("labels") or {}).get(SERVED_MODEL)


def _admit_replicas(
    pod: Mapping[str, Any], request: GpuRequest, served: tuple[PodModel | None, Footprint | None], cluster: Cluster
) -> Admitted:
    """Where device plugins offer replicas and no node has the DRA driver: a limit in place of a claim."""
    choice = choose_replicas_of(request, cluster.replicas.by_name())
    granted = replace(request, memory_mib=choice.memory_bytes // MIB, fraction_ppm=None)
    arguments, warnings = _arguments(granted, *served, (), pod["spec"])
    ignored = [name for name, value in ((COMPUTE, request.compute_percent), (PRIORITY, request.priority)) if value is not None]
    if ignored:
        verb = "has" if len(ignored) == 1 else "have"
        warnings += (f"{' and '.join(ignored)} {verb} no effect on replicas of the device plugin",)
    return Admitted(patch=patch_replicas(pod, request, choice, arguments), warnings=warnings)


def review_service(service: Mapping[str, Any], cluster: Cluster) -> tuple[str, ...]:
    """Check an InferenceService when it is made, rather than its pods later. Raises InvalidInput; returns warnings."""
    predictor = (service.get("spec") or {}).get("predictor") or {}
    annotations = _annotations(service) | (predictor.get("annotations") or {})
    spec, uri = _predictor_pod(predictor)
    request = parse_annotations(annotations, spec)
    if request is None or not request.sized_by_model:
        return ()
    model = find_model(annotations | ({_STORAGE: uri} if uri else {}), spec, request.container)
    if model is None:
        return ("the model cannot be read from this object; its pods are sized when they are made",)
    size_model(model, cluster.catalogue, cluster.gpus.vendor())
    return ()


_STORAGE = "internal.serving.kserve.io/storage-initializer-sourceuri"


def _predictor_pod(predictor: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The predictor's pod as far as it is known yet: its own containers, or the one of its model."""
    spec = dict(predictor)
    model = predictor.get("model")
    if isinstance(model, Mapping):
        own = {
            "name": "kserve-container",
            **{key: model[key] for key in ("args", "env", "resources", "command") if key in model},
        }
        spec["containers"] = [own, *(predictor.get("containers") or ())]
        uri = model.get("storageUri")
        return spec, str(uri) if uri else None
    return spec, None


def answer(uid: str, decide: Callable[[], Admitted]) -> dict[str, Any]:
    """The AdmissionReview that says what `decide` decided."""
    try:
        admitted = decide()
    except AimGpuError as error:
        message = error.message + (f". {error.hint}" if error.hint else "")
        return _response(uid, allowed=False, status={"code": _REFUSED, "reason": "Invalid", "message": message})
    more: dict[str, Any] = {}
    if admitted.patch:
        more = {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(admitted.patch).encode()).decode()}
    if admitted.warnings:
        more["warnings"] = list(admitted.warnings)
    return _response(uid, allowed=True, **more)


def _response(uid: str, *, allowed: bool, **more: object) -> dict[str, Any]:
    response = {"uid": uid, "allowed": allowed, **more}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _annotations(item: Mapping[str, Any]) -> dict[str, str]:
    found = (item.get("metadata") or {}).get("annotations") or {}
    return {str(key): str(value) for key, value in found.items()}


def _ranks(model: PodModel | None) -> int:
    return model.tensor_parallel if model else 1


def _footprint(request: GpuRequest, model: PodModel | None, cluster: Cluster) -> Footprint | None:
    if model is None:
        return None
    try:
        return size_model(model, cluster.catalogue, cluster.gpus.vendor())
    except InvalidInput:
        if request.sized_by_model:
            raise
        return None  # the share is given; only the engine's flags would have come of it


def _arguments(
    request: GpuRequest,
    model: PodModel | None,
    footprint: Footprint | None,
    products: Sequence[ProductMemory],
    spec: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags that keep vLLM inside its share, where the share's bytes are known before it is placed; and warnings."""
    granted = _granted_bytes(request, products)
    container: Mapping[str, Any] = next((each for each in containers_of(spec) if each.get("name") == request.container), {})
    present = {word.partition("=")[0].replace("_", "-") for word in engine_words(container)}
    held = model is not None and footprint is not None and granted is not None and takes_arguments(container)
    if _UTILIZATION in present and not held and _KV_FLAG not in present:
        raise InvalidInput(
            f"container {request.container!r} sets {_UTILIZATION}, which is a part of the GPU and not of its share",
            hint=f"Remove it, or set {_KV_FLAG}. With the model's name in the annotation {MODEL} that is added here.",
        )
    if model is None or footprint is None or not model.is_vllm or granted is None:
        return (), ()
    if granted < footprint.least_bytes:
        needed = -(-footprint.total_bytes // MIB)
        return (), (f"{model.name} needs about {needed} MiB; this share has {granted // MIB} MiB and will not start",)
    if not takes_arguments(container):
        return (), (
            f"the script of container {request.container!r} takes no arguments: vLLM cannot be held to its share by flags",
        )
    flags = spend_surplus(footprint, granted).flags
    added = tuple(f"{name}={flags[name]}" for name in flags if name in _SHARING_FLAGS and name not in present)
    ignored = f"{_UTILIZATION} of container {request.container!r} has no effect: {_KV_FLAG} holds vLLM to its share"
    return added, (ignored,) if _UTILIZATION in present else ()


def _granted_bytes(request: GpuRequest, products: Sequence[ProductMemory]) -> int | None:
    if request.memory_mib is not None:
        return request.memory_mib * MIB
    if request.fraction_ppm is not None and len({item.memory_bytes for item in products}) == 1:
        return products[0].memory_bytes * request.fraction_ppm // 1_000_000
    return None
