"""Other programs that advertise the same GPUs on this node: running beside one would give a GPU away twice."""

import logging
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aimgpu.domain import Device, Vendor
from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.vocabulary.custom_resources import COMPUTE_MODES

log = logging.getLogger(__name__)

VENDOR_DRIVERS = {"gpu.nvidia.com": Vendor.NVIDIA, "gpu.amd.com": Vendor.AMD}
VENDOR_SOCKETS = {Vendor.NVIDIA: ("nvidia-*.sock",), Vendor.AMD: ("amd.com_*", "amd-*.sock")}
VENDOR_RESOURCES = {
    Vendor.NVIDIA: ("nvidia.com/gpu", "nvidia.com/mig-"),
    Vendor.AMD: ("amd.com/gpu", *(f"amd.com/{mode.lower()}_" for mode in COMPUTE_MODES)),  # amd.com/cpx_nps4
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another program that offers a vendor's GPUs."""

    vendor: Vendor
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenOffers:
    """What the API shows of who offers GPUs here."""

    node: Mapping[str, Any]
    drivers: Collection[str]  # DRA drivers that publish devices of the node


def find_conflicts(offers: SeenOffers, devices: Iterable[Device], own: set[str]) -> list[Rival]:
    """What else offers GPUs of these vendors here. `own`: extended resources that we advertise."""
    vendors = {device.vendor for device in devices}
    return [
        *advertised_resources(offers.node, vendors, own),
        *(
            Rival(vendor=VENDOR_DRIVERS[driver], text=f"the DRA driver {driver} publishes devices of this node")
            for driver in sorted(offers.drivers)
            if VENDOR_DRIVERS.get(driver) in vendors
        ),
    ]


def advertised_resources(node: Mapping[str, Any], vendors: set[Vendor], own: set[str]) -> list[Rival]:
    """Extended resources of other device plugins in the node's status; one of a plugin that is gone stays there as zero."""
    capacity = (node.get("status") or {}).get("allocatable") or {}
    return [
        Rival(vendor=vendor, text=f"another device plugin advertises {name} on this node")
        for name, count in sorted(capacity.items())
        for vendor in vendors
        if name not in own and name.startswith(VENDOR_RESOURCES[vendor]) and parse_quantity(count) > 0
    ]


def find_rival_sockets(kubelet: Path, devices: Iterable[Device]) -> list[Rival]:
    """Vendors' device plugins by their sockets: a resource of the same name in the node's status could be ours."""
    folder = kubelet / "device-plugins"
    return [
        Rival(vendor=vendor, text=f"a vendor's device plugin listens on {path}")
        for vendor in sorted({device.vendor for device in devices})
        for pattern in VENDOR_SOCKETS[vendor]
        for path in sorted(folder.glob(pattern))
        if _answers(path)
    ]


@dataclass(slots=True, kw_only=True)
class RivalWatch:
    """Notices a rival that comes after our start. `found`: those seen twice running, as what a plugin leaves behind fades."""

    kubelet: Path
    found: tuple[Rival, ...] = ()
    _seen: frozenset[Rival] = frozenset()
    _own: set[str] = field(default_factory=set)  # ever advertised by us: the node's status shows a name for a while

    def look(self, offers: SeenOffers, devices: Sequence[Device], own: set[str]) -> None:
        self._own |= own
        now = find_conflicts(offers, devices, self._own)
        now += find_rival_sockets(self.kubelet, devices) if own else []
        found = tuple(rival for rival in now if rival in self._seen)
        if found != self.found:
            texts = [rival.text for rival in found]
            log.warning("gpus.offered_by_others", extra={"data": {"rivals": texts}})
        self._seen, self.found = frozenset(now), found

    @property
    def vendors(self) -> frozenset[Vendor]:
        return frozenset(rival.vendor for rival in self.found)


def _answers(path: Path) -> bool:
    """A socket file without a listener is left over."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
