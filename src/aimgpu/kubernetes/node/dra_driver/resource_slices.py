"""ResourceSlices of a node, from its GPUs. Pure; the limits are those that the API server checks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aimgpu.domain import Level
from aimgpu.kubernetes.api.quantities import format_quantity
from aimgpu.kubernetes.node.dra_driver.candidates import MEMORY_STEP, Candidate, GpuCandidates, shared_memory_bytes
from aimgpu.kubernetes.vocabulary import names
from aimgpu.units import PPM

DEVICES_PER_SLICE = 64  # 128 without counters and taints
COUNTER_SETS_PER_SLICE = 8
SEPARATE_COUNTERS_FROM = (1, 35)  # until 1.34 counters stand in the slice of the devices that take of them
COUNTED_SHARES_FROM = (1, 36, 2)  # kubernetes/kubernetes#139040, in no patch release of 1.34 and 1.35
_SEMANTIC_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_LONGEST_TEXT = 64
_UNCOUNTED = (
    "kube-scheduler 1.36.2: shares are not counted against counters; unless --no-single-device is given, "
    "a GPU is one device for whole and shares, and claims do not change its layout"
)


class _Kind(StrEnum):
    """How one device of a slice can be allocated."""

    SHARED = names.TYPE_SHARED
    EXCLUSIVE = "exclusive"  # its type says whether it is a whole GPU or a partition
    DIVISIBLE = names.TYPE_DIVISIBLE


_BOTH = (_Kind.SHARED, _Kind.EXCLUSIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the API server knows; without it the fields are dropped silently."""

    version: tuple[int, int, int] = (1, 36, 4)
    consumable_capacity: bool = True  # shares
    partitionable_devices: bool = True  # counters
    device_taints: bool = True
    device_status: bool = True  # of claims
    extended_resources: bool = True  # names of device classes in plain limits

    @property
    def counts_shares(self) -> bool:
        """Whether kube-scheduler, taken to be of the server's version, counts what shared devices take of counters.

        Where it does not, counters keep neither a whole GPU nor another layout from being allocated beside a share.
        """
        return self.version >= COUNTED_SHARES_FROM

    def missing(self) -> tuple[str, ...]:
        """Feature gates to enable and the version to upgrade to, with what each is for."""
        lacks = []
        if not self.consumable_capacity:
            lacks.append("DRAConsumableCapacity: no shares of a GPU")
        if not self.partitionable_devices:
            lacks.append("DRAPartitionableDevices: only the current layout is offered, exclusively")
        if not self.device_taints:
            lacks.append("DRADeviceTaints: an unhealthy GPU is withdrawn instead of tainted")
        if not self.device_status:
            lacks.append("DRAResourceClaimDeviceStatus: claims do not show what was granted")
        if not self.extended_resources:
            lacks.append("DRAExtendedResource: pods with plain limits of our names stay Pending")
        if self.consumable_capacity and not self.counts_shares:
            lacks.append(_UNCOUNTED)
        return tuple(lacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """What is known of one GPU beside its layout."""

    shared_level: Level = Level.NONE  # strongest that a share can have
    exclusive_level: Level = Level.NONE
    driver_version: str | None = None
    pcie_root: str | None = None
    numa_node: int | None = None
    unhealthy: str | None = None  # why
    foreign: bool = False
    repartitioning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSettings:
    node: str
    node_uid: str | None = None  # slices are deleted with the Node object
    default_share_ppm: int = 250_000  # of a share that names no memory
    single_device: bool = False  # one device for a whole partition and its shares, instead of two with a counter between them
    features: Features = field(default_factory=Features)


def build_slices(
    gpus: Sequence[GpuCandidates], states: Mapping[str, GpuState], settings: SliceSettings
) -> list[dict[str, Any]]:
    """Specs without a generation, in the order in which they are numbered."""
    devices = [(gpu, device) for gpu in gpus for device in _devices_of(gpu, states.get(gpu.device.id, GpuState()), settings)]
    # Partitions that exist come first: a claim that could have either must not cause a repartition.
    devices.sort(key=lambda pair: not pair[1]["attributes"]["current"]["bool"])
    specs: list[dict[str, Any]] = []
    if settings.features.version < SEPARATE_COUNTERS_FROM:
        for gpu in gpus:
            own = [device for there, device in devices if there is gpu]
            counters = {"sharedCounters": [_counter_set(gpu)]} if _needs_counters(gpu, settings) else {}
            specs += [{**counters, "devices": chunk} for chunk in _chunks(own, DEVICES_PER_SLICE)]
    else:
        sets = [_counter_set(gpu) for gpu in gpus if _needs_counters(gpu, settings)]
        specs += [{"sharedCounters": chunk} for chunk in _chunks(sets, COUNTER_SETS_PER_SLICE)]
        specs += [{"devices": chunk} for chunk in _chunks([device for _, device in devices], DEVICES_PER_SLICE)]
    return [{"driver": names.DRIVER, "nodeName": settings.node, **spec} for spec in specs or [{"devices": []}]]


def _needs_counters(gpu: GpuCandidates, settings: SliceSettings) -> bool:
    """Only where devices exclude each other.

    For each node that it considers, kube-scheduler 1.36 looks for the pools of the counters of all nodes among all slices
    (fixed in 1.37: kubernetes/kubernetes#138917), so that every counter slice costs time on every node.
    """
    if not settings.features.partitionable_devices:
        return False
    return _offered_kinds(settings) == _BOTH or (_offers_other_layouts(settings) and gpu.exclude_each_other)


def _offers_other_layouts(settings: SliceSettings) -> bool:
    """Counters keep layouts apart, where the scheduler counts them: the one device takes several allocations."""
    features = settings.features
    return features.partitionable_devices and (features.counts_shares or _offered_kinds(settings) != (_Kind.DIVISIBLE,))


def _offered_kinds(settings: SliceSettings) -> tuple[_Kind, ...]:
    features = settings.features
    if settings.single_device and features.consumable_capacity:
        return (_Kind.DIVISIBLE,)
    # Without counters nothing keeps a whole GPU and shares of it apart, so only one kind can be offered.
    return _BOTH if features.consumable_capacity and features.partitionable_devices else (_Kind.EXCLUSIVE,)


def _devices_of(gpu: GpuCandidates, state: GpuState, settings: SliceSettings) -> Iterable[dict[str, Any]]:
    features = settings.features
    if state.unhealthy and not features.device_taints:
        return
    for candidate in gpu.candidates:
        if not candidate.current and not _offers_other_layouts(settings):
            continue
        for kind in _offered_kinds(settings):
            yield _device(gpu, candidate, state, settings, kind)


def _device(gpu: GpuCandidates, candidate: Candidate, state: GpuState, settings: SliceSettings, kind: _Kind) -> dict[str, Any]:
    device: dict[str, Any] = {
        "name": candidate.shared_name if kind is _Kind.SHARED else candidate.name,
        "attributes": _attributes(gpu, candidate, state, kind),
        "capacity": _capacity(candidate) if kind is _Kind.EXCLUSIVE else _shared_capacity(candidate, settings, kind),
    }
    if kind is not _Kind.EXCLUSIVE:
        device["allowMultipleAllocations"] = True
    if _needs_counters(gpu, settings):
        taken = {name: {"value": str(count)} for name, count in candidate.counters.items()}
        device["consumesCounters"] = [{"counterSet": gpu.counter_set, "counters": taken}]
    taints = _taints(state)
    if taints and settings.features.device_taints:
        device["taints"] = taints
    return device


def _attributes(gpu: GpuCandidates, candidate: Candidate, state: GpuState, kind: _Kind) -> dict[str, dict[str, Any]]:
    device, partition = gpu.device, candidate.partition
    level = state.exclusive_level if kind is _Kind.EXCLUSIVE else state.shared_level
    exclusive_type = names.TYPE_WHOLE if candidate.whole else names.TYPE_PARTITION
    texts = {
        names.TYPE: exclusive_type if kind is _Kind.EXCLUSIVE else kind.value,
        "vendor": device.vendor.value,
        "productName": device.product,
        "gpu": device.id,
        "uuid": partition.uuid,
        "partitionProfile": partition.kind,
        "computeMode": candidate.compute_mode,
        "memoryMode": candidate.memory_mode,
        "level": level.value,
    }
    found: dict[str, dict[str, Any]] = {name: {"string": text[:_LONGEST_TEXT]} for name, text in texts.items() if text}
    found |= {
        "index": {"int": device.index},
        "partitioned": {"bool": not candidate.whole},
        "current": {"bool": candidate.current},
        "enforced": {"bool": level.rank >= Level.RUNTIME.rank},
        "simulated": {"bool": device.simulated},
    }
    if state.driver_version:
        version = _SEMANTIC_VERSION.match(state.driver_version)
        found["driverVersion"] = {"version": version[0]} if version else {"string": state.driver_version[:_LONGEST_TEXT]}
    if state.numa_node is not None:
        found["numaNode"] = {"int": state.numa_node}
    if state.pcie_root:
        found["resource.kubernetes.io/pcieRoot"] = {"string": state.pcie_root}
    return found


def _capacity(candidate: Candidate) -> dict[str, Any]:
    found = {names.MEMORY: {"value": format_quantity(candidate.partition.memory_bytes)}}
    if candidate.partition.compute_units is not None:
        found["computeUnits"] = {"value": str(candidate.partition.compute_units)}
    return found


def _shared_capacity(candidate: Candidate, settings: SliceSettings, kind: _Kind) -> dict[str, Any]:
    total = shared_memory_bytes(candidate.partition)
    ppm = PPM if kind is _Kind.DIVISIBLE else settings.default_share_ppm
    share = total * ppm // PPM // MEMORY_STEP * MEMORY_STEP
    memory = {
        "default": format_quantity(max(share, MEMORY_STEP)),
        "validRange": {
            "min": format_quantity(MEMORY_STEP),
            "max": format_quantity(total),
            "step": format_quantity(MEMORY_STEP),
        },
    }
    compute = {"default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}}
    return {
        names.MEMORY: {"value": format_quantity(total), "requestPolicy": memory},
        names.COMPUTE: {"value": "100", "requestPolicy": compute},
    }


def _taints(state: GpuState) -> list[dict[str, str]]:
    taints = []
    if state.unhealthy:
        taints.append({"key": names.TAINT_UNHEALTHY, "value": "true", "effect": "NoExecute"})
    if state.foreign:
        taints.append({"key": names.TAINT_FOREIGN, "value": "true", "effect": "NoSchedule"})
    if state.repartitioning:
        taints.append({"key": names.TAINT_REPARTITIONING, "value": "true", "effect": "NoSchedule"})
    return taints


def _counter_set(gpu: GpuCandidates) -> dict[str, Any]:
    return {"name": gpu.counter_set, "counters": {name: {"value": str(count)} for name, count in gpu.counters.items()}}


def _chunks(items: Sequence[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
