"""Dividing the compute of a GPU between its Partitions: floors and ceilings that can all be kept at once."""

from collections.abc import Mapping
from dataclasses import dataclass

from aimgpu.errors import InvalidLayout
from aimgpu.runtime.partitioner import RuntimePartitioner
from aimgpu.units import PPM, format_ppm


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLimits:
    """Of the whole GPU, in millionths: `floor_ppm` is promised, `ceiling_ppm` is never passed."""

    floor_ppm: int
    ceiling_ppm: int

    def __post_init__(self) -> None:
        if not 0 <= self.floor_ppm <= self.ceiling_ppm <= PPM or self.ceiling_ppm == 0:
            raise InvalidLayout(
                f"a floor of {format_ppm(self.floor_ppm)} with a ceiling of {format_ppm(self.ceiling_ppm)} cannot be",
                hint="0 <= floor <= ceiling <= 100%, ceiling above 0.",
            )


class ResourceIsolator:
    """Limits for the Partitions of one GPU; a set of limits is taken whole or not at all."""

    def __init__(self, partitioner: RuntimePartitioner) -> None:
        self._partitioner = partitioner
        self._limits: dict[int, ComputeLimits] = {}

    def divide_equally(self) -> Mapping[int, ComputeLimits]:
        """The same floor and ceiling for every Partition."""
        partitions = self._partitioner.device().layout.partitions
        each = PPM // len(partitions)
        self.set_limits({part.index: ComputeLimits(floor_ppm=each, ceiling_ppm=each) for part in partitions})
        return self.limits()

    def set_limits(self, limits: Mapping[int, ComputeLimits]) -> None:
        """Replace the limits of these Partitions; raises InvalidLayout, and changes nothing, where they cannot all be kept."""
        known = {part.index for part in self._partitioner.device().layout.partitions}
        unknown = sorted(set(limits) - known)
        if unknown:
            raise InvalidLayout(f"no partition {', '.join(map(str, unknown))}", hint=f"There are {len(known)}.")
        wanted = {**self._limits, **limits}
        floors = sum(limit.floor_ppm for limit in wanted.values())
        if floors > PPM:
            raise InvalidLayout(f"the floors add up to {format_ppm(floors)}", hint="Promise at most 100% in all.")
        self._limits = wanted

    def limits(self) -> Mapping[int, ComputeLimits]:
        return dict(self._limits)
