"""The ResourceClaimTemplate for a GpuRequest. Equal requests share one template, named by its content."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.api.quantities import format_quantity
from aimgpu.kubernetes.cluster.admission.inventory import ProductMemory
from aimgpu.kubernetes.vocabulary import names
from aimgpu.kubernetes.vocabulary.annotations import FRACTION, MODEL, GpuRequest
from aimgpu.units import MIB, PPM

REQUEST = "gpu"
_MOST_ALTERNATIVES = 8  # of a request, as the API server checks
_ATTRIBUTES = f"device.attributes['{names.DRIVER}']"


def claim_template(
    request: GpuRequest, products: Sequence[ProductMemory], namespace: str, model: str | None = None
) -> dict[str, Any]:
    """`model`: what the claim's pods serve. Raises InvalidInput for a fraction where no GPU is known that it could be of."""
    return _template({"devices": _devices(request, products)}, namespace, model)


def _template(spec: dict[str, Any], namespace: str, model: str | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"labels": dict(names.MANAGED_BY)}
    if model is not None:
        metadata["annotations"] = {MODEL: model}  # which the node agent reports in its metrics
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": _name(spec, model), "namespace": namespace, "labels": dict(names.MANAGED_BY)},
        "spec": {"metadata": metadata, "spec": spec},
    }


def seat_template(request: GpuRequest, namespace: str, model: str | None = None) -> dict[str, Any]:
    """For a pod that KAI-Scheduler places. Raises InvalidInput for partitions, which KAI does not know."""
    if request.wants_partition:
        raise InvalidInput(
            "KAI-Scheduler places no partitions, and the pod asks for one",
            hint="Remove aim.amd.com/compute-mode and memory-mode, or leave schedulerName to kube-scheduler.",
        )
    devices = {"requests": [{"name": REQUEST, "exactly": {"deviceClassName": names.SEAT_CLASS}}], **_config(request)}
    return _template({"devices": devices}, namespace, model)


def _name(spec: dict[str, Any], model: str | None) -> str:
    content = json.dumps(spec, sort_keys=True) + (model or "")
    digest = hashlib.sha256(content.encode()).hexdigest()
    return f"aim-gpu-{digest[:16]}"


def _devices(request: GpuRequest, products: Sequence[ProductMemory]) -> dict[str, Any]:
    if request.devices > 1 and request.fraction_ppm is not None and len(products) > 1:
        return _mixed_devices(request, products)
    devices: dict[str, Any] = {"requests": [_request(request, products)]}
    if request.devices > 1:  # shares of one GPU would be taken otherwise
        devices["constraints"] = [{"requests": [REQUEST], "distinctAttribute": f"{names.DRIVER}/gpu"}]
    return devices | _config(request)


def _mixed_devices(request: GpuRequest, products: Sequence[ProductMemory]) -> dict[str, Any]:
    """A request for each GPU, so that a node with GPUs of two sizes can give one of each. Together they are one tenant."""
    one = _request(replace(request, devices=1), products)
    asked = [f"{REQUEST}-{number}" for number in range(request.devices)]
    return {
        "requests": [{**one, "name": name} for name in asked],
        "constraints": [{"requests": asked, "distinctAttribute": f"{names.DRIVER}/gpu"}],
        **_config(request, asked, limits="claim"),
    }


def _config(request: GpuRequest, requests: Sequence[str] = (REQUEST,), limits: str | None = None) -> dict[str, Any]:
    parameters = {
        "isolation": request.isolation.value if request.isolation else None,
        "priority": request.priority.value if request.priority else None,
        "limits": limits,
    }
    given = {name: value for name, value in parameters.items() if value is not None}
    if not given:
        return {}
    body = {"apiVersion": names.PARAMETERS_VERSION, "kind": names.PARAMETERS_KIND, **given}
    return {"config": [{"requests": list(requests), "opaque": {"driver": names.DRIVER, "parameters": body}}]}


def _request(request: GpuRequest, products: Sequence[ProductMemory]) -> dict[str, Any]:
    if request.fraction_ppm is None:
        memory = None if request.memory_mib is None else request.memory_mib * MIB
        return {"name": REQUEST, "exactly": _exactly(request, memory, None)}
    if not products:
        raise InvalidInput(
            f"{FRACTION}: no GPU that can be shared is known in this cluster, so there is nothing to take a fraction of",
            hint="Check that the node agent runs (`kubectl get resourceslices`), or ask for gpu-memory.",
        )
    if len(products) > _MOST_ALTERNATIVES:
        known = ", ".join(dict.fromkeys(item.product for item in products))
        raise InvalidInput(
            f"{FRACTION}: {len(products)} sizes of GPUs are in this cluster ({known}), more than one claim can name",
            hint="Ask for gpu-memory, or narrow it down with aim.amd.com/compute-mode.",
        )
    alternatives = [_exactly(request, _part(item.memory_bytes, request.fraction_ppm), item) for item in products]
    if len(alternatives) == 1:
        return {"name": REQUEST, "exactly": alternatives[0]}
    return {"name": REQUEST, "firstAvailable": [{"name": f"size{n}", **each} for n, each in enumerate(alternatives)]}


def _part(total_bytes: int, ppm: int) -> int:
    """Rounded down to whole MiB, so that two halves fit."""
    return max(total_bytes * ppm // PPM // MIB, 1) * MIB


def _exactly(request: GpuRequest, memory_bytes: int | None, product: ProductMemory | None) -> dict[str, Any]:
    shared = memory_bytes is not None
    found: dict[str, Any] = {"deviceClassName": _class(request, shared=shared)}
    if request.devices > 1:
        found["count"] = request.devices
    selectors = list(_selectors(request, product))
    if selectors:
        found["selectors"] = [{"cel": {"expression": expression}} for expression in selectors]
    capacity = {}
    if memory_bytes is not None:
        capacity[names.MEMORY] = format_quantity(memory_bytes)
    if request.compute_percent is not None and shared:
        capacity[names.COMPUTE] = str(request.compute_percent)
    if capacity:
        found["capacity"] = {"requests": capacity}
    return found


def _class(request: GpuRequest, *, shared: bool) -> str:
    if shared:
        return names.SHARED_PARTITION_CLASS if request.wants_partition else names.SHARED_CLASS
    return names.WHOLE_CLASS if request.compute_mode == "SPX" else names.PARTITION_CLASS


def _selectors(request: GpuRequest, product: ProductMemory | None) -> list[str]:
    expressions = []
    if product is not None:
        expressions.append(f"{_ATTRIBUTES}.productName == '{product.product}'")
        memory = format_quantity(product.memory_bytes)
        expressions.append(f"device.capacity['{names.DRIVER}'].{names.MEMORY}.compareTo(quantity('{memory}')) == 0")
    if request.compute_mode is not None:
        expressions.append(f"{_ATTRIBUTES}.computeMode == '{request.compute_mode}'")
    if request.memory_mode is not None:
        expressions.append(f"{_ATTRIBUTES}.memoryMode == '{request.memory_mode}'")
    return expressions
