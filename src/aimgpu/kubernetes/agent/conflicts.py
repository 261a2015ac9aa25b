"""Other programs that advertise the same GPUs on this node: running beside one would give a GPU away twice."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aimgpu.domain import Device, Vendor
from aimgpu.kubernetes.api_client import Client, Resource
from aimgpu.kubernetes.quantities import parse_quantity

SLICES = Resource(group="resource.k8s.io", version="v1", plural="resourceslices")
VENDOR_DRIVERS = {"gpu.nvidia.com": Vendor.NVIDIA, "gpu.amd.com": Vendor.AMD}
VENDOR_SOCKETS = ("nvidia-*.sock", "amd.com_*", "amd-*.sock")
VENDOR_RESOURCES = {
    Vendor.NVIDIA: ("nvidia.com/gpu", "nvidia.com/mig-"),
    Vendor.AMD: ("amd.com/gpu", "amd.com/cpx", "amd.com/dpx"),
}


async def find_conflicts(client: Client, node: Mapping[str, Any], devices: tuple[Device, ...], own: set[str]) -> list[str]:
    """What else offers GPUs of these vendors here, one sentence each. `own`: extended resources that we advertise."""
    vendors = {device.vendor for device in devices}
    found = advertised_resources(node, vendors, own)
    if await client.serves("resource.k8s.io/v1"):
        slices, _ = await client.list(SLICES, fields=f"spec.nodeName={node['metadata']['name']}")
        drivers = sorted({item["spec"]["driver"] for item in slices if item["spec"].get("devices")})
        found += [
            f"the DRA driver {driver} publishes devices of this node"
            for driver in drivers
            if VENDOR_DRIVERS.get(driver) in vendors
        ]
    return found


def advertised_resources(node: Mapping[str, Any], vendors: set[Vendor], own: set[str]) -> list[str]:
    """Extended resources of other device plugins in the node's status; one of a plugin that is gone stays there as zero."""
    capacity = (node.get("status") or {}).get("allocatable") or {}
    return [
        f"another device plugin advertises {name} on this node"
        for name, count in sorted(capacity.items())
        if name not in own
        and parse_quantity(count) > 0
        and any(name.startswith(VENDOR_RESOURCES[vendor]) for vendor in vendors)
    ]


def find_rival_sockets(kubelet: Path) -> list[str]:
    """Vendors' device plugins by their sockets: a resource of the same name in the node's status could be ours."""
    folder = kubelet / "device-plugins"
    found = sorted(path.name for pattern in VENDOR_SOCKETS for path in folder.glob(pattern) if _answers(path))
    return [f"a vendor's device plugin listens on {folder / name}" for name in found]


def _answers(path: Path) -> bool:
    """A socket file without a listener is left over."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
