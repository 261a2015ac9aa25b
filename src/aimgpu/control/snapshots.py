"""One look at the machine and the books, as the placement room wants it."""

from collections.abc import Mapping

import psutil

from aimgpu.control.parts import Parts
from aimgpu.domain import Ask, Device, DeviceUsage, Grant
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.snapshot import UNKNOWN_PARTITION


def take_snapshot(parts: Parts) -> Snapshot:
    devices = parts.hardware.read_devices()
    usage = {item.device_id: item for item in parts.hardware.read_usage()}
    grants = parts.ledger.grants()
    ours = frozenset(process_owners(parts))
    states = tuple(_device_state(parts, device, usage.get(device.id), grants, ours) for device in devices)
    return Snapshot(nodes=(NodeState(name=parts.node, devices=states),), running=_running(parts))


def foreign_bytes(
    device: Device, usage: DeviceUsage | None, grants: tuple[Grant, ...], ours: frozenset[int]
) -> Mapping[str, int]:
    """Bytes held by processes that are not ours, by Partition.

    Where the device does not say what a process holds, everything measured beyond what we granted counts as foreign.
    """
    if usage is None:
        return {}
    strangers = [process for process in usage.processes if process.pid not in ours]
    found: dict[str, int] = {}
    for process in strangers:
        if process.memory_bytes:
            key = process.partition_id or UNKNOWN_PARTITION
            found[key] = found.get(key, 0) + process.memory_bytes
    if any(process.memory_bytes is None for process in strangers):
        for partition in device.layout.partitions:
            used = usage.used_bytes_by_partition.get(partition.id, 0)
            granted = sum(grant.memory_bytes for grant in grants if grant.partition_id == partition.id)
            found[partition.id] = max(found.get(partition.id, 0), used - granted)
    return {key: value for key, value in found.items() if value > 0}


def _device_state(
    parts: Parts, device: Device, usage: DeviceUsage | None, grants: tuple[Grant, ...], ours: frozenset[int]
) -> DeviceState:
    levels = parts.isolator.available_levels
    partitions = device.layout.partitions
    here = tuple(grant for grant in grants if grant.device_id == device.id)
    return DeviceState(
        device=device,
        grants=here,
        foreign_bytes=foreign_bytes(device, usage, here, ours),
        shared_levels={part.id: levels(device, part, exclusive=False) for part in partitions},
        exclusive_levels={part.id: levels(device, part, exclusive=True) for part in partitions},
    )


def _running(parts: Parts) -> dict[str, Ask]:
    wanted = {deployment.name: deployment for deployment in parts.ledger.deployments()}
    return {
        instance.id: wanted[instance.deployment].ask
        for instance in parts.ledger.instances()
        if instance.grants and instance.deployment in wanted
    }


def process_owners(parts: Parts) -> dict[int, str]:
    """Instances by pid: their processes and everything below them."""
    owners: dict[int, str] = {}
    for instance in parts.ledger.instances():
        if instance.process is None:
            continue
        try:
            root = psutil.Process(instance.process.pid)
            owners |= dict.fromkeys([root.pid, *(child.pid for child in root.children(recursive=True))], instance.id)
        except psutil.Error:
            continue
    return owners
