"""The MIG side of one GPU: the profiles it offers, and the instances that exist."""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.domain.slices import Placed, SliceProfile
from aimgpu.hardware.nvidia.facts import Gpu, MemoryFacts, as_text, read_memory
from aimgpu.hardware.nvidia.nvml import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    Nvml,
    NvmlFailure,
)
from aimgpu.units import GIB, MIB

_MEMORY_EIGHTHS = 8  # only to name a profile for drivers that do not


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedProfile:
    """A profile as NVML reports it; `placements` are (start, size) pairs, None where the device does not report them."""

    number: int  # NVML's constant
    id: int
    kind: str
    slices: int
    most: int
    multiprocessors: int
    memory_bytes: int
    placements: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """A GPU instance. `placed` is None for a user who may not see placements."""

    id: int
    kind: str
    placed: Placed | None
    compute_instances: int
    uuid: str | None  # of its MIG device; None unless one compute instance covers all of it
    memory: MemoryFacts | None
    multiprocessors: int | None

    @property
    def usable(self) -> bool:
        """Anything but one full compute instance shares its memory, or cannot be opened at all."""
        return self.uuid is not None


def read_offered_profiles(gpu: Gpu) -> tuple[OfferedProfile, ...]:
    """Asked once: it takes some 60 questions to the driver, and the answers are those of the chip."""
    key = ("profiles", gpu.uuid)
    if key not in gpu.nvml.remembered:
        offered = tuple(_offered(gpu))
        if not offered or any(profile.placements is None for profile in offered):
            return offered  # MIG is off and this driver does not report it then, or this user may not ask
        gpu.nvml.remembered[key] = offered
    found: tuple[OfferedProfile, ...] = gpu.nvml.remembered[key]
    return found


def placeable(offered: tuple[OfferedProfile, ...]) -> tuple[SliceProfile, ...]:
    """The profiles whose places are known."""
    return tuple(
        SliceProfile(
            kind=one.kind,
            compute_slices=one.slices,
            memory_slices=one.placements[0][1],
            starts=tuple(sorted(start for start, _ in one.placements)),
            at_most=one.most,
            memory_bytes=one.memory_bytes,
            compute_units=one.multiprocessors,
        )
        for one in offered
        if one.placements
    )


def read_instances(gpu: Gpu, offered: tuple[OfferedProfile, ...]) -> tuple[MigInstance, ...]:
    """The GPU instances that exist, in order of start."""
    mig_devices = _mig_devices(gpu)
    found = _listed(gpu, offered, mig_devices) if offered else None
    if found is None:
        found = [_seen_from_outside(number, devices, gpu.nvml) for number, devices in mig_devices.items()]
    return tuple(sorted(found, key=lambda instance: (instance.placed.start if instance.placed else 0, instance.id)))


def read_device_memory(gpu: Gpu, instances: tuple[MigInstance, ...] | None) -> MemoryFacts:
    """Of the whole GPU. In MIG mode only a privileged user gets it; others get the sum of what they see."""
    try:
        return gpu.memory()
    except NvmlFailure as failure:
        seen = [one.memory for one in instances or () if one.memory is not None]
        if failure.code != NO_PERMISSION or not seen:
            raise
        return MemoryFacts(
            total_bytes=sum(one.usable_bytes for one in seen),
            reserved_bytes=None,
            used_bytes=sum(one.used_bytes for one in seen),
        )


def instance_handles(gpu: Gpu, profile_id: int, most: int) -> tuple[Any, ...]:
    """NVML's handles of the GPU instances."""
    kind = gpu.nvml.module.c_nvmlGpuInstance_t
    return _handles(gpu.nvml, kind, most, ("nvmlDeviceGetGpuInstances", gpu.handle, profile_id))


def compute_instance_handles(nvml: Nvml, gpu_instance: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a handle of NVML
    """NVML's handles of the compute instances in one of them."""
    kind = nvml.module.c_nvmlComputeInstance_t
    found: list[Any] = []
    for info in compute_profiles(nvml, gpu_instance):
        found += _handles(nvml, kind, info.instanceCount, ("nvmlGpuInstanceGetComputeInstances", gpu_instance, info.id))
    return tuple(found)


def compute_profiles(nvml: Nvml, gpu_instance: Any) -> Iterator[Any]:  # noqa: ANN401 - a handle of NVML
    """The compute instances that this GPU instance can have, as NVML's structures."""
    name, engine = "nvmlGpuInstanceGetComputeInstanceProfileInfo", 0
    for number in range(nvml.module.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        info = _newest(nvml, name, gpu_instance, number, engine)
        if info is not None:
            yield info


def profile_kind(name: str) -> str:
    """The kind in "MIG 1g.18gb" or "NVIDIA H200 MIG 1g.18gb", lower case."""
    return name.rpartition("MIG ")[2].strip().lower()


def _listed(gpu: Gpu, offered: tuple[OfferedProfile, ...], mig_devices: Mapping[int, list[Any]]) -> list[MigInstance] | None:
    """None: this user or driver may not list GPU instances."""
    try:
        return [
            _instance(gpu, handle, profile, mig_devices)
            for profile in offered
            for handle in instance_handles(gpu, profile.id, profile.most)
        ]
    except NvmlFailure as failure:
        if failure.code in {FUNCTION_NOT_FOUND, NOT_SUPPORTED, NO_PERMISSION}:
            return None
        raise


def _offered(gpu: Gpu) -> Iterator[OfferedProfile]:
    for number in range(getattr(gpu.nvml.module, "NVML_GPU_INSTANCE_PROFILE_COUNT", 0)):
        info = _newest(gpu.nvml, "nvmlDeviceGetGpuInstanceProfileInfo", gpu.handle, number)
        if info is not None:
            yield OfferedProfile(
                number=number,
                id=info.id,
                kind=_kind_of(gpu, number, info),
                slices=info.sliceCount,
                most=info.instanceCount,
                multiprocessors=info.multiprocessorCount,
                memory_bytes=info.memorySizeMB * MIB,
                placements=_placements(gpu, info.id),
            )


def _kind_of(gpu: Gpu, number: int, info: Any) -> str:  # noqa: ANN401 - a structure of NVML
    name = as_text(getattr(info, "name", None))
    if name:
        return profile_kind(name)
    total, module = gpu.memory().total_bytes, gpu.nvml.module
    eighths = math.ceil(info.memorySizeMB * MIB * _MEMORY_EIGHTHS / total)
    gigabytes = math.floor(eighths * math.ceil(total / GIB) / _MEMORY_EIGHTHS + 0.5)  # halves go up: 3g.71gb
    media = number in {module.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, module.NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1}
    return f"{info.sliceCount}g.{gigabytes}gb{'+me' if media else ''}"


def _placements(gpu: Gpu, profile_id: int) -> tuple[tuple[int, int], ...] | None:
    name, count = "nvmlDeviceGetGpuInstancePossiblePlacements", ctypes.c_uint(0)
    if gpu.nvml.ask(name, gpu.handle, profile_id, None, ctypes.byref(count)) is None:
        return None
    array = (gpu.nvml.module.c_nvmlGpuInstancePlacement_t * max(count.value, 1))()
    if gpu.nvml.ask(name, gpu.handle, profile_id, array, ctypes.byref(count)) is None:
        return None
    return tuple((array[position].start, array[position].size) for position in range(count.value))


def _instance(
    gpu: Gpu,
    handle: Any,  # noqa: ANN401 - a handle of NVML
    profile: OfferedProfile,
    mig_devices: Mapping[int, list[Any]],
) -> MigInstance:
    info = gpu.nvml.call("nvmlGpuInstanceGetInfo", handle)
    devices = mig_devices.get(info.id, [])
    full = len(devices) == 1 and _covers(gpu.nvml, handle, profile)
    return MigInstance(
        id=info.id,
        kind=profile.kind,
        placed=Placed(kind=profile.kind, start=info.placement.start),
        compute_instances=len(devices),
        uuid=gpu.nvml.call("nvmlDeviceGetUUID", devices[0]) if full else None,
        memory=read_memory(gpu.nvml, devices[0]) if full else None,
        multiprocessors=profile.multiprocessors,
    )


def _covers(nvml: Nvml, gpu_instance: Any, profile: OfferedProfile) -> bool:  # noqa: ANN401 - a handle of NVML
    """Whether the one compute instance has all compute slices of its GPU instance."""
    handles = compute_instance_handles(nvml, gpu_instance)
    infos = [nvml.call("nvmlComputeInstanceGetInfo", handle) for handle in handles]
    return len(infos) == 1 and bool(infos[0].placement.size >= profile.slices)


def _mig_devices(gpu: Gpu) -> dict[int, list[Any]]:
    """Handles of MIG devices by the GPU instance that they are part of."""
    found: dict[int, list[Any]] = {}
    for position in range(gpu.nvml.ask("nvmlDeviceGetMaxMigDeviceCount", gpu.handle) or 0):
        device = gpu.nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, position)
        if device is not None:
            found.setdefault(gpu.nvml.call("nvmlDeviceGetGpuInstanceId", device), []).append(device)
    return found


def _seen_from_outside(number: int, devices: list[Any], nvml: Nvml) -> MigInstance:
    """The MIG devices, which a user without the right to list instances sees too."""
    kind = profile_kind(nvml.call("nvmlDeviceGetName", devices[0]))
    alone = len(devices) == 1 and "c." not in kind
    return MigInstance(
        id=number,
        kind=kind,
        placed=None,
        compute_instances=len(devices),
        uuid=nvml.call("nvmlDeviceGetUUID", devices[0]) if alone else None,
        memory=read_memory(nvml, devices[0]) if alone else None,
        multiprocessors=None,
    )


def _handles(nvml: Nvml, kind: Any, most: int, question: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401 - of NVML
    count, array = ctypes.c_uint(0), (kind * max(most, 1))()
    nvml.call(*question, array, ctypes.byref(count))
    return tuple(array[position] for position in range(count.value))


def _newest(nvml: Nvml, name: str, *args: Any) -> Any:  # noqa: ANN401 - as NVML answers
    """Version 2 of a structure, else version 1; None when the device does not have it."""
    versions: tuple[Callable[[], Any], ...] = (
        lambda: nvml.call(name, *args, version=2),
        lambda: nvml.call(name, *args, version=1),
    )
    for question in versions:
        try:
            return question()
        except NvmlFailure as failure:
            if failure.code in {NOT_SUPPORTED, INVALID_ARGUMENT, NOT_FOUND, NO_PERMISSION}:
                return None
            if failure.code != FUNCTION_NOT_FOUND:
                raise
    return None
