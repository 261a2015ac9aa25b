"""Whether what was granted, what the layout has and what was measured agree."""

from collections.abc import Iterable, Iterator, Sequence

from aimgpu.domain import Device, DeviceUsage, Grant
from aimgpu.runtime.sizing import gigabytes


def accounting_problems(
    device: Device, grants: Sequence[Grant], usage: DeviceUsage | None, pids: Iterable[tuple[int, Grant]] = ()
) -> Iterator[str]:
    """One sentence per problem; `pids` are the processes of models that run, with the grant of each."""
    present = {partition.id: partition for partition in device.layout.partitions}
    if sum(partition.memory_bytes for partition in present.values()) > device.memory_bytes:
        yield f"the partitions of {device.id} have more memory than the GPU ({gigabytes(device.memory_bytes)} GB)"
    for grant in grants:
        if grant.partition_id not in present:
            yield f"{grant.instance_id} is charged to {grant.partition_id}, which the layout {device.layout.name} does not have"
    for partition in present.values():
        charged = sum(grant.memory_bytes for grant in grants if grant.partition_id == partition.id)
        if charged > partition.memory_bytes:
            yield f"{partition.id} is charged {gigabytes(charged)} GB and has {gigabytes(partition.memory_bytes)} GB"
    yield from _measured_problems(usage, dict(pids)) if usage is not None else ()


def _measured_problems(usage: DeviceUsage, granted: dict[int, Grant]) -> Iterator[str]:
    for process in usage.processes:
        grant = granted.get(process.pid)
        if grant is not None and (process.memory_bytes or 0) > grant.memory_bytes:
            used = gigabytes(process.memory_bytes or 0)
            yield f"{grant.instance_id} (pid {process.pid}) uses {used} GB and was granted {gigabytes(grant.memory_bytes)} GB"
