"""Labels of the node: ours, and those that operators and manifests already select on. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aimgpu.domain import Device, Vendor
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, replicas_per_gpu
from aimgpu.kubernetes.vocabulary import names
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig
from aimgpu.units import MIB

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSharing:
    """How the device plugin shares the GPUs of a vendor."""

    replicas: int  # of one GPU or partition
    mps: bool = False
    renamed: bool = False  # nvidia.com/gpu.shared: who asks for nvidia.com/gpu gets none of it


def plugin_sharing(resources: Sequence[NodeResource], config: SharingConfig) -> dict[Vendor, PluginSharing]:
    """Of the vendors that have a resource."""
    found = {}
    for vendor in Vendor:
        replicas = replicas_per_gpu(resources, vendor)
        if replicas is not None:
            rules = [rule for rule in config.replicated if rule.name.startswith(f"{vendor.value}.com/")]
            renamed = bool(rules) and all(rule.rename is not None for rule in rules)
            found[vendor] = PluginSharing(replicas=replicas, mps=config.mps, renamed=renamed)
    return found


def node_labels(devices: Sequence[Device], sharing: Mapping[Vendor, PluginSharing]) -> dict[str, str]:
    """`sharing`: of the vendors whose GPUs the device plugin offers."""
    if not devices:
        return {}
    labels = {
        names.LABEL_MANAGED: "true",
        names.LABEL_COUNT: str(len(devices)),
        names.LABEL_PRODUCT: _joined(device.product for device in devices),
        names.LABEL_MEMORY_MIB: str(min(device.memory_bytes for device in devices) // MIB),
    }
    if all(device.simulated for device in devices):
        labels[names.LABEL_SIMULATED] = "true"
    labels |= _nvidia([device for device in devices if device.vendor is Vendor.NVIDIA], sharing.get(Vendor.NVIDIA))
    labels |= _amd([device for device in devices if device.vendor is Vendor.AMD], sharing.get(Vendor.AMD))
    return labels


def label_changes(current: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """A merge patch: what differs, and None for labels of ours that are to go."""
    changes: dict[str, str | None] = {name: value for name, value in wanted.items() if current.get(name) != value}
    return changes | {name: None for name in names.NODE_LABELS if name in current and name not in wanted}


def _nvidia(devices: Sequence[Device], sharing: PluginSharing | None) -> dict[str, str]:
    """As NVIDIA's feature discovery 0.19 labels them."""
    if not devices:
        return {}
    shared = sharing is not None and sharing.replicas > 1
    suffix = "-SHARED" if sharing and shared and not sharing.renamed else ""
    labels = {
        "nvidia.com/gpu.count": str(len(devices)),
        "nvidia.com/gpu.product": _joined(device.market_name or device.product for device in devices) + suffix,
        "nvidia.com/gpu.memory": str(min(device.memory_bytes for device in devices) // MIB),
    }
    if sharing is not None:
        labels["nvidia.com/gpu.replicas"] = str(sharing.replicas)
        labels["nvidia.com/gpu.sharing-strategy"] = ("mps" if sharing.mps else "time-slicing") if shared else "none"
    return labels


def _amd(devices: Sequence[Device], sharing: PluginSharing | None) -> dict[str, str]:
    if not devices:
        return {}
    modes = {device.layout.name.replace("/", "_").lower() for device in devices}
    labels = {
        "amd.com/gpu.product-name": _joined(device.market_name or device.product for device in devices),
        "amd.com/gpu.vram": f"{min(device.memory_bytes for device in devices) // (1 << 30)}G",
        "amd.com/gpu.compute-partitioning-supported": _flag(any(len(device.layouts) > 1 for device in devices)),
        "amd.com/gpu.memory-partitioning-supported": _flag(
            any(len({layout.memory_mode for layout in device.layouts}) > 1 for device in devices)
        ),
    }
    if len(modes) == 1:
        labels["amd.com/gpu.compute-memory-partition"] = _safe(modes.pop())
    if sharing is not None:
        labels["amd.com/gpu.replicas"] = str(sharing.replicas)
    return labels


def _joined(texts: Iterable[str]) -> str:
    return _safe("_".join(sorted(set(texts))))


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text)[:_LONGEST].strip("-_.")


def _flag(value: bool) -> str:  # noqa: FBT001 - its only argument
    return "true" if value else "false"
