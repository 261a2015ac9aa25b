"""One look at the node's GPUs: what they are, what is wrong with them, and what the driver should publish. Blocking."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from aimgpu.domain import Device, DeviceUsage, Level, Vendor
from aimgpu.errors import AimGpuError
from aimgpu.hardware.protocols import Hardware
from aimgpu.isolation.protocols import Isolator
from aimgpu.kubernetes.node.agent.wiring import read_driver_version
from aimgpu.kubernetes.node.dra_driver.candidates import GpuCandidates, list_candidates
from aimgpu.kubernetes.node.dra_driver.resource_slices import GpuState
from aimgpu.kubernetes.node.health import Inventory, foreign_devices
from aimgpu.kubernetes.node.layouts import NodeLayouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    devices: tuple[Device, ...]  # those that are lost included, as last seen
    candidates: tuple[GpuCandidates, ...]
    states: dict[str, GpuState]
    usages: tuple[DeviceUsage, ...]
    withheld: frozenset[str] = frozenset()  # GPUs that another program offers

    @classmethod
    def of(cls, devices: tuple[Device, ...]) -> Self:
        """Before the first look: GPUs of which nothing else is known."""
        return cls(devices=devices, candidates=(), states={}, usages=())

    def withholding(self, vendors: Collection[Vendor]) -> Self:
        """With the GPUs of these vendors given to no further pod."""
        names = frozenset(device.id for device in self.devices if device.vendor in vendors)
        states = {name: replace(state, foreign=state.foreign or name in names) for name, state in self.states.items()}
        return replace(self, states=states, withheld=names)

    @property
    def unhealthy(self) -> dict[str, str]:
        return {name: state.unhealthy for name, state in self.states.items() if state.unhealthy}


@dataclass(slots=True, kw_only=True)
class Surveyor:
    hardware: Hardware
    isolator: Isolator
    layouts: NodeLayouts
    sysfs: Path
    _inventory: Inventory = field(default_factory=Inventory)

    def look(self, pods: frozenset[str]) -> Survey:
        """`pods`: those that hold a claim of ours; any other user of a GPU is foreign."""
        findings = self.hardware.inspect()
        unhealthy = self._inventory.update(self.hardware.read_devices(), findings)
        usages = self._usages()
        foreign = foreign_devices(usages, pods)
        devices = tuple(self._inventory.known.values())
        return Survey(
            devices=devices,
            candidates=tuple(list_candidates(device, repartition=self.layouts.allowed) for device in devices),
            states={device.id: self._state(device, unhealthy.get(device.id), device.id in foreign) for device in devices},
            usages=usages,
        )

    def _usages(self) -> tuple[DeviceUsage, ...]:
        try:
            return self.hardware.read_usage()
        except AimGpuError:
            return ()  # the findings say why

    def _state(self, device: Device, unhealthy: str | None, foreign: bool) -> GpuState:  # noqa: FBT001 - one fact of several
        partition = device.layout.partitions[0] if device.layout.partitions else None
        return GpuState(
            shared_level=self._level(device, exclusive=False) if partition else Level.NONE,
            exclusive_level=self._level(device, exclusive=True) if partition else Level.NONE,
            driver_version=read_driver_version(device.vendor.value, self.sysfs),
            pcie_root=pcie_root(device, self.sysfs),
            numa_node=numa_node(device, self.sysfs),
            unhealthy=unhealthy,
            foreign=foreign,
            repartitioning=device.id in self.layouts.changing,
        )

    def _level(self, device: Device, *, exclusive: bool) -> Level:
        levels = self.isolator.available_levels(device, device.layout.partitions[0], exclusive=exclusive)
        return max(levels, key=lambda level: level.rank, default=Level.NONE)


def pci_folder(device: Device, sysfs: Path, proc: Path = Path("/proc")) -> Path | None:
    """The GPU's folder in sysfs, by the render node of its first partition, or by what NVIDIA's driver says of its UUID."""
    node = next((part.render_node for part in device.layout.partitions if part.render_node), None)
    if node is not None:
        folder = (sysfs / "class" / "drm" / Path(node).name / "device").resolve()
    elif (address := _nvidia_address(device.id, proc)) is not None:
        folder = (sysfs / "bus" / "pci" / "devices" / address).resolve()
    else:
        return None
    return folder if folder.exists() else None


def _nvidia_address(uuid: str, proc: Path) -> str | None:
    """``0000:04:00.0``, from the lines ``GPU UUID: GPU-...`` of the driver's files, one for each GPU."""
    for path in sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information")):
        try:
            facts = dict(line.partition(":")[::2] for line in path.read_text().splitlines())
        except OSError:
            continue
        if facts.get("GPU UUID", "").strip() == uuid:
            return path.parent.name
    return None


def pcie_root(device: Device, sysfs: Path, proc: Path = Path("/proc")) -> str | None:
    """``pci0000:00``: devices below one root can be matched in a claim."""
    folder = pci_folder(device, sysfs, proc)
    return next((part for part in folder.parts if part.startswith("pci0")), None) if folder else None


def numa_node(device: Device, sysfs: Path, proc: Path = Path("/proc")) -> int | None:
    folder = pci_folder(device, sysfs, proc)
    try:
        number = int((folder / "numa_node").read_text()) if folder else -1
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None
