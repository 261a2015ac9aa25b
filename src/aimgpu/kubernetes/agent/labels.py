"""Labels of the node: ours, and those that operators and manifests already select on. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence

from aimgpu.domain import Device, Vendor
from aimgpu.kubernetes import names
from aimgpu.units import MIB

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST = 63
OWNED = (
    names.LABEL_MANAGED,
    names.LABEL_COUNT,
    names.LABEL_PRODUCT,
    names.LABEL_MEMORY_MIB,
    names.LABEL_SIMULATED,
    "nvidia.com/gpu.count",
    "nvidia.com/gpu.product",
    "nvidia.com/gpu.memory",
    "nvidia.com/gpu.replicas",
    "nvidia.com/gpu.sharing-strategy",
    "amd.com/gpu.product-name",
    "amd.com/gpu.vram",
    "amd.com/gpu.compute-memory-partition",
    "amd.com/gpu.compute-partitioning-supported",
    "amd.com/gpu.memory-partitioning-supported",
    "amd.com/gpu.replicas",
)


def node_labels(devices: Sequence[Device], replicas: Mapping[Vendor, int]) -> dict[str, str]:
    """`replicas`: how many pods the device plugin lets share a GPU of a vendor; none: it does not share."""
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
    labels |= _nvidia([device for device in devices if device.vendor is Vendor.NVIDIA], replicas.get(Vendor.NVIDIA))
    labels |= _amd([device for device in devices if device.vendor is Vendor.AMD], replicas.get(Vendor.AMD))
    return labels


def label_changes(current: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """A merge patch: what differs, and None for labels of ours that are to go."""
    changes: dict[str, str | None] = {name: value for name, value in wanted.items() if current.get(name) != value}
    return changes | {name: None for name in OWNED if name in current and name not in wanted}


def _nvidia(devices: Sequence[Device], replicas: int | None) -> dict[str, str]:
    if not devices:
        return {}
    suffix = "-SHARED" if replicas and replicas > 1 else ""
    labels = {
        "nvidia.com/gpu.count": str(len(devices)),
        "nvidia.com/gpu.product": _joined(device.market_name or device.product for device in devices) + suffix,
        "nvidia.com/gpu.memory": str(min(device.memory_bytes for device in devices) // MIB),
    }
    if replicas is not None:
        labels["nvidia.com/gpu.replicas"] = str(replicas)
        labels["nvidia.com/gpu.sharing-strategy"] = "time-slicing" if replicas > 1 else "none"
    return labels


def _amd(devices: Sequence[Device], replicas: int | None) -> dict[str, str]:
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
    if replicas is not None:
        labels["amd.com/gpu.replicas"] = str(replicas)
    return labels


def _joined(texts: Iterable[str]) -> str:
    return _safe("_".join(sorted(set(texts))))


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text)[:_LONGEST].strip("-_.")


def _flag(value: bool) -> str:  # noqa: FBT001 - its only argument
    return "true" if value else "false"
