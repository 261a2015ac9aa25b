"""Partitions to schedule on, without hardware: any sizes that the device could hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from aimgpu.domain import Device, Layout, Partition
from aimgpu.errors import InvalidLayout, NotInitialized
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.runtime.sizing import GB, to_bytes


class ComputePartitionMode(StrEnum):
    SPX = "SPX"
    DPX = "DPX"
    TPX = "TPX"
    QPX = "QPX"
    CPX = "CPX"


class MemoryPartitionMode(StrEnum):
    NPS1 = "NPS1"
    NPS2 = "NPS2"
    NPS4 = "NPS4"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPartition:
    """One Partition with what is charged on it, as of now."""

    partition_id: int
    size_bytes: int
    allocated_bytes: int = 0
    models: tuple[str, ...] = ()
    compute_mode: str | None = None
    memory_mode: str | None = None

    @property
    def available_bytes(self) -> int:
        return self.size_bytes - self.allocated_bytes

    @property
    def size_gb(self) -> float:
        return self.size_bytes / GB

    @property
    def utilization(self) -> float:
        """Part of the memory that is charged, 0 to 1."""
        return self.allocated_bytes / self.size_bytes


class RuntimePartitioner(Protocol):
    """What a scheduler places on: one Device with its current Layout."""

    def device(self) -> Device:
        """Raises NotInitialized before there is one."""


class ROCmPartitioner:
    """A simulated AMD GPU cut into parts of any size; for planning and tests."""

    def __init__(self, gpu_id: int = 0) -> None:
        if gpu_id < 0:
            raise InvalidLayout(f"gpu_id {gpu_id} is negative", hint="GPUs are numbered from 0.")
        self._gpu_id = gpu_id
        self._device: Device | None = None

    def initialize(self, gpu_name: str, partition_sizes_gb: Sequence[float]) -> bool:
        """Cut the GPU; True, or UnknownProduct or InvalidLayout with nothing changed."""
        whole = SimulatedHardware([(gpu_name, 1)]).read_devices()[0]
        sizes = [_checked(size) for size in partition_sizes_gb]
        _check_sizes(whole, sizes)
        identity = f"sim-{whole.product.lower()}-{self._gpu_id}"
        self._device = _cut(whole, identity, self._gpu_id, sizes)
        return True

    def device(self) -> Device:
        if self._device is None:
            raise NotInitialized("the GPU is not partitioned yet", hint="Call initialize(gpu_name, partition_sizes_gb) first.")
        return self._device


def _checked(size_gb: float) -> int:
    if isinstance(size_gb, bool) or not isinstance(size_gb, int | float) or not math.isfinite(size_gb) or size_gb <= 0:
        raise InvalidLayout(f"a partition of {size_gb!r} GB cannot be", hint="Give sizes above zero, in GB.")
    return to_bytes(size_gb)


def _check_sizes(whole: Device, sizes: Sequence[int]) -> None:
    if not sizes:
        raise InvalidLayout("no partitions were given", hint="Give at least one size; [192.0] is a whole MI300X.")
    most = max(len(layout.partitions) for layout in whole.layouts)
    if len(sizes) > most:
        raise InvalidLayout(f"{whole.product} has at most {most} partitions, {len(sizes)} were given", hint="Use fewer.")
    if sum(sizes) > whole.memory_bytes:
        raise InvalidLayout(
            f"{sum(sizes) / GB:g} GB were given, {whole.product} has {whole.memory_bytes / GB:.1f} GB",
            hint="Use smaller sizes.",
        )


def _cut(whole: Device, identity: str, index: int, sizes: Sequence[int]) -> Device:
    partitions = tuple(
        Partition(
            id=f"{identity}/part-{number}",
            device_id=identity,
            index=number,
            kind="part",
            memory_bytes=size,
            compute_units=None if whole.compute_units is None else whole.compute_units // len(sizes),
        )
        for number, size in enumerate(sizes)
    )
    layout = Layout(name="custom", compute_mode=None, memory_mode=None, partitions=partitions)
    return Device(
        id=identity,
        index=index,
        vendor=whole.vendor,
        product=whole.product,
        market_name=whole.market_name,
        memory_bytes=whole.memory_bytes,
        compute_units=whole.compute_units,
        layout=layout,
        layouts=(layout,),
        simulated=True,
    )
