"""Grants of a node: charged in the ledger first, made true by isolation, given back by the same record."""

import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aimgpu.domain import (
    LEAST_LEVEL,
    Device,
    Grant,
    Instance,
    InstanceState,
    IsolationRequirement,
    Level,
    Partition,
    Priority,
)
from aimgpu.errors import NotFound, PartitionGone
from aimgpu.hardware.protocols import Hardware
from aimgpu.isolation.building import CHECKER, find_loader
from aimgpu.isolation.protocols import Enforcement, Isolator
from aimgpu.kubernetes.node.cdi import CdiMount, ContainerEdits
from aimgpu.kubernetes.vocabulary.names import COMPUTE_VARIABLE, LEVEL_VARIABLE, MEMORY_VARIABLE
from aimgpu.ledger import Ledger
from aimgpu.units import PPM

log = logging.getLogger(__name__)

REGION_MODE = 0o666  # containers may run as any user, and write what they use
_LISTS = ("VISIBLE_DEVICES", "PARTITION_ID", "STABLE_ID", "XCD_ID", "DEVICE")  # endings of variables that name devices
_PRELOAD = Path("/etc/ld.so.preload")  # read by the loader of glibc, and by no other


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlot:
    """A part of a partition that one tenant is to have; exclusive: all of it."""

    device_id: str
    partition_id: str
    memory_bytes: int | None = None  # None: the whole partition
    compute_ppm: int | None = None

    @property
    def exclusive(self) -> bool:
        return self.memory_bytes is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTenant:
    """Who gets it: containers that share one set of limits."""

    id: str
    owner: str  # the claim or pod, for people
    slots: tuple[NodeSlot, ...]
    model: str = ""  # that it serves, if known
    isolation: IsolationRequirement = IsolationRequirement.NONE
    priority: Priority = Priority.MEDIUM


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a tenant holds now, and what its containers must be given."""

    grants: tuple[Grant, ...]
    edits: ContainerEdits
    notes: tuple[str, ...] = field(default=())


class NodeGrants:
    """Not thread-safe: its callers take turns."""

    def __init__(self, *, hardware: Hardware, ledger: Ledger, isolator: Isolator, node: str) -> None:
        self._hardware = hardware
        self._ledger = ledger
        self._isolator = isolator
        self._node = node

    def charge(self, tenants: Sequence[PodTenant]) -> tuple[Instance, ...]:
        """Record what they are to have, all or nothing. Raises Conflict where it does not fit beside what is held."""
        devices = {device.id: device for device in self._hardware.read_devices()}
        instances = tuple(self._instance(tenant, devices) for tenant in tenants)
        capacity = {part.id: part.memory_bytes for device in devices.values() for part in device.layout.partitions}
        self._ledger.charge(*instances, capacity=capacity)
        return instances

    def enforce(self, instance: Instance) -> Given:
        """Make the recorded grants true; may be repeated. Raises NotAllowed where a demanded level is not available."""
        devices = {device.id: device for device in self._hardware.read_devices()}
        edits, given, notes = ContainerEdits(), list[Grant](), list[str]()
        for grant in _per_partition(instance.grants):
            device, partition = _find(devices, grant)
            enforcement = self._isolator.enforce(grant, device, partition, grouped=False)
            identity = self._hardware.identify(device, partition)
            edits = _merge_visible(
                edits, ContainerEdits(environment=dict(identity.environment), device_nodes=identity.device_nodes)
            ).merged(_edits_of(enforcement))
            given += [
                replace(held, level=enforcement.level, mechanisms=enforcement.mechanisms)
                for held in instance.grants
                if held.partition_id == grant.partition_id
            ]
            notes += enforcement.notes
        self._ledger.note_enforcement(*given)
        self._ledger.update(replace(instance, state=InstanceState.READY))
        return Given(grants=tuple(given), edits=edits.merged(_describe(given)), notes=tuple(notes))

    def look(self, partitions: Sequence[Partition]) -> ContainerEdits:
        """What a container needs to see these, whoever uses them. It is charged nothing and held to nothing."""
        devices = {device.id: device for device in self._hardware.read_devices()}
        edits = ContainerEdits()
        for each in partitions:
            device = devices.get(each.device_id)
            partition = device.partition(each.id) if device else None
            if device is None or partition is None:
                raise PartitionGone(f"{each.id} is not there any more")
            identity = self._hardware.identify(device, partition)
            seen = ContainerEdits(environment=dict(identity.environment), device_nodes=identity.device_nodes)
            edits = _merge_visible(edits, seen)
        return edits

    def release(self, tenant_id: str) -> bool:
        """Give back everything of this tenant; whether it held anything. Safe to repeat, and after a crash at any point."""
        instance = self._ledger.instance(tenant_id)
        if instance is None:
            return False
        for grant in _per_partition(instance.grants):
            self._isolator.release(grant)
        self._ledger.release(tenant_id)
        return True

    def held(self) -> tuple[Instance, ...]:
        return self._ledger.instances()

    def lower_level(self, tenant_id: str, level: Level) -> None:
        self._ledger.lower_level(tenant_id, level)

    def _instance(self, tenant: PodTenant, devices: dict[str, Device]) -> Instance:
        grants = []
        once = secrets.token_hex(4)  # the ledger remembers released grants: an id is never used again
        for number, slot in enumerate(tenant.slots):
            device = devices.get(slot.device_id)
            partition = device.partition(slot.partition_id) if device else None
            if device is None or partition is None:
                raise PartitionGone(f"{slot.partition_id} is not there any more")
            grants.append(
                Grant(
                    id=f"{tenant.id}.{once}.{number}",
                    instance_id=tenant.id,
                    deployment=tenant.owner,
                    node=self._node,
                    device_id=device.id,
                    partition_id=partition.id,
                    memory_bytes=partition.memory_bytes if slot.memory_bytes is None else slot.memory_bytes,
                    compute_ppm=slot.compute_ppm,
                    priority=tenant.priority,
                    level=LEAST_LEVEL[tenant.isolation],
                    exclusive=slot.exclusive,
                )
            )
        return Instance(
            id=tenant.id,
            deployment=tenant.owner,
            replica=0,
            model=tenant.model,
            engine="",
            launcher="pod",
            state=InstanceState.LOADING,
            grants=tuple(grants),
        )


def staged_library(find: Callable[[], Path], find_check: Callable[[], Path], folder: Path) -> Callable[[], Path]:
    """The interposer where containers can be given it: the node's disk, not the file system of the agent's own container.

    Beside it lie the file that has their loader preload it, and the program that checks whether it can.
    """

    def stage() -> Path:
        source = find()
        content, check = source.read_bytes(), find_check().read_bytes()
        build = hashlib.sha256(content + check).hexdigest()[:16]
        target = folder / build / source.name  # another build beside it: containers keep theirs
        _put(target, content)
        _put(target.with_name(CHECKER), check)
        _put(target.with_name(_PRELOAD.name), f"{target}\n".encode())
        return target

    return stage


def _put(target: Path, content: bytes) -> None:
    """Whole or not at all, also after a loss of power; what is there as it should be stays: containers have it mapped."""
    if target.is_file() and target.read_bytes() == content:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".fresh")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.chmod(0o755)
    fresh.rename(target)


def _find(devices: dict[str, Device], grant: Grant) -> tuple[Device, Partition]:
    device = devices.get(grant.device_id)
    partition = device.partition(grant.partition_id) if device else None
    if device is None or partition is None:
        raise NotFound(f"{grant.partition_id} is not there any more")
    return device, partition


def _per_partition(grants: Sequence[Grant]) -> list[Grant]:
    """One for each partition: a tenant with two shares of one has one cap of their sum."""
    merged: dict[str, Grant] = {}
    for grant in grants:
        other = merged.get(grant.partition_id)
        if other is None:
            merged[grant.partition_id] = grant
        else:
            compute = None if None in (other.compute_ppm, grant.compute_ppm) else _sum(other.compute_ppm, grant.compute_ppm)
            memory = other.memory_bytes + grant.memory_bytes
            merged[grant.partition_id] = replace(other, memory_bytes=memory, compute_ppm=compute)
    return list(merged.values())


def _sum(first: int | None, second: int | None) -> int:
    return min(PPM, (first or 0) + (second or 0))


def _merge_visible(edits: ContainerEdits, other: ContainerEdits) -> ContainerEdits:
    """Variables that list devices are joined; a container with two GPUs must see both."""
    joined = dict(other.environment)
    for name, value in other.environment.items():
        before = edits.environment.get(name)
        if before is not None and before != value and name.endswith(_LISTS):
            joined[name] = f"{before},{value}"
    return edits.merged(replace(other, environment=joined))


def _edits_of(enforcement: Enforcement) -> ContainerEdits:
    """The files that an enforcement needs, under the same paths in the container.

    The library is preloaded by a file, not by a variable: a variable here would replace the one that the container's image or
    pod sets. A container that was promised its limits and cannot load the library does not start.
    """
    environment = dict(enforcement.environment)
    mounts, checks = [], []
    # The first is ours; behind it stands what was preloaded into the agent.
    if library := environment.pop("LD_PRELOAD", "").partition(":")[0]:
        preload = str(Path(library).with_name(_PRELOAD.name))
        mounts += [
            CdiMount(host_path=library, container_path=library),
            CdiMount(host_path=preload, container_path=str(_PRELOAD)),
        ]
        if environment.get("AIMGPU_FAIL") == "closed":
            check = str(Path(library).with_name(CHECKER))
            mounts.append(CdiMount(host_path=check, container_path=check))
            checks.append((check, str(find_loader()), library))
    for region in environment.get("AIMGPU_REGION", "").split(":"):
        if region:
            Path(region).chmod(REGION_MODE)
            mounts.append(CdiMount(host_path=region, container_path=region, read_only=False))
    pipe = environment.get("CUDA_MPS_PIPE_DIRECTORY")
    if pipe:
        mounts.append(CdiMount(host_path=pipe, container_path=pipe, read_only=False))
    return ContainerEdits(environment=environment, mounts=tuple(mounts), checks=tuple(checks))


def _describe(grants: Sequence[Grant]) -> ContainerEdits:
    compute = [grant.compute_ppm for grant in grants if grant.compute_ppm is not None]
    weakest = min((grant.level for grant in grants), key=lambda level: level.rank, default=Level.NONE)
    return ContainerEdits(
        environment={
            MEMORY_VARIABLE: str(sum(grant.memory_bytes for grant in grants)),
            COMPUTE_VARIABLE: str(min(compute) * 100 // PPM if compute else 0),
            LEVEL_VARIABLE: weakest.value,
        }
    )
