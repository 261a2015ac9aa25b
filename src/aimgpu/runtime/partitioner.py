"""Partitions to schedule on, without hardware: any sizes that the GPU could hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from aimgpu.domain import Device, DeviceUsage, Grant, Layout, Partition
from aimgpu.errors import InvalidLayout, NotInitialized, UnknownPartition, UnknownProduct
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.placement.fit import ungranted_bytes
from aimgpu.runtime.accounting import accounting_problems
from aimgpu.runtime.claims import GpuClaim, simulated_claim
from aimgpu.runtime.sizing import GB, MIN_PARTITION_GB, gigabytes, is_number, shown, to_bytes

SYSTEM_RESERVE_GB = 4.0
NOT_PARTITIONED = "the GPU is not partitioned yet"


class ComputePartitionMode(StrEnum):
    """How the compute dies of an AMD GPU are grouped: SPX is one partition, CPX one per die."""

    SPX = "SPX"
    DPX = "DPX"
    TPX = "TPX"
    QPX = "QPX"
    CPX = "CPX"


class MemoryPartitionMode(StrEnum):
    """Into how many domains the memory of an AMD GPU is divided."""

    NPS1 = "NPS1"
    NPS2 = "NPS2"
    NPS4 = "NPS4"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPartition:
    """One partition with what is charged on it, as of now. GB are 10^9 bytes."""

    partition_id: int
    stable_id: str
    size_bytes: int
    available_bytes: int  # what can still be scheduled; never negative
    allocated_bytes: int = 0
    other_bytes: int = 0  # reserved, or used by processes that were not scheduled here
    models: tuple[str, ...] = ()
    compute_units: int | None = None
    compute_mode: str | None = None
    memory_mode: str | None = None

    @property
    def size_gb(self) -> float:
        """The memory of the partition."""
        return self.size_bytes / GB

    @property
    def allocated_gb(self) -> float:
        """What scheduled models are charged."""
        return self.allocated_bytes / GB

    @property
    def available_gb(self) -> float:
        """What can still be scheduled."""
        return self.available_bytes / GB

    @property
    def utilization(self) -> float:
        """Part of the memory that is charged, 0 to 1."""
        return self.allocated_bytes / self.size_bytes


class RuntimePartitioner(Protocol):
    """What a scheduler places on: one GPU with its current layout."""

    claim: GpuClaim

    @property
    def reserve_bytes(self) -> int:
        """Of each partition, that is never scheduled."""

    def device(self) -> Device:
        """Raises NotInitialized before there is one."""

    def usage(self) -> DeviceUsage | None:
        """What was measured on the GPU; None where there is nothing to measure."""

    def environment(self, partition_id: int) -> dict[str, str]:
        """What a process must be started with to see this partition and no other."""


class ROCmPartitioner:
    """A simulated AMD GPU divided into partitions of any size; for planning and tests.

    It is known by `gpu_id` and exists in this process: partitioners with the same number share one GPU, which one scheduler
    grants at a time.
    No partition may have less than `min_partition_gb`, and `system_reserve_gb` of the GPU stay undivided; 0 turns either off.
    """

    def __init__(
        self,
        gpu_id: int = 0,
        *,
        min_partition_gb: float = MIN_PARTITION_GB,
        system_reserve_gb: float = SYSTEM_RESERVE_GB,
    ) -> None:
        check_gpu_id(gpu_id)
        self.claim = simulated_claim(gpu_id)
        self.reserve_bytes = 0  # taken from the GPU when it is divided
        self._gpu_id = gpu_id
        self._least_bytes = check_gigabytes(min_partition_gb, "min_partition_gb")
        self._system_bytes = check_gigabytes(system_reserve_gb, "system_reserve_gb")
        self._device: Device | None = None

    def initialize(self, gpu_name: str, partition_sizes_gb: Sequence[float]) -> bool:
        """Divide the GPU and return True.

        Raises UnknownProduct or InvalidLayout, or PartitionBusy while models are scheduled; then nothing is changed.
        """
        if not isinstance(gpu_name, str):
            raise UnknownProduct(f"{shown(gpu_name)} is not the name of a GPU", hint="Name a product, such as 'MI300X'.")
        if isinstance(partition_sizes_gb, str) or not isinstance(partition_sizes_gb, Sequence):
            raise InvalidLayout(
                f"{shown(partition_sizes_gb)} is not a list of sizes", hint="Give one size per partition, in GB."
            )
        whole = SimulatedHardware([(gpu_name, 1)]).read_devices()[0]
        sizes = [_checked(size) for size in partition_sizes_gb]
        self._check_sizes(whole, sizes)
        identity = f"sim-{whole.product.lower()}-{self._gpu_id}"
        with self.claim.change(identity if self._device is None else self._device.id):
            self._device = _divide(whole, identity, self._gpu_id, sizes)
        return True

    def device(self) -> Device:
        """The GPU as it was divided. Raises NotInitialized before that."""
        if self._device is None:
            raise NotInitialized(NOT_PARTITIONED, hint="Call initialize(gpu_name, partition_sizes_gb) first.")
        return self._device

    def usage(self) -> DeviceUsage | None:
        """None: nothing runs on a simulated GPU."""
        return None

    def environment(self, partition_id: int) -> dict[str, str]:
        """Variables that name the partition; a simulated GPU has nothing to make visible."""
        partition = find_partition(self.device(), partition_id)
        return {"AIM_PARTITION_ID": str(partition.index), "AIM_PARTITION_STABLE_ID": partition.id}

    def partitions(self) -> tuple[MemoryPartition, ...]:
        """The partitions as they were made; `ModelScheduler.partitions()` also counts what is scheduled."""
        return memory_partitions(self.device(), (), {})

    def validate(self) -> tuple[str, ...]:
        """What is wrong with the layout, one sentence each; empty where nothing is."""
        return tuple(accounting_problems(self._device, (), None)) if self._device is not None else (NOT_PARTITIONED,)

    def _check_sizes(self, whole: Device, sizes: Sequence[int]) -> None:
        if not sizes:
            raise InvalidLayout("no partitions were given", hint="Give at least one size; [192.0] is a whole MI300X.")
        most = max(len(layout.partitions) for layout in whole.layouts)
        if len(sizes) > most:
            raise InvalidLayout(f"{whole.product} has at most {most} partitions, {len(sizes)} were given", hint="Use fewer.")
        usable = whole.memory_bytes - self._system_bytes
        if sum(sizes) > usable:
            kept = f", {gigabytes(self._system_bytes)} GB of it reserved" if self._system_bytes else ""
            raise InvalidLayout(
                f"{gigabytes(sum(sizes))} GB were given; {whole.product} has {gigabytes(whole.memory_bytes)} GB{kept}",
                hint="Use smaller sizes, or a smaller system_reserve_gb.",
            )
        if min(sizes) < self._least_bytes:
            raise InvalidLayout(
                f"a partition of {min(sizes) / GB:g} GB is smaller than the least of {self._least_bytes / GB:g} GB",
                hint="Use larger sizes, or a smaller min_partition_gb.",
            )


def check_gpu_id(gpu_id: int) -> None:
    """Raises InvalidLayout for what is not a number of a GPU."""
    if not is_number(gpu_id) or not isinstance(gpu_id, int) or gpu_id < 0:
        raise InvalidLayout(f"gpu_id cannot be {shown(gpu_id)}", hint="GPUs are numbered from 0.")


def check_gigabytes(size_gb: float, name: str) -> int:
    """Bytes of an option that may be 0. Raises InvalidLayout."""
    if not is_number(size_gb) or size_gb < 0:
        raise InvalidLayout(f"{name} cannot be {shown(size_gb)}", hint="Give a number of GB, 0 or more.")
    return to_bytes(size_gb)


def find_partition(device: Device, index: int) -> Partition:
    """Raises UnknownPartition with the indices there are."""
    for partition in device.layout.partitions:
        if partition.index == index and not isinstance(index, bool):
            return partition
    known = ", ".join(str(partition.index) for partition in device.layout.partitions)
    raise UnknownPartition(f"{device.id} has no partition {shown(index)}", hint=f"There are {known}.")


def memory_partitions(device: Device, grants: Sequence[Grant], other_bytes: dict[str, int]) -> tuple[MemoryPartition, ...]:
    """The partitions of a GPU with what is charged and what else is used on each, by stable id."""
    found = []
    for partition in device.layout.partitions:
        here = [grant for grant in grants if grant.partition_id == partition.id]
        others = other_bytes.get(partition.id, 0)
        found.append(
            MemoryPartition(
                partition_id=partition.index,
                stable_id=partition.id,
                size_bytes=partition.memory_bytes,
                available_bytes=max(0, ungranted_bytes(partition, here, others)),
                allocated_bytes=sum(grant.memory_bytes for grant in here),
                other_bytes=others,
                models=tuple(grant.instance_id for grant in here),
                compute_units=partition.compute_units,
                compute_mode=device.layout.compute_mode,
                memory_mode=device.layout.memory_mode,
            )
        )
    return tuple(found)


def _checked(size_gb: float) -> int:
    if not is_number(size_gb) or size_gb <= 0:
        raise InvalidLayout(f"a partition of {shown(size_gb)} GB cannot be made", hint="Give sizes above zero, in GB.")
    return to_bytes(size_gb)


def _divide(whole: Device, identity: str, index: int, sizes: Sequence[int]) -> Device:
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
