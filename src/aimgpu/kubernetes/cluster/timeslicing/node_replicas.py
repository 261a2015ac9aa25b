"""What a node should advertise under a sharing configuration, and what it does. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.api.foreign_objects import read_count
from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.cluster.timeslicing.plugin_setup import PluginKind
from aimgpu.kubernetes.vocabulary.names import LABEL_COUNT
from aimgpu.kubernetes.vocabulary.sharing_config import parse_config

_AMD_MODES = "amd.com/gpu.compute-memory-partition"  # of all GPUs of a node; not there where they differ


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplicas:
    """One resource of a node. `gpus` None: no label says how many GPUs, or partitions of them, it offers."""

    node: str
    resource: str
    replicas: int
    gpus: int | None
    allocatable: int
    uniform: bool = True  # the same number of replicas of every GPU

    @property
    def expected(self) -> int | None:
        return None if self.gpus is None else self.gpus * self.replicas

    @property
    def right(self) -> bool:
        if self.expected is not None:
            return self.allocatable == self.expected
        return self.allocatable > 0 and (not self.uniform or self.allocatable % self.replicas == 0)


def node_replicas(node: Mapping[str, Any], text: str, kind: PluginKind) -> NodeReplicas:
    """Of the first resource that the configuration divides. Raises InvalidInput where it divides none."""
    shared = parse_config(text).replicated
    if not shared:
        raise InvalidInput("the configuration has no sharing.timeSlicing.resources")
    # NVIDIA's plugin ignores `rename` of a resource, not `renameByDefault`; ours knows both.
    name = shared[0].advertised
    uniform = all(rule.devices is None for rule in shared if rule.advertised == name) or kind.name != "aim"
    metadata, status = node["metadata"], node.get("status") or {}
    return NodeReplicas(
        node=metadata["name"],
        resource=name,
        replicas=shared[0].replicas,
        gpus=_gpus(metadata.get("labels") or {}, shared[0].name, kind) if uniform else None,
        allocatable=parse_quantity((status.get("allocatable") or {}).get(name, 0)),
        uniform=uniform,
    )


def _gpus(labels: Mapping[str, str], resource: str, kind: PluginKind) -> int | None:
    if not resource.endswith("/gpu"):
        return None  # partitions: their number is not on a label
    nvidia, every = _count(labels, "nvidia.com/gpu.count"), _count(labels, LABEL_COUNT)
    if resource.startswith("nvidia"):
        return every if nvidia is None and kind.name == "aim" else nvidia
    if kind.name == "aim" and not labels.get(_AMD_MODES, "").upper().startswith("SPX"):
        return None  # our plugin offers every partition of an AMD GPU under this name
    return None if every is None else every - (nvidia or 0)  # a node may have GPUs of both vendors


def _count(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name)
    return 0 if text == "0" else read_count(text)
