"""Compute of a whole GPU and compute of its partitions, each expressed in the other, in exact integers.

An ask names millionths of the whole GPU. A grant holds millionths of its partition, because that is what a CU mask, MPS and the
interposer can limit: 10 % of an MI300X (30.4 of 304 CUs) is 80 % of one of its eight CPX partitions (38 CUs).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction as Ratio

from aimgpu.domain.device import Device, Partition, Vendor
from aimgpu.domain.grant import Grant
from aimgpu.domain.placement import Slot
from aimgpu.units import PPM, format_ppm


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedCompute:
    """A compute share as people read it; `units` are whole CUs or SMs, rounded down, None where the GPU reports none."""

    device_ppm: int  # of the whole GPU
    units: int | None
    device_units: int | None
    unit_name: str  # "CUs" or "SMs"

    @property
    def text(self) -> str:
        """`91 of 304 CUs (30%)`; the percentage alone where the units are not known."""
        percent = format_ppm(round(self.device_ppm, -3))
        if self.units is None or self.device_units is None:
            return percent
        return f"{self.units} of {self.device_units} {self.unit_name} ({percent})"

    def to_json(self) -> dict[str, int | str | None]:
        """For answers of the API and of `--json`: the figures, and the sentence made from them."""
        return {"ppm": self.device_ppm, "units": self.units, "of": self.device_units, "text": self.text}


def partition_part(device: Device, partition: Partition) -> Ratio | None:
    """The part of the GPU's compute that the partition has; None where it cannot be known."""
    if device.compute_units and partition.compute_units:
        return min(Ratio(partition.compute_units, device.compute_units), Ratio(1))
    kinds = {each.kind for each in device.layout.partitions}
    return Ratio(1, len(device.layout.partitions)) if len(kinds) == 1 else None


def partition_ppm(device_ppm: int, part: Ratio | None) -> int | None:
    """Millionths of a partition, which is this `part` of its GPU, that are `device_ppm` of the GPU; None if it has less.

    Rounded down, so that shares that add up to the GPU also fit into its partitions.
    """
    if part is None or part <= 0 or device_ppm > part * PPM:
        return None
    return max(int(device_ppm / part), 1)


def whole_units(ppm: int, total: int) -> int:
    """CUs or SMs of `total` that a share comes to: rounded down, at least one. A thousandth of a unit is a rounding error."""
    return max((ppm * total + PPM // 1000) // PPM, 1)


def granted_compute(grant_ppm: int | None, device: Device, partition: Partition) -> GrantedCompute | None:
    """What a share of a partition comes to; None where compute is not limited or the partition's part is unknown."""
    part = partition_part(device, partition)
    if grant_ppm is None or part is None:
        return None
    units = None if partition.compute_units is None else whole_units(grant_ppm, partition.compute_units)
    return GrantedCompute(
        device_ppm=round(grant_ppm * part),
        units=units,
        device_units=device.compute_units,
        unit_name=unit_name(device),
    )


def unit_name(device: Device) -> str:
    """What this vendor calls its compute units."""
    return "CUs" if device.vendor is Vendor.AMD else "SMs"


def granted_to(share: Grant | Slot, devices: Iterable[Device]) -> GrantedCompute | None:
    """The compute of a grant or slot, with its device looked up among these."""
    device = next((each for each in devices if each.id == share.device_id), None)
    partition = None if device is None else device.partition(share.partition_id)
    return None if device is None or partition is None else granted_compute(share.compute_ppm, device, partition)
