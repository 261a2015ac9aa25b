"""Extended resources of a node, from its GPUs and the configuration. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from aimgpu.domain import Device, Grant, Partition, Vendor
from aimgpu.domain.slices import EMPTY
from aimgpu.kubernetes.vocabulary.sharing_config import Replicated, SharingConfig, Strategy
from aimgpu.units import MIB, PPM

REPLICA_MARK = "::"  # as NVIDIA's plugin writes it
_LONGEST_ID = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginReplica:
    """One device as the kubelet counts it."""

    id: str
    device_id: str
    partition_id: str
    memory_bytes: int | None  # None: the whole partition
    compute_ppm: int | None
    numa_node: int | None = None
    unhealthy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResource:
    name: str
    replicas: tuple[PluginReplica, ...]
    shared: bool


def list_resources(
    devices: Sequence[Device],
    config: SharingConfig,
    *,
    unhealthy: Iterable[str] = (),
    numa: Mapping[str, int | None] | None = None,
) -> tuple[NodeResource, ...]:
    sick, nodes = frozenset(unhealthy), numa or {}
    left_out = mixed_layouts(devices, config.strategy)
    found: dict[str, list[PluginReplica]] = {}
    shared: set[str] = set()
    counts: dict[str, int] = {}
    for device in (each for each in devices if each.vendor not in left_out):
        for partition in offered_partitions(device, config.strategy):
            base = base_name(device, partition, config.strategy)
            rule = _rule(config.replicated, base, device, partition, counts)
            name = base if rule is None else rule.advertised
            if rule is not None:
                shared.add(name)
            found.setdefault(name, []).extend(
                _replica(device, partition, number, rule, config, device.id in sick, nodes.get(device.id))
                for number in range(1 if rule is None else rule.replicas)
            )
    return tuple(
        NodeResource(name=name, replicas=tuple(replicas), shared=name in shared) for name, replicas in sorted(found.items())
    )


def mark_what_cannot_be_given(
    resources: Sequence[NodeResource], devices: Sequence[Device], held: Sequence[Grant], in_use: Collection[tuple[str, str]]
) -> tuple[NodeResource, ...]:
    """Replicas for which no memory is left are unhealthy to the kubelet: a pod waits for one instead of failing on it.

    Pods of a former configuration and claims hold other amounts than a replica is now. `in_use`: resources and replicas.
    """
    left = {part.id: part.memory_bytes for device in devices for part in device.layout.partitions}
    sizes = dict(left)
    for grant in held:
        left[grant.partition_id] = left.get(grant.partition_id, 0) - grant.memory_bytes
    found = []
    for resource in resources:
        replicas = []
        for replica in resource.replicas:
            needed = sizes[replica.partition_id] if replica.memory_bytes is None else replica.memory_bytes
            if (resource.name, replica.id) not in in_use:
                fits = needed <= left[replica.partition_id]
                left[replica.partition_id] -= needed if fits else 0
                replicas.append(replica if fits else replace(replica, unhealthy=True))
            else:
                replicas.append(replica)
        found.append(replace(resource, replicas=tuple(replicas)))
    return tuple(found)


def mixed_layouts(devices: Sequence[Device], strategy: Strategy) -> dict[Vendor, str]:
    """Vendors whose partitions cannot all have one name, with the reason: under `single` a container gets any of them.

    The vendors' own plugins do not start on such a node.
    """
    if strategy is not Strategy.SINGLE:
        return {}
    found = {}
    for vendor in Vendor:
        own = [device for device in devices if device.vendor is vendor]
        kinds = sorted({kind for device in own for kind in _partition_kinds(device)})
        if len(kinds) > 1:
            found[vendor] = f"GPUs have different partitions ({', '.join(kinds)})"
        elif kinds == [EMPTY]:
            found[vendor] = "GPUs are in MIG mode without any instance"
    return found


def _partition_kinds(device: Device) -> set[str]:
    if device.vendor is Vendor.AMD:
        return {device.layout.name}
    return {partition.kind for partition in device.layout.partitions} or {EMPTY}


def offered_partitions(device: Device, strategy: Strategy) -> tuple[Partition, ...]:
    """Without a strategy NVIDIA's MIG instances are not offered; AMD's partitions are all that there is."""
    if device.vendor is Vendor.NVIDIA and strategy is Strategy.NONE:
        return tuple(part for part in device.layout.partitions if part.start is None)
    return device.layout.partitions


def base_name(device: Device, partition: Partition, strategy: Strategy) -> str:
    if device.vendor is Vendor.NVIDIA:
        if strategy is Strategy.MIXED and partition.start is not None:
            return f"nvidia.com/mig-{partition.kind.replace('+', '.')}"
        return "nvidia.com/gpu"
    if strategy is Strategy.MIXED and device.layout.compute_mode and device.layout.memory_mode:
        return f"amd.com/{device.layout.compute_mode}_{device.layout.memory_mode}".lower()
    return "amd.com/gpu"


def replicas_per_gpu(resources: Iterable[NodeResource], vendor: Vendor) -> int | None:
    """Most replicas of one partition of this vendor, for labels; None: it has no resource."""
    prefix = f"{vendor.value}.com/"
    counts: dict[str, int] = {}
    for resource in resources:
        for replica in resource.replicas if resource.name.startswith(prefix) else ():
            counts[replica.partition_id] = counts.get(replica.partition_id, 0) + 1
    return max(counts.values(), default=None)


def _rule(
    rules: Sequence[Replicated], base: str, device: Device, partition: Partition, counts: dict[str, int]
) -> Replicated | None:
    """The first rule of this resource that covers the partition; a rule with a count covers that many, the first ones."""
    names = {str(device.index), f"{device.index}:{partition.index}", device.id, partition.uuid}
    for number, rule in enumerate(rules):
        if rule.name != base:
            continue
        if rule.devices is None or (isinstance(rule.devices, tuple) and names & set(rule.devices)):
            return rule
        if isinstance(rule.devices, int):
            key = f"{number}"
            if counts.get(key, 0) < rule.devices:
                counts[key] = counts.get(key, 0) + 1
                return rule
    return None


def _replica(  # noqa: PLR0913, PLR0917 - one record
    device: Device,
    partition: Partition,
    number: int,
    rule: Replicated | None,
    config: SharingConfig,
    sick: bool,  # noqa: FBT001
    numa_node: int | None,
) -> PluginReplica:
    own = partition.uuid or partition.id.replace("/", "-")
    shares = 1 if rule is None else rule.replicas
    limited = config.mps or config.isolation.value == "enforced"
    return PluginReplica(
        id=(own if rule is None else f"{own}{REPLICA_MARK}{number}")[-_LONGEST_ID:],
        device_id=device.id,
        partition_id=partition.id,
        memory_bytes=None if rule is None else partition.memory_bytes // shares // MIB * MIB,
        compute_ppm=PPM // shares if rule is not None and limited else None,
        numa_node=numa_node,
        unhealthy=sick,
    )
