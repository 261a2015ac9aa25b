"""The custom resources of group aim.amd.com, as the chart installs them. Versions are served side by side when they change."""

from typing import Any

from aimgpu.hardware.amd.modes import are_compatible
from aimgpu.kubernetes.api.client import Resource
from aimgpu.kubernetes.vocabulary.names import GROUP

VERSION = "v1alpha1"
GPU_NODES = Resource(group=GROUP, version=VERSION, plural="gpunodes")
GPU_SHARES = Resource(group=GROUP, version=VERSION, plural="gpushares", namespaced=True)
PARTITION_PLANS = Resource(group=GROUP, version=VERSION, plural="partitionplans")

PHASES = ("Pending", "Draining", "Applying", "WaitingForDriver", "Verifying", "Succeeded", "Failed")
APPLIERS = ("Agent", "DeviceConfigManager")
COMPUTE_MODES = ("SPX", "DPX", "TPX", "QPX", "CPX")
MEMORY_MODES = ("NPS1", "NPS2", "NPS4")
_GFX_TARGETS = (90402, 90500)

_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "format": "int64"}
_NUMBER: dict[str, Any] = {"type": "number"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_OPEN: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def custom_resource_definitions() -> list[dict[str, Any]]:
    return [_gpu_node(), _gpu_share(), _partition_plan()]


def possible_layouts() -> list[tuple[str, str]]:
    """Compute and memory modes that some GPU takes together; the schema refuses every other pair."""
    return [
        (compute, memory)
        for compute in COMPUTE_MODES
        for memory in MEMORY_MODES
        if any(are_compatible(compute, memory, target) for target in _GFX_TARGETS)
    ]


def _gpu_node() -> dict[str, Any]:
    partition = _object({"id": _TEXT, "memoryBytes": _COUNT, "grantedBytes": _COUNT})
    gpu = _object(
        {
            "id": _TEXT,
            "index": _COUNT,
            "product": _TEXT,
            "vendor": _TEXT,
            "memoryBytes": _COUNT,
            "layout": _TEXT,
            "layouts": {"type": "array", "items": _TEXT},
            "computeMode": _TEXT,
            "memoryMode": _TEXT,
            "partitions": {"type": "array", "items": partition},
            "simulated": _FLAG,
            "unhealthy": _TEXT,
        }
    )
    wanted = _object({"gpu": _TEXT, "layout": _TEXT, "plan": _TEXT}, required=("gpu", "layout"))
    spec = _object({"layouts": {"type": "array", "items": wanted}})
    status = _object(
        {
            "gpus": {"type": "array", "items": gpu},
            "resources": {"type": "array", "items": _offered()},
            "heldReplicas": {"type": "array", "items": _held(), "description": "Replicas that pods hold, at most 512"},
            "products": _TEXT,
            "layoutNames": _TEXT,
            "memoryGranted": _TEXT,
            "conditions": _conditions(),
            "observedGeneration": _COUNT,
        }
    )
    columns = [("GPUs", ".status.products"), ("Layouts", ".status.layoutNames"), ("Granted", ".status.memoryGranted")]
    return _definition("GpuNode", "gpunode", scope="Cluster", spec=spec, status=status, columns=columns)


def _offered() -> dict[str, Any]:
    """What the device plugin offers: replicas that are alike."""
    return _object(
        {
            "name": _TEXT,
            "replicas": _COUNT,
            "memoryBytes": _COUNT,
            "partitionBytes": _COUNT,
            "shared": _FLAG,
            "mostPerContainer": _COUNT,
            "isolation": _TEXT,
            "computeMode": _TEXT,
            "memoryMode": _TEXT,
        }
    )


def _held() -> dict[str, Any]:
    """A replica of the device plugin and the pod that has it."""
    return _object(
        {
            "namespace": _TEXT,
            "pod": _TEXT,
            "resource": _TEXT,
            "partition": _TEXT,
            "memoryBytes": _COUNT,
            "level": {**_TEXT, "description": "Of enforcement: hardware, driver, runtime, advisory or none"},
        }
    )


def _gpu_share() -> dict[str, Any]:
    info = _object(
        {
            "partitionId": {**_TEXT, "description": "The partition; the published device until the node has prepared it"},
            "computeMode": _TEXT,
            "memoryMode": _TEXT,
            "partitionSizeGB": _NUMBER,
            "allocatedMemoryGB": {**_NUMBER, "description": "Of the partition, to this claim or replica"},
            "availableMemoryGB": {**_NUMBER, "description": "Of the partition, to nobody"},
        }
    )
    info["description"] = "What is not known is left out"
    replica = _object(
        {
            "pod": _TEXT,
            "node": _TEXT,
            "claim": {**_TEXT, "description": "The ResourceClaim: admission's, the pod's own, or that of a plain limit"},
            "resource": {**_TEXT, "description": "The extended resource, where the device plugin gave it"},
            "gpu": _TEXT,
            "level": {**_TEXT, "description": "Of enforcement: hardware, driver, runtime, advisory or none"},
            "simulated": _FLAG,
            "problem": {**_TEXT, "description": "Why the node does not prepare it"},
            "partitionInfo": info,
        }
    )
    workload = _object({"kind": _TEXT, "name": _TEXT}, required=("kind", "name"))
    status = _object(
        {
            "partitionInfo": info,
            "level": _TEXT,
            "replicas": {"type": "array", "items": replica, "description": "A row per device of each pod that has one"},
            "conditions": _conditions(),
        }
    )
    columns = [
        ("Workload", ".spec.workload.name"),
        ("Partition", ".status.partitionInfo.partitionId"),
        ("Allocated GB", ".status.partitionInfo.allocatedMemoryGB"),
        ("Level", ".status.level"),
        ("Allocated", '.status.conditions[?(@.type=="PartitionAllocated")].status'),
    ]
    spec = _object({"workload": workload}, required=("workload",))
    return _definition("GpuShare", "gpushare", scope="Namespaced", spec=spec, status=status, columns=columns)


def _partition_plan() -> dict[str, Any]:
    columns = [("Phase", ".status.phase"), ("Message", ".status.message")]
    spec, status = _plan_spec(), _plan_status()
    return _definition("PartitionPlan", "partitionplan", scope="Cluster", spec=spec, status=status, columns=columns)


def _plan_spec() -> dict[str, Any]:
    layout = _object(
        {
            "computeMode": {**_TEXT, "enum": list(COMPUTE_MODES)},
            "memoryMode": {**_TEXT, "enum": list(MEMORY_MODES)},
            "mig": {**_TEXT, "description": "For NVIDIA: instances such as 3g.71gb+3g.71gb"},
        }
    )
    pairs = " || ".join(
        f"(self.computeMode == '{compute}' && self.memoryMode == '{memory}')" for compute, memory in possible_layouts()
    )
    layout["x-kubernetes-validations"] = [
        {"rule": "has(self.mig) != has(self.computeMode)", "message": "give either computeMode (AMD) or mig (NVIDIA)"},
        {
            "rule": f"!has(self.computeMode) || !has(self.memoryMode) || {pairs}",
            "message": "no GPU can have these compute and memory modes together",
        },
    ]
    spec = _object(
        {
            "nodeSelector": {"type": "object", "additionalProperties": _TEXT},
            "gpus": {"type": "array", "items": _COUNT, "description": "Indexes; left out: all"},
            "layout": layout,
            "maxParallel": {**_COUNT, "minimum": 1, "default": 1},
            "dryRun": {**_FLAG, "default": False},
            "drainTimeoutSeconds": {**_COUNT, "minimum": 1, "default": 600},
            "applier": {
                **_TEXT,
                "enum": list(APPLIERS),
                "description": "Who changes the layout: our node agent, or AMD's Device Config Manager; never both",
            },
            "profile": {**_TEXT, "description": "Of the Device Config Manager; left out: such as cpx_nps4_all"},
            "auto": {
                **_object(
                    {
                        "policy": {**_TEXT, "enum": ["Propose", "Apply"], "default": "Propose"},
                        "minPendingSeconds": {**_COUNT, "minimum": 0, "default": 60},
                    }
                ),
                "description": "Find the layout from pods that wait: by annotation, claim, or limit of a GPU or partition",
            },
        },
    )
    spec["x-kubernetes-validations"] = [
        {
            "rule": "has(self.layout) != has(self.auto)",
            "message": "give either layout, or auto to find it from pending pods",
        }
    ]
    return spec


def _plan_status() -> dict[str, Any]:
    proposal = _object(
        {
            "node": _TEXT,
            "gpus": {"type": "array", "items": _COUNT},
            "layout": _TEXT,
            "pods": {"type": "array", "items": _TEXT},
        }
    )
    node = _object(
        {
            "name": _TEXT,
            "phase": {**_TEXT, "enum": list(PHASES)},
            "message": _TEXT,
            "before": _OPEN,
            "profileBefore": _TEXT,
            "since": _TEXT,
        }
    )
    return _object(
        {
            "phase": {**_TEXT, "enum": list(PHASES)},
            "message": _TEXT,
            "nodes": {"type": "array", "items": node},
            "evictions": {"type": "array", "items": _TEXT},
            "proposals": {"type": "array", "items": proposal},
            "observedGeneration": _COUNT,
            "conditions": _conditions(),
        }
    )


def _definition(  # noqa: PLR0913 - what a definition is made of
    kind: str, singular: str, *, scope: str, spec: dict[str, Any], status: dict[str, Any], columns: list[tuple[str, str]]
) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"spec": spec, "status": status}}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [{"name": name, "type": "string", "jsonPath": path} for name, path in columns],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.{GROUP}", "labels": {"app.kubernetes.io/part-of": "aim-gpu-sharing"}},
        "spec": {
            "group": GROUP,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": f"{singular}s", "singular": singular},
            "scope": scope,
            "versions": [version],
        },
    }


def _object(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        found["required"] = list(required)
    return found


def _conditions() -> dict[str, Any]:
    condition = _object(
        {
            "type": _TEXT,
            "status": {**_TEXT, "enum": ["True", "False", "Unknown"]},
            "reason": _TEXT,
            "message": _TEXT,
            "lastTransitionTime": {**_TEXT, "format": "date-time"},
        },
        required=("type", "status"),
    )
    return {"type": "array", "items": condition, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
