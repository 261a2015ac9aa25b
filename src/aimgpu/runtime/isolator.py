"""Dividing the compute of a GPU between its partitions and the models on them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction as Ratio

from aimgpu.domain import Device, Grant, Level, Partition, Priority
from aimgpu.domain.compute import partition_part, partition_ppm, whole_units
from aimgpu.errors import HardwareUnavailable, InvalidLayout, NotAllowed
from aimgpu.isolation.cu_masks import XCCS, choose_units, format_mask
from aimgpu.isolation.interposer import Interposer
from aimgpu.runtime.partitioner import RuntimePartitioner, check_gigabytes, find_partition
from aimgpu.runtime.sizing import is_number, shown
from aimgpu.units import PPM, format_ppm


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLimits:
    """Of the whole GPU, in millionths: `floor_ppm` is promised, `ceiling_ppm` is never exceeded."""

    floor_ppm: int
    ceiling_ppm: int

    def __post_init__(self) -> None:
        for name, ppm in (("floor_ppm", self.floor_ppm), ("ceiling_ppm", self.ceiling_ppm)):
            if not is_number(ppm) or not isinstance(ppm, int):
                raise InvalidLayout(
                    f"{name} cannot be {shown(ppm)}", hint="Give whole millionths, or use ComputeLimits.percent()."
                )
        if not 0 <= self.floor_ppm <= self.ceiling_ppm <= PPM or self.ceiling_ppm == 0:
            raise InvalidLayout(
                f"a floor of {format_ppm(self.floor_ppm)} with a ceiling of {format_ppm(self.ceiling_ppm)} cannot be",
                hint="0 <= floor <= ceiling <= 100%, ceiling above 0.",
            )

    @classmethod
    def percent(cls, ceiling: float, *, floor: float | None = None) -> "ComputeLimits":
        """Percent of the whole GPU; the floor is the ceiling unless given."""
        return cls(floor_ppm=_ppm(ceiling if floor is None else floor), ceiling_ppm=_ppm(ceiling))

    @classmethod
    def units(cls, compute_units: int, of: Device) -> "ComputeLimits":
        """Compute units (CUs) of this GPU."""
        whole = isinstance(compute_units, int) and not isinstance(compute_units, bool)
        if not of.compute_units or not whole or not 0 < compute_units <= of.compute_units:
            raise InvalidLayout(
                f"{of.id} cannot give {shown(compute_units)} of {of.compute_units or 'an unknown number of'} compute units",
                hint="Give 1 or more, at most what the GPU has.",
            )
        ppm = -(-compute_units * PPM // of.compute_units)
        return cls(floor_ppm=ppm, ceiling_ppm=ppm)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLimit:
    """Whether a running process has the new limit already; `how` names the mechanism, or what to do."""

    applied: bool
    how: str


class ResourceIsolator:
    """Limits for the partitions of one GPU and the models on them; a set of limits is taken whole or not at all.

    A model's limit becomes a CU mask of its own, disjoint from those of the other models on the partition; a process without a
    limit gets none of these units. A mask takes effect when a process starts. With an `interposer` (real GPUs), limits also
    change while a process runs. After a change of the layout limits hold on the partitions that are still there, of the whole
    GPU as before; for one that a smaller partition cannot give, `environment` raises.
    """

    def __init__(self, partitioner: RuntimePartitioner, *, interposer: Interposer | None = None) -> None:
        self._partitioner = partitioner
        self._interposer = interposer
        self._limits: dict[int, ComputeLimits] = {}
        self._models: dict[tuple[int, str], ComputeLimits] = {}
        self._masks: dict[tuple[int, str], frozenset[int]] = {}
        self._known: tuple[tuple[str, int | None], ...] = ()  # the partitions that the masks are of, with their units

    def divide_equally(self) -> Mapping[int, ComputeLimits]:
        """The same floor and ceiling for every partition: an equal part of the GPU, or what the smallest of them has."""
        device = self._device()
        partitions = device.layout.partitions
        each = min(PPM // len(partitions), *(int(_part(device, partition) * PPM) for partition in partitions))
        self.set_limits({part.index: ComputeLimits(floor_ppm=each, ceiling_ppm=each) for part in partitions})
        return self.limits()

    def set_limits(self, limits: Mapping[int, ComputeLimits]) -> None:
        """Replace the limits of these partitions; raises InvalidLayout, and changes nothing, if they cannot all be kept."""
        device = self._device()
        known = {part.index: part for part in device.layout.partitions}
        for limit in limits.values():
            _check_limit(limit)
        unknown = sorted(set(limits) - set(known), key=shown)
        if unknown:
            raise InvalidLayout(f"there is no partition {', '.join(map(shown, unknown))}", hint=f"There are {len(known)}.")
        wanted = {**self._limits, **limits}
        floors = sum(limit.floor_ppm for limit in wanted.values())
        if floors > PPM:
            raise InvalidLayout(f"the floors add up to {format_ppm(floors)}", hint="Promise at most 100% in all.")
        for index, limit in limits.items():
            _partition_share(limit.floor_ppm, device, known[index])
        self._limits = wanted

    def limits(self) -> Mapping[int, ComputeLimits]:
        """Those of partitions, by index."""
        return dict(self._limits)

    def set_model_limit(self, partition_id: int, model_id: str, limit: ComputeLimits | None) -> frozenset[int]:
        """The compute units that the model may use from now on; None takes its limit away.

        Raises InvalidLayout or NotAllowed, and changes nothing, where the partition does not have them free.
        """
        device = self._device()
        partition = find_partition(device, partition_id)
        if not isinstance(model_id, str) or not model_id:
            raise InvalidLayout(
                f"{shown(model_id)} is not the name of a model", hint="set_limits() has limits for a whole partition."
            )
        key = (partition_id, model_id)
        if limit is None:
            self._models.pop(key, None)
            self._masks.pop(key, None)
            return self._other_units(device, partition)
        _check_limit(limit)
        self._check_ceiling(partition, limit)
        mask = self._choose(device, partition, key, limit)
        self._models[key], self._masks[key] = limit, mask
        return mask

    def model_limits(self, partition_id: int) -> Mapping[str, ComputeLimits]:
        """Those of the models on a partition."""
        return {model: limit for (index, model), limit in self._models.items() if index == partition_id}

    def environment(self, partition_id: int, model_id: str | None = None, *, memory_gb: float | None = None) -> dict[str, str]:
        """What a process must be started with: the partition it sees, its CU mask, and with an interposer its memory cap.

        Raises InvalidLayout or NotAllowed where the partition has no compute units for it.
        """
        device = self._device()
        partition = find_partition(device, partition_id)
        found = self._partitioner.environment(partition_id)
        mask = self._mask(device, partition, model_id)
        if len(mask) < (partition.compute_units or 0):
            found["HSA_CU_MASK"] = format_mask(0, mask)
        if self._interposer is not None and model_id is not None and not device.simulated:
            grant = self._grant(device, partition, model_id, memory_gb)
            found |= self._interposer.enforce(grant, device, partition).environment
        return found

    def apply(self, partition_id: int, model_id: str) -> AppliedLimit:
        """Give a running process the model's present limit, where a mechanism can: the interposer's gate does so at once."""
        device = self._device()
        partition = find_partition(device, partition_id)
        region = self._interposer.find_region(partition.id) if self._interposer is not None else None
        limit = self._models.get((partition_id, model_id))
        share = PPM if limit is None else _partition_share(limit.ceiling_ppm, device, partition)
        if region is not None and region.throttle(model_id, share):
            return AppliedLimit(applied=True, how="interposer")
        how = "a CU mask takes effect when a process starts: start it again with environment()"
        return AppliedLimit(applied=False, how=how)

    def _check_ceiling(self, partition: Partition, limit: ComputeLimits) -> None:
        ceiling = self._limits[partition.index].ceiling_ppm if partition.index in self._limits else PPM
        if limit.ceiling_ppm > ceiling:
            raise InvalidLayout(
                f"{format_ppm(limit.ceiling_ppm)} is more than partition {partition.index} may have ({format_ppm(ceiling)})",
                hint="Raise the partition's ceiling with set_limits(), or give the model less.",
            )

    def _choose(self, device: Device, partition: Partition, key: tuple[int, str], limit: ComputeLimits) -> frozenset[int]:
        share = _partition_share(limit.ceiling_ppm, device, partition)
        if partition.compute_units is None:
            raise HardwareUnavailable(f"the compute units of {partition.id} are not known", hint="Update the driver.")
        others = [mask for (index, model), mask in self._masks.items() if index == key[0] and model != key[1]]
        return choose_units(partition.compute_units, _xccs(device, partition), frozenset[int]().union(*others), share)

    def _mask(self, device: Device, partition: Partition, model_id: str | None) -> frozenset[int]:
        key = (partition.index, model_id or "")
        if key in self._models:
            return self._masks.get(key) or self._choose(device, partition, key, self._models[key])
        mask = self._other_units(device, partition)
        if not mask and partition.compute_units:
            raise NotAllowed(
                f"models with a limit have all {partition.compute_units} compute units of partition {partition.index}",
                hint="Give the process a limit of its own, and the others less.",
            )
        return mask

    def _other_units(self, device: Device, partition: Partition) -> frozenset[int]:
        """For a process without a limit of its own: up to the partition's ceiling, and none of a model that has one."""
        total, limit = partition.compute_units or 0, self._limits.get(partition.index)
        taken = frozenset[int]().union(*(mask for (index, _), mask in self._masks.items() if index == partition.index))
        free = frozenset(range(total)) - taken
        share = PPM if limit is None else _partition_share(limit.ceiling_ppm, device, partition, at_most=True)
        if not free or len(free) * PPM <= share * total:
            return free
        return choose_units(total, _xccs(device, partition), taken, share)

    def _device(self) -> Device:
        """As it is now. After a change of its layout masks are chosen again, for the partitions that are still there."""
        device = self._partitioner.device()
        partitions = {each.index: each for each in device.layout.partitions}
        known = tuple((each.id, each.compute_units) for each in device.layout.partitions)
        if known != self._known:
            self._masks = {}
            self._limits = {index: limit for index, limit in self._limits.items() if index in partitions}
            self._models = {key: limit for key, limit in self._models.items() if key[0] in partitions}
            for key, limit in self._models.items():
                with suppress(InvalidLayout, NotAllowed):  # `environment` reports it
                    self._masks[key] = self._choose(device, partitions[key[0]], key, limit)
            self._known = known
        return device

    def _grant(self, device: Device, partition: Partition, model_id: str, memory_gb: float | None) -> Grant:
        limit = self._models.get((partition.index, model_id))
        cap = partition.memory_bytes if memory_gb is None else check_gigabytes(memory_gb, "memory_gb")
        return Grant(
            id=f"{model_id}/0",
            instance_id=model_id,
            deployment=model_id,
            node="here",
            device_id=device.id,
            partition_id=partition.id,
            memory_bytes=cap,
            compute_ppm=None if limit is None else _partition_share(limit.ceiling_ppm, device, partition),
            priority=Priority.MEDIUM,
            level=Level.RUNTIME,
        )


def _check_limit(limit: ComputeLimits) -> None:
    if not isinstance(limit, ComputeLimits):
        raise InvalidLayout(f"{shown(limit)} is not a limit", hint="Give ComputeLimits, such as ComputeLimits.percent(30).")


def _partition_share(device_ppm: int, device: Device, partition: Partition, *, at_most: bool = False) -> int:
    """Millionths of the partition. Raises InvalidLayout where it has less, unless `at_most`."""
    part = _part(device, partition)
    whole = device_ppm >= part * PPM and (at_most or device_ppm < part * PPM + 1)  # all its units, rounded up to a millionth
    share = PPM if whole else partition_ppm(device_ppm, part)
    if share is None and device_ppm:
        asked, has = f"{format_ppm(device_ppm)} of the GPU", format_ppm(int(part * PPM))
        if device.compute_units and partition.compute_units:
            asked += f" ({whole_units(device_ppm, device.compute_units)} compute units)"
            has += f", {partition.compute_units} compute units"
        raise InvalidLayout(
            f"{asked} is more than partition {partition.index} has ({has})",
            hint="Use a layout with fewer partitions, or a smaller limit.",
        )
    return share or 1


def _part(device: Device, partition: Partition) -> Ratio:
    """Of the GPU's compute, all of it where that cannot be known."""
    return partition_part(device, partition) or Ratio(1)


def _ppm(percent: float) -> int:
    if not is_number(percent):
        raise InvalidLayout(f"{shown(percent)} is not a percentage", hint="Give a number above 0, at most 100.")
    return round(percent * PPM / 100)


def _xccs(device: Device, partition: Partition) -> int:
    each = XCCS.get(device.product, 1) // len(device.layout.partitions)
    return each if each > 1 and (partition.compute_units or 0) % each == 0 else 1
