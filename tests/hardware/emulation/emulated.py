"""One AMD GPU as its kernel driver would present it."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from aimgpu.hardware.amd import modes
from aimgpu.hardware.amd.modes import Chip
from aimgpu.hardware.simulated.products import Product

DRM_DEVICES_EACH = 8
_FIRST_BUS = 0x05
_BUS_STEP = 0x10
_IDLE_BYTES = 297 << 20  # what an idle MI300X was seen to use


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStyle:
    """Where drivers differ."""

    xcp_separator: str = "_"  # "." in older kernels: amdgpu_xcp.3
    partition_in_high_bits: bool = False  # of location_id, as AMD's packaged driver has it
    one_unique_id: bool = False  # older drivers: all partitions of a GPU share one


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedProcess:
    """Bytes by (GPU number, partition); a process that only sees a partition has 0 there."""

    pid: int
    bytes_by_partition: Mapping[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedGpu:
    """An AMD GPU of a machine whose /sys is emulated."""

    product: Product
    number: int
    compute_mode: str = "SPX"
    memory_mode: str = "NPS1"
    hive_id: int = 0x3A1B2C3D4E5F6071
    allocation_mode: str = "CAPPING"  # or ALL: each partition may take its whole memory range
    used_bytes: int = _IDLE_BYTES
    busy_percent: int = 0

    @property
    def chip(self) -> Chip:
        """What its dies and memory are."""
        if self.product.chip is None:
            raise ValueError(f"{self.product.name} is not an AMD product")
        return self.product.chip

    @property
    def pci_device(self) -> int:
        return self.product.pci_device or 0

    @property
    def bus(self) -> int:
        return _FIRST_BUS + _BUS_STEP * self.number

    @property
    def bdf(self) -> str:
        """Its PCI address."""
        return f"0000:{self.bus:02x}:00.0"

    @property
    def unique_id(self) -> int:
        """As the kernel reports it."""
        return 0x1122334455660000 + (self.number << 8)

    @property
    def available_compute_modes(self) -> tuple[str, ...]:
        """Under the current memory mode."""
        return tuple(
            mode
            for mode in modes.compute_modes(self.chip.xccs)
            if modes.are_compatible(mode, self.memory_mode, self.chip.gfx_target)
        )

    @property
    def partition_bytes(self) -> tuple[int, ...]:
        """Memory of each partition under its present modes."""
        return modes.partition_bytes(self.compute_mode, self.memory_mode, self.chip) or ()

    @property
    def told_bytes(self) -> tuple[int, ...]:
        """What KFD says that each partition has."""
        sizes = self.partition_bytes
        sharers = len(sizes) // (modes.memory_ranges(self.memory_mode) or 1)
        return sizes if self.allocation_mode == "CAPPING" else tuple(size * sharers for size in sizes)

    def render_minor(self, partition: int) -> int:
        """Of the device file of a partition."""
        return 128 + self.number * DRM_DEVICES_EACH + partition

    def gpu_id(self, partition: int) -> int:
        """KFD's own id: a checksum, so it changes with every mode."""
        sizes = self.partition_bytes
        xccs = self.chip.xccs // len(sizes)
        size = sizes[partition]
        words = (
            0,  # device and function
            0x1002 | self.pci_device << 16,  # subsystem
            0,  # PCI domain
            self.pci_device,
            self.bus,
            size & 0xFFFFFFFF,
            size >> 32,
            partition * xccs | xccs << 16,
        )
        return _crc16(struct.pack("<8I", *words)) or 1


def _crc16(data: bytes) -> int:
    """The kernel's crc16: polynomial 0x8005, reflected, from 0."""
    value = 0
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xA001 if value & 1 else 0)
    return value
