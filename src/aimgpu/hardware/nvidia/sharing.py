"""How several tenants can share one Partition of an NVIDIA GPU, and the equal parts that a replica stands for."""

from dataclasses import dataclass
from enum import StrEnum

from aimgpu.domain import Partition
from aimgpu.errors import InvalidInput
from aimgpu.hardware.nvidia.facts import Gpu
from aimgpu.hardware.nvidia.mps import MpsDaemons

_EXCLUSIVE_THREAD, _PROHIBITED, _EXCLUSIVE_PROCESS = 1, 2, 3  # NVML's compute modes; 0 is the default, shared
_VOLTA = (7, 0)  # MPS with limits, and without one address space for all tenants


class SharingMode(StrEnum):
    """How tenants could share a GPU without partitions."""

    EXCLUSIVE = "exclusive"
    TIME_SLICED = "time-sliced"  # the driver switches between tenants; no limits
    MPS = "mps"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingOffer:
    """A mode, and why it cannot be had here; None: it can."""

    mode: SharingMode
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One of several equal parts of a time-sliced Partition. Its bytes are accounted for, not limited."""

    partition_id: str
    number: int
    count: int
    memory_bytes: int

    @property
    def id(self) -> str:
        """Its stable name."""
        return f"{self.partition_id}::{self.number}"


def sharing_offers(gpu: Gpu, daemons: MpsDaemons) -> tuple[SharingOffer, ...]:
    """Every mode, with the reason where this GPU, as it is set now, cannot have it. Compute mode is never changed."""
    mode, capability = gpu.compute_mode(), gpu.compute_capability()
    prohibited = "the compute mode prohibits every context" if mode == _PROHIBITED else None
    alone = "the compute mode allows one process" if mode in (_EXCLUSIVE_THREAD, _EXCLUSIVE_PROCESS) else None
    old = None if capability is None or capability >= _VOLTA else "MPS has limits from Volta on"
    return (
        SharingOffer(mode=SharingMode.EXCLUSIVE, reason=prohibited),
        SharingOffer(mode=SharingMode.TIME_SLICED, reason=prohibited or alone),
        SharingOffer(mode=SharingMode.MPS, reason=prohibited or old or daemons.unavailable_reason()),
    )


def split_replicas(partition: Partition, count: int) -> tuple[Replica, ...]:
    """Equal parts whose bytes sum up to the Partition; the first ones carry what does not divide."""
    if count < 1 or count > partition.memory_bytes:
        raise InvalidInput(f"{partition.id} cannot be {count} replicas", hint="Request 1 or more.")
    each, rest = divmod(partition.memory_bytes, count)
    return tuple(
        Replica(partition_id=partition.id, number=number, count=count, memory_bytes=each + (number < rest))
        for number in range(count)
    )
