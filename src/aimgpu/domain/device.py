"""Devices, the layouts they can have, and the partitions a layout gives."""

from dataclasses import dataclass
from enum import StrEnum

from aimgpu.domain.slices import SliceProfile


class Vendor(StrEnum):
    AMD = "amd"
    NVIDIA = "nvidia"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A part of a device that the hardware enforces; an unpartitioned device is one partition.

    `id` is `<device id>/<kind>-<index>`, so the same bytes under another layout have another id and a stale grant shows.
    """

    id: str
    device_id: str
    index: int
    kind: str  # "spx", "cpx", "whole", "1g.18gb": lower case, what `gpu: {partition: ...}` names
    memory_bytes: int
    compute_units: int | None = None
    start: int | None = None  # MIG: first memory slice of the placement
    uuid: str | None = None  # what the runtime selects it by, where the device reports it
    render_node: str | None = None  # AMD: /dev/dri/renderD...
    capped: bool = True  # False: its neighbours on the device may take of its memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The modes of a device and the partitions that they give."""

    name: str  # "SPX/NPS1", "CPX/NPS4", "whole", "1g.18gb@0+3g.71gb@4"
    compute_mode: str | None
    memory_mode: str | None
    partitions: tuple[Partition, ...]

    @property
    def memory_bytes(self) -> int:
        return sum(partition.memory_bytes for partition in self.partitions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A physical GPU, as read: its current layout, and those it can have."""

    id: str  # stable: unique id, BDF or UUID; "sim-mi300x-0"
    index: int  # position on its node, for people; not stable
    vendor: Vendor
    product: str  # "MI300X", "H200-141"
    market_name: str | None
    memory_bytes: int  # that can be given away
    compute_units: int | None
    layout: Layout
    layouts: tuple[Layout, ...]  # legal, the current one included
    hive: str | None = None  # devices that must share one memory mode
    pending_memory_mode: str | None = None  # asked for, not in effect before a driver reload
    simulated: bool = False
    software: bool = False  # simulated by the software GPU's driver: programs run on it, and limits hold
    profiles: tuple[SliceProfile, ...] = ()  # MIG: any legal set of these can be asked for by name, listed or not
    reserved_bytes: int | None = None  # kept by the driver and not part of `memory_bytes`, where it reports them

    @property
    def kind_note(self) -> str:
        """The suffix of its name where it is not a card, with a space before it."""
        return " (software GPU)" if self.software else " (simulated)" if self.simulated else ""

    def partition(self, partition_id: str) -> Partition | None:
        """The partition of the current layout with this id."""
        return next((part for part in self.layout.partitions if part.id == partition_id), None)
