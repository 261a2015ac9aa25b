"""ResourceSlices of a node, from its GPUs. Pure; the limits are those that the API server checks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aimgpu.domain import Level
from aimgpu.kubernetes import names
from aimgpu.kubernetes.dra_driver.candidates import Candidate, GpuCandidates
from aimgpu.kubernetes.quantities import format_quantity
from aimgpu.units import MIB

DEVICES_PER_SLICE = 64  # 128 without counters and taints
COUNTER_SETS_PER_SLICE = 8
SEPARATE_COUNTERS_FROM = (1, 35)  # until 1.34 counters stand in the slice of the devices that take of them
MEMORY_STEP = MIB
_SEMANTIC_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_LONGEST_TEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the API server knows; without it the fields are dropped silently."""

    version: tuple[int, int] = (1, 36)
    consumable_capacity: bool = True  # shares
    partitionable_devices: bool = True  # counters
    device_taints: bool = True

    def missing(self) -> tuple[str, ...]:
        """Feature gates to enable, with what each is for."""
        lacks = []
        if not self.consumable_capacity:
            lacks.append("DRAConsumableCapacity: no shares of a GPU")
        if not self.partitionable_devices:
            lacks.append("DRAPartitionableDevices: only the current layout is offered, exclusively")
        if not self.device_taints:
            lacks.append("DRADeviceTaints: an unhealthy GPU is withdrawn instead of tainted")
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
    features: Features = field(default_factory=Features)


def build_slices(
    gpus: Sequence[GpuCandidates], states: Mapping[str, GpuState], settings: SliceSettings
) -> list[dict[str, Any]]:
    """Specs without a generation, in the order in which they are numbered."""
    features = settings.features
    devices = [(gpu, device) for gpu in gpus for device in _devices_of(gpu, states.get(gpu.device.id, GpuState()), settings)]
    # Partitions that exist come first: a claim that could have either must not cause a repartition.
    devices.sort(key=lambda pair: not pair[1]["attributes"]["current"]["bool"])
    specs: list[dict[str, Any]] = []
    if features.partitionable_devices and features.version < SEPARATE_COUNTERS_FROM:
        for gpu in gpus:
            own = [device for there, device in devices if there is gpu]
            specs += [{"sharedCounters": [_counter_set(gpu)], "devices": chunk} for chunk in _chunks(own, DEVICES_PER_SLICE)]
    else:
        if features.partitionable_devices:
            sets = [_counter_set(gpu) for gpu in gpus]
            specs += [{"sharedCounters": chunk} for chunk in _chunks(sets, COUNTER_SETS_PER_SLICE)]
        specs += [{"devices": chunk} for chunk in _chunks([device for _, device in devices], DEVICES_PER_SLICE)]
    return [{"driver": names.DRIVER, "nodeName": settings.node, **spec} for spec in specs or [{"devices": []}]]


def _devices_of(gpu: GpuCandidates, state: GpuState, settings: SliceSettings) -> Iterable[dict[str, Any]]:
    features = settings.features
    if state.unhealthy and not features.device_taints:
        return
    for candidate in gpu.candidates:
        if not candidate.current and not features.partitionable_devices:
            continue
        # Without counters nothing keeps a whole GPU and shares of it apart, so only one kind can be offered.
        if features.consumable_capacity and features.partitionable_devices:
            yield _device(gpu, candidate, state, settings, shared=True)
        yield _device(gpu, candidate, state, settings, shared=False)


def _device(
    gpu: GpuCandidates, candidate: Candidate, state: GpuState, settings: SliceSettings, *, shared: bool
) -> dict[str, Any]:
    features = settings.features
    device: dict[str, Any] = {
        "name": candidate.shared_name if shared else candidate.name,
        "attributes": _attributes(gpu, candidate, state, shared=shared),
        "capacity": _shared_capacity(candidate, settings) if shared else _capacity(candidate),
    }
    if shared:
        device["allowMultipleAllocations"] = True
    if features.partitionable_devices:
        taken = {name: {"value": str(count)} for name, count in candidate.counters.items()}
        device["consumesCounters"] = [{"counterSet": gpu.counter_set, "counters": taken}]
    taints = _taints(state)
    if taints and features.device_taints:
        device["taints"] = taints
    return device


def _attributes(gpu: GpuCandidates, candidate: Candidate, state: GpuState, *, shared: bool) -> dict[str, dict[str, Any]]:
    device, partition = gpu.device, candidate.partition
    level = state.shared_level if shared else state.exclusive_level
    exclusive_type = names.TYPE_WHOLE if candidate.whole else names.TYPE_PARTITION
    texts = {
        names.TYPE: names.TYPE_SHARED if shared else exclusive_type,
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


def _shared_capacity(candidate: Candidate, settings: SliceSettings) -> dict[str, Any]:
    total = candidate.partition.memory_bytes // MEMORY_STEP * MEMORY_STEP
    share = total * settings.default_share_ppm // 1_000_000 // MEMORY_STEP * MEMORY_STEP
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
