"""Compute units of an AMD partition for each of its tenants: `HSA_CU_MASK`.

Bit k of a mask is a CU of XCC (k mod number of XCCs), so contiguous bits spread evenly over all XCCs (kernel,
mqd_symmetrically_map_cu_mask). A mask that leaves an XCC empty is not made: queues run on all of them. A share is rounded down
to whole CUs, so a mask is less than one CU below its share; the smallest mask has one CU per XCC. Masks limit compute, not
memory or its bandwidth, and a process could unset its own: cooperative.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from aimgpu.domain import Device, Grant, Level, Partition, Vendor
from aimgpu.domain.compute import whole_units
from aimgpu.errors import HardwareUnavailable, InvalidInput, NotAllowed
from aimgpu.isolation.protocols import Enforcement, Offer
from aimgpu.units import PPM

XCCS = {"MI300X": 8, "MI325X": 8, "MI350X": 8, "MI355X": 8, "MI300A": 6}  # of the whole GPU; others have one


def choose_units(total: int, xccs: int, taken: Iterable[int], ppm: int) -> frozenset[int]:
    """Free units for this part of `total`, spread evenly: rounded down to whole CUs, at least one on each XCC.

    Raises NotAllowed if too few are free.
    """
    wanted = max(whole_units(ppm, total), xccs)
    busy = set(taken)
    free = [[unit for unit in range(xcc, total, xccs) if unit not in busy] for xcc in range(xccs)]
    in_turn = sorted((turn, unit) for units in free for turn, unit in enumerate(units))
    if len(in_turn) < wanted or not all(free):
        raise NotAllowed(
            f"{wanted} of {total} compute units were promised, {len(in_turn)} are free",
            hint="Lower `compute`, or stop another tenant of this partition.",
        )
    return frozenset(unit for _, unit in in_turn[:wanted])


def format_mask(index: int, units: Iterable[int]) -> str:
    """`0:0-15,32-47`: device index after visibility, then ranges of units."""
    ranges: list[list[int]] = []
    for unit in sorted(units):
        if ranges and unit == ranges[-1][1] + 1:
            ranges[-1][1] = unit
        else:
            ranges.append([unit, unit])
    if not ranges:
        raise InvalidInput("an empty mask is a syntax error to ROCm", hint="Give every tenant at least one unit an XCC.")
    text = ",".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)
    return f"{index}:{text}"


class CuMasks:
    """Keeps who has which units of which partition, on disk, so that a restart cannot hand them out twice.

    A companion of other mechanisms: it limits compute, they limit memory.
    """

    name = "CU mask"

    def __init__(self, path: Path, *, xccs_of: Mapping[str, int] | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()  # instances start side by side, and the file is read, changed and written
        self._xccs_of = xccs_of or XCCS

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        """The level that it can give on this partition, or why it gives none."""
        if device.simulated or device.vendor is not Vendor.AMD:
            return Offer(level=None, reason="CU masks are for real AMD devices")
        if exclusive:
            return Offer(level=None, reason="the partition is not shared")
        if partition.compute_units is None:
            return Offer(level=None, reason=f"the compute units of {partition.id} are unknown")
        return Offer(level=Level.RUNTIME)

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        """No mask without a compute limit; visibility leaves one device, whose index is 0."""
        if grant.compute_ppm is None or partition.compute_units is None or not self.holds_compute(grant, device, partition):
            return Enforcement(level=Level.NONE, mechanism="none")
        with self._lock:
            book = self._read()
            here = book.setdefault(grant.partition_id, {})
            if grant.id not in here:
                taken = [unit for units in here.values() for unit in units]
                xccs = self._xccs(device, partition)
                here[grant.id] = sorted(choose_units(partition.compute_units, xccs, taken, grant.compute_ppm))
                self._write(book)
        mask = format_mask(0, here[grant.id])
        return Enforcement(level=Level.RUNTIME, mechanism=self.name, environment={"HSA_CU_MASK": mask})

    def holds_compute(self, grant: Grant, device: Device, partition: Partition) -> bool:
        """By whole compute units of its own."""
        del device
        return grant.compute_ppm is not None and grant.compute_ppm < PPM and partition.compute_units is not None

    def release(self, grant: Grant) -> None:
        """Undo what `enforce` prepared. Safe to call twice."""
        with self._lock, contextlib.suppress(HardwareUnavailable):  # then nothing is known to be held
            book = self._read()
            if book.get(grant.partition_id, {}).pop(grant.id, None) is not None:
                self._write(book)

    def _xccs(self, device: Device, partition: Partition) -> int:
        """XCCs of this partition. 1 for unknown products, which is right for GPUs with one die."""
        whole = self._xccs_of.get(device.product, 1)
        parts = max(1, len(device.layout.partitions))
        each = max(1, whole // parts)
        return each if partition.compute_units is not None and partition.compute_units >= each else 1

    def _read(self) -> dict[str, dict[str, list[int]]]:
        """Raises HardwareUnavailable where it cannot be known who has which units: they might be handed out twice."""
        try:
            found: dict[str, dict[str, list[int]]] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable() from error
        if not _is_book(found):
            raise self._unreadable()
        return found

    def _unreadable(self) -> HardwareUnavailable:
        return HardwareUnavailable(
            f"{self._path}, which lists the compute units of every model, cannot be read",
            hint="Stop the models that share an AMD GPU, then remove the file.",
        )

    def _write(self, book: Mapping[str, Mapping[str, list[int]]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh.write_text(json.dumps({partition: grants for partition, grants in book.items() if grants}))
        fresh.rename(self._path)


def _is_book(value: object) -> bool:
    """Units by grant by partition."""
    return isinstance(value, dict) and all(
        isinstance(grants, dict)
        and all(isinstance(units, list) and all(type(unit) is int for unit in units) for units in grants.values())
        for grants in value.values()
    )
