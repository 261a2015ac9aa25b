"""What a process holds on the device beside its allocations, as the driver reports it.

The library sees allocations, not the driver's context, its loaded kernels and their stacks. A process is charged a constant for
them when it makes its context (`sizing.overhead`), and what was measured as soon as that is more.
"""

from collections.abc import Iterable
from pathlib import Path

from aimgpu.domain import DeviceUsage
from aimgpu.isolation.processes import read_names
from aimgpu.isolation.region import Measured, Region
from aimgpu.procfs import PROC

Counted = dict[tuple[int, int], int]


def read_counted(region: Region) -> Counted:
    """What the library has counted for each process now; to be read before the driver is asked."""
    slots = (slot for use in region.read_use() for slot in use.processes)
    return {(slot.pid, slot.start_ticks): slot.used_bytes - slot.context_bytes for slot in slots}


def charge_contexts(region: Region, counted: Counted, usages: Iterable[DeviceUsage], proc: Path = PROC) -> None:
    """`usages`: of the device that the region belongs to."""
    measured = {}
    for process in (process for usage in usages for process in usage.processes):
        if process.memory_bytes is None:
            continue
        for name in read_names(process.pid, proc):
            if name in counted:
                measured[name] = Measured(counted_bytes=counted[name], measured_bytes=process.memory_bytes)
    if measured:
        region.charge_contexts(measured)
