"""One look at the machine and the ledger, as placement wants it."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.effects import Effects
from aimgpu.control.unattributed_memory import UnattributedMemory
from aimgpu.domain import Ask, Device, DeviceUsage, Grant, Instance
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.snapshot import UNKNOWN_PARTITION
from aimgpu.procfs import read_host_memory
from aimgpu.units import GIB

_DRIVERS_OWN_BYTES = GIB  # an idle MI300X was seen to use 297 MiB, and each process adds page tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What takes time to find out: the GPUs, what others hold on them, and what isolation can give there.

    What is granted, and to whom, is taken from the ledger when a snapshot is made of it.
    """

    states: tuple[DeviceState, ...]


def take_snapshot(dependencies: Dependencies) -> Snapshot:
    """Reads the GPUs, so never under a lock that others need."""
    return snapshot_of(dependencies, read_gpus(dependencies))


def read_gpus(dependencies: Dependencies) -> Reading:
    """May take as long as a driver takes to answer."""
    devices = dependencies.hardware.read_devices()
    usage = {item.device_id: item for item in dependencies.hardware.read_usage()}
    grants = dependencies.ledger.grants()
    seen = any(item.processes for item in usage.values())
    ours = frozenset(process_owners(dependencies.effects, dependencies.ledger.instances())) if seen else frozenset[int]()
    return Reading(states=tuple(_device_state(dependencies, device, usage.get(device.id), grants, ours) for device in devices))


def snapshot_of(dependencies: Dependencies, reading: Reading, *, recent_preemptions: int = 0) -> Snapshot:
    """The reading with what is granted now; from memory."""
    grants = dependencies.ledger.grants()
    states = tuple(
        replace(state, grants=tuple(grant for grant in grants if grant.device_id == state.device.id))
        for state in reading.states
    )
    running = _running(dependencies)
    return Snapshot(
        nodes=(this_node(dependencies.node, states, running.values()),), running=running, recent_preemptions=recent_preemptions
    )


def this_node(name: str, states: tuple[DeviceState, ...], running: Iterable[Ask] = ()) -> NodeState:
    """This machine, with the CPU and memory that it has, less what running instances asked for of them."""
    asks = list(running)
    cores = os.cpu_count()
    return NodeState(
        name=name,
        devices=states,
        cpu_millis=cores * 1000 if cores else None,
        host_memory_bytes=read_host_memory()[0],
        used_cpu_millis=sum(ask.cpu_millis for ask in asks),
        used_host_memory_bytes=sum(ask.host_memory_bytes for ask in asks),
    )


def foreign_bytes(
    device: Device,
    usage: DeviceUsage | None,
    grants: tuple[Grant, ...],
    ours: frozenset[int],
    unattributed: UnattributedMemory | None = None,
) -> Mapping[str, int]:
    """Bytes held by processes that are not ours, by partition.

    Where the device does not say what a process holds, everything measured beyond what we granted counts as foreign. So does
    what is measured and explained by no process at all: of another container, or of the graphics driver. `unattributed`
    remembers what that was before we granted something beside it.
    """
    if usage is None:
        return {}
    strangers = [process for process in usage.processes if process.pid not in ours]
    found: dict[str, int] = {}
    for process in strangers:
        if process.memory_bytes:
            key = process.partition_id or UNKNOWN_PARTITION
            found[key] = found.get(key, 0) + process.memory_bytes
    for key, size in _unexplained(device, usage, grants, ours, unattributed or UnattributedMemory()):
        found[key] = found.get(key, 0) + size
    if any(process.memory_bytes is None for process in strangers):
        for partition in device.layout.partitions:
            used = usage.used_bytes_by_partition.get(partition.id, 0)
            found[partition.id] = max(found.get(partition.id, 0), used - _granted(grants, partition.id))
    return {key: value for key, value in found.items() if value > 0}


def _unexplained(
    device: Device, usage: DeviceUsage, grants: tuple[Grant, ...], ours: frozenset[int], unattributed: UnattributedMemory
) -> Iterator[tuple[str, int]]:
    """Bytes in use that no visible process explains, beyond what a driver needs for itself."""
    rest = (usage.used_bytes or 0) - sum(
        process.memory_bytes or 0 for process in usage.processes if process.partition_id is None
    )
    granted = 0  # to what cannot be seen, and does not explain anything yet
    for partition in device.layout.partitions:
        here = [process for process in usage.processes if process.partition_id == partition.id]
        explained = sum(process.memory_bytes or 0 for process in here)
        unexplained = max(0, usage.used_bytes_by_partition.get(partition.id, 0) - explained)
        unseen = _granted_unseen(grants, partition.id, [process.memory_bytes for process in here if process.pid in ours])
        theirs = unattributed.estimate(partition.id, unexplained, unseen)
        rest -= explained + unexplained
        granted += max(0, unseen - (unexplained - theirs))
        if theirs > _DRIVERS_OWN_BYTES:
            yield partition.id, theirs
    theirs = unattributed.estimate(device.id, rest, granted) if usage.used_bytes is not None else 0
    if theirs > _DRIVERS_OWN_BYTES:
        yield UNKNOWN_PARTITION, theirs


def _granted_unseen(grants: tuple[Grant, ...], partition_id: str, mine: list[int | None]) -> int:
    """What we hold cannot be seen, or not its size: as much as was granted."""
    return 0 if mine and None not in mine else max(0, _granted(grants, partition_id) - sum(size or 0 for size in mine))


def _granted(grants: tuple[Grant, ...], partition_id: str) -> int:
    return sum(grant.memory_bytes for grant in grants if grant.partition_id == partition_id)


def _device_state(
    dependencies: Dependencies, device: Device, usage: DeviceUsage | None, grants: tuple[Grant, ...], ours: frozenset[int]
) -> DeviceState:
    levels = dependencies.isolator.available_levels
    partitions = device.layout.partitions
    here = tuple(grant for grant in grants if grant.device_id == device.id)
    return DeviceState(
        device=device,
        grants=here,
        foreign_bytes=foreign_bytes(device, usage, here, ours, dependencies.unattributed),
        shared_levels={part.id: levels(device, part, exclusive=False) for part in partitions},
        exclusive_levels={part.id: levels(device, part, exclusive=True) for part in partitions},
    )


def _running(dependencies: Dependencies) -> dict[str, Ask]:
    """What sleeps in place is left out: it is unloaded where it is in the way, never moved. Programs stay: they cannot wake."""
    wanted = {deployment.name: deployment.present_ask for deployment in dependencies.ledger.deployments()}
    return {
        instance.id: replace(wanted[instance.deployment], pinned=True) if instance.is_program else wanted[instance.deployment]
        for instance in dependencies.ledger.instances()
        if instance.grants and instance.deployment in wanted and not instance.sleeps_in_place
    }


def process_owners(effects: Effects, instances: Iterable[Instance]) -> dict[int, str]:
    """Instances by pid: their processes and everything below them."""
    return process_owners_of(effects, {one.process.pid: one.id for one in instances if one.process is not None})


def process_owners_of(effects: Effects, roots: Mapping[int, str]) -> dict[int, str]:
    """The same by the pids of their first processes; one pass over /proc, whatever their number."""
    if not roots:
        return {}
    children: dict[int, list[int]] = {}
    for pid, parent in ((entry.pid, entry.parent_pid) for entry in effects.read_processes()):
        children.setdefault(parent, []).append(pid)
    owners: dict[int, str] = {}
    for root, instance_id in roots.items():
        family = [root]
        while family:
            pid = family.pop()
            if pid not in owners:
                owners[pid] = instance_id
                family += (child for child in children.get(pid, ()) if child != os.getpid())  # a program may have started us
    return owners
