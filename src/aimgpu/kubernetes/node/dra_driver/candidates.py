"""What of a GPU can be allocated: partitions of its layout and of those it may change to, and which exclude each other. Pure.

kube-scheduler knows layouts only as counters. Two rules are expressed in them:

- partitions of different compute modes of an AMD GPU never exist together, although they need not overlap. Each candidate has a
  counter of its own that it takes whole; candidates of other layouts take one of it, which then does not fit.
- MIG instances exclude each other where their slices overlap: a counter per memory slice, one for the compute slices.

The exclusive and the shared device of one candidate take the same counters, so that one excludes the other. Where one device
stands for both and the layout is fixed, no counter is needed (`exclude_each_other`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aimgpu.domain import Device, Layout, Partition
from aimgpu.domain.slices import Placed, SliceProfile
from aimgpu.units import MIB

_UNSAFE = re.compile(r"[^a-z0-9]+")
_COMPUTE = "compute-slices"
SHARED_SUFFIX = "-shared"
MEMORY_STEP = MIB  # of shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One partition that exists, or could be made."""

    name: str  # of the exclusive device in a ResourceSlice
    partition: Partition
    layout: str  # to change to if it is not there: a layout's name, or a MIG placement ("1g.18gb@3")
    memory_mode: str | None
    compute_mode: str | None
    whole: bool  # the unpartitioned GPU
    current: bool  # exists now
    counters: Mapping[str, int]

    @property
    def shared_name(self) -> str:
        return self.name + SHARED_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCandidates:
    """All of one GPU, existing ones first, with the counters that they share."""

    device: Device
    counter_set: str
    counters: Mapping[str, int]
    candidates: tuple[Candidate, ...]

    @property
    def exclude_each_other(self) -> bool:
        """Whether candidates take of one counter: then the scheduler must know the counters."""
        taken = [name for candidate in self.candidates for name in candidate.counters]
        return len(taken) > len(set(taken))

    def find(self, name: str) -> tuple[Candidate, bool] | None:
        """The candidate of a device's name, and whether the shared device is meant."""
        for candidate in self.candidates:
            if name in (candidate.name, candidate.shared_name):
                return candidate, name == candidate.shared_name
        return None


def list_candidates(device: Device, *, repartition: bool) -> GpuCandidates:
    """`repartition`: layouts may be changed when a claim is prepared, so that what could be made is offered too."""
    base = device_name(device.id)
    if device.profiles and repartition:
        return _mig_candidates(device, base)
    layouts = [device.layout]
    if repartition:
        layouts += [
            layout
            for layout in device.layouts
            if layout.name != device.layout.name and layout.memory_mode == device.layout.memory_mode and layout.partitions
        ]
    return _layout_candidates(device, base, layouts)


def shared_memory_bytes(partition: Partition) -> int:
    """What shares of it can have together: whole steps only."""
    return partition.memory_bytes // MEMORY_STEP * MEMORY_STEP


def device_name(device_id: str) -> str:
    """A DNS label for a GPU's stable id."""
    return _UNSAFE.sub("-", device_id.lower()).strip("-")


def _layout_candidates(device: Device, base: str, layouts: Sequence[Layout]) -> GpuCandidates:
    placed = [(layout, partition) for layout in layouts for partition in layout.partitions]
    most = max((len(layout.partitions) for layout in layouts), default=1)
    own = {partition.id: _counter(partition) for _, partition in placed}
    candidates = []
    for layout, partition in placed:
        others = {own[other.id]: 1 for there, other in placed if there is not layout}
        candidates.append(
            _candidate(device, base, layout, partition, counters={own[partition.id]: most, **others}, layout_name=layout.name)
        )
    return GpuCandidates(
        device=device,
        counter_set=f"{base}-counters",
        counters=dict.fromkeys(own.values(), most),
        candidates=tuple(candidates),
    )


def _mig_candidates(device: Device, base: str) -> GpuCandidates:
    slices = max(start + profile.memory_slices for profile in device.profiles for start in profile.starts)
    compute = max(profile.compute_slices for profile in device.profiles)
    whole = next((layout for layout in device.layouts if _is_whole(layout)), device.layout)
    everything = {_slice(number): 1 for number in range(slices)} | {_COMPUTE: compute}
    candidates = [
        _candidate(device, base, whole, part, counters=everything, layout_name=whole.name) for part in whole.partitions
    ]
    existing = {(part.kind, part.start): part for part in device.layout.partitions}
    for profile in device.profiles:
        if not profile.plain:
            continue
        for start in profile.starts:
            partition = existing.get((profile.kind, start)) or _possible(device, profile, start)
            counters = {_slice(number): 1 for number in range(start, start + profile.memory_slices)}
            counters[_COMPUTE] = profile.compute_slices
            placed = str(Placed(kind=profile.kind, start=start))
            candidates.append(_candidate(device, base, device.layout, partition, counters=counters, layout_name=placed))
    candidates.sort(key=lambda candidate: not candidate.current)
    return GpuCandidates(device=device, counter_set=f"{base}-counters", counters=everything, candidates=tuple(candidates))


def _candidate(  # noqa: PLR0913 - a record
    device: Device, base: str, layout: Layout, partition: Partition, *, counters: Mapping[str, int], layout_name: str
) -> Candidate:
    whole = partition.start is None and _is_whole(layout)
    return Candidate(
        name=base if whole else f"{base}-{device_name(partition.kind)}-{partition.index}",
        partition=partition,
        layout=layout_name,
        memory_mode=layout.memory_mode,
        compute_mode=layout.compute_mode,
        whole=whole,
        current=device.partition(partition.id) is not None,
        counters=counters,
    )


def _is_whole(layout: Layout) -> bool:
    return len(layout.partitions) == 1 and layout.partitions[0].start is None


def _possible(device: Device, profile: SliceProfile, start: int) -> Partition:
    return Partition(
        id=f"{device.id}/{profile.kind}-{start}",
        device_id=device.id,
        index=start,
        kind=profile.kind,
        memory_bytes=profile.memory_bytes,
        compute_units=profile.compute_units,
        start=start,
    )


def _counter(partition: Partition) -> str:
    return f"{device_name(partition.kind)}-{partition.index}"


def _slice(number: int) -> str:
    return f"memory-slice-{number}"
