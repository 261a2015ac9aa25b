"""Objects as an API server keeps them after server-side apply: with the fields that the manager applied."""

import copy
import json
from typing import Any

from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.kubernetes.models.serving.engine_container import ServingImages
from aimgpu.kubernetes.models.serving.manifests import RenderOptions, render_model

ASSOCIATIVE = {"containers": ("name",), "volumes": ("name",), "ports": ("containerPort", "protocol"), "env": ("name",)}


def rendered(entry: str, kind: str = "Deployment", **options: Any) -> dict[str, Any]:
    """What `up` applies for the model chat with this entry of a stack file."""
    (deployment,) = parse_stack(f"models: {{chat: {entry}}}").deployments
    images = ServingImages(own="own:1", vendor="amd")
    manifests = render_model(deployment, RenderOptions(images=images, as_inference_services=kind != "Deployment", **options))
    return next(one for one in manifests if one["kind"] == kind)


def applied(manifest: dict[str, Any], *, namespace: str = "team", manager: str = "aimgpu") -> dict[str, Any]:
    """As it is kept, with a port's default and what others wrote into it."""
    item = copy.deepcopy(manifest)
    for container in _containers(item):
        for port in container.get("ports") or ():
            port.setdefault("protocol", "TCP")
    fields = fields_of({key: value for key, value in item.items() if key not in ("apiVersion", "kind")})
    fields["f:metadata"].pop("f:name", None)
    item["metadata"] |= {"namespace": namespace, "uid": "u-1", "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}
    item["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
    item["metadata"]["managedFields"] = [
        {"manager": "kube-controller-manager", "operation": "Update", "fieldsV1": {"f:status": {}}, "subresource": "status"},
        {"manager": manager, "operation": "Apply", "apiVersion": item["apiVersion"], "fieldsV1": fields},
    ]
    item["spec"]["progressDeadlineSeconds"] = 600
    return item


def fields_of(value: Any, name: str = "") -> dict[str, Any]:
    """The fieldsV1 of what was applied: maps and associative lists by their members, everything else as one value."""
    if isinstance(value, dict):
        return {f"f:{key}": fields_of(below, key) for key, below in value.items()}
    if isinstance(value, list) and name in ASSOCIATIVE:
        keys = [json.dumps({key: one[key] for key in ASSOCIATIVE[name]}) for one in value]
        return {f"k:{key}": {".": {}, **fields_of(one)} for key, one in zip(keys, value, strict=True)}
    return {}


def _containers(item: dict[str, Any]) -> list[dict[str, Any]]:
    spec = item["spec"].get("predictor") or item["spec"]["template"]["spec"]
    found: list[dict[str, Any]] = spec["containers"]
    return found
