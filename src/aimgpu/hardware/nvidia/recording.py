"""What NVML answers on this machine, as JSON without anything that names the machine or its people.

A question that failed is recorded as {"error": code}: what a driver does not answer is as much a fact as what it does.
UUIDs and pids are numbered in order of appearance; serial numbers, host names and process names are not read.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from aimgpu.hardware.nvidia.devices import product_name
from aimgpu.hardware.nvidia.facts import Gpu, read_memory
from aimgpu.hardware.nvidia.instances import OfferedProfile, read_instances, read_offered_profiles
from aimgpu.hardware.nvidia.nvml import Nvml, NvmlFailure
from aimgpu.hardware.recordings import RecordedDevice

Json = dict[str, Any]


def record_nvidia(nvml: Nvml | None = None) -> Json | None:
    """Every GPU that NVML shows; None where NVML does not start or shows none."""
    nvml = nvml or Nvml()
    try:
        count = nvml.call("nvmlDeviceGetCount")
    except NvmlFailure:
        return None
    if not count:
        return None
    return {
        "vendor": "nvidia",
        "driver": nvml.call("nvmlSystemGetDriverVersion"),
        "nvml": nvml.call("nvmlSystemGetNVMLVersion"),
        "devices": [_try(partial(_record_index, nvml, index)) for index in range(count)],
    }


def summarize_nvidia(recorded: Json) -> tuple[RecordedDevice, ...]:
    """The kinds of GPU in a recording, each once."""
    found = {
        RecordedDevice(
            product=product_name(device["name"], device["memory"]["total"]),
            market_name=device["name"],
            driver=recorded["driver"],
            memory_bytes=device["memory"]["total"] - (device["memory"]["reserved"] or 0),
            layouts=("whole", *sorted(profile["kind"] for profile in _listed(device["profiles"]))),
        )
        for device in recorded["devices"]
        if "error" not in device and isinstance(device["name"], str) and "error" not in device["memory"]
    }
    return tuple(sorted(found, key=lambda device: device.product))


def _listed(answer: list[Json] | Json) -> list[Json]:
    """None where the question failed."""
    return answer if isinstance(answer, list) else []


def _record_index(nvml: Nvml, index: int) -> Json:
    return _record_gpu(Gpu(nvml, index))


def _record_gpu(gpu: Gpu) -> Json:
    questions: dict[str, Callable[[], Any]] = {
        "name": gpu.name,
        "bus_id": gpu.bus_id,
        "minor": gpu.minor,
        "cores": lambda: gpu.nvml.call("nvmlDeviceGetNumGpuCores", gpu.handle),
        "compute_capability": gpu.compute_capability,
        "compute_mode": gpu.compute_mode,
        "memory": lambda: _memory(gpu),
        "memory_version_1": lambda: _memory_version_1(gpu),
        "utilization_percent": lambda: int(gpu.nvml.call("nvmlDeviceGetUtilizationRates", gpu.handle).gpu),
        "mig_mode": lambda: gpu.nvml.call("nvmlDeviceGetMigMode", gpu.handle),
        "profiles": lambda: [_profile(gpu, one) for one in read_offered_profiles(gpu)],
        "instances": lambda: list(_instances(gpu)),
        "processes": lambda: list(_processes(gpu)),
    }
    masked = f"GPU-00000000-0000-0000-0000-{gpu.index + 1:012d}"
    return {"uuid": masked, **{name: _try(question) for name, question in questions.items()}}


def _try(question: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the question answers
    try:
        return question()
    except NvmlFailure as failure:
        return {"error": failure.code, "function": failure.function}


def _memory(gpu: Gpu) -> Json:
    memory = read_memory(gpu.nvml, gpu.handle)
    return {"total": memory.total_bytes, "reserved": memory.reserved_bytes, "used": memory.used_bytes}


def _memory_version_1(gpu: Gpu) -> Json:
    info = gpu.nvml.call("nvmlDeviceGetMemoryInfo", gpu.handle)
    return {"total": info.total, "used": info.used, "free": info.free}


def _profile(gpu: Gpu, one: OfferedProfile) -> Json:
    return {
        "number": one.number,
        "id": one.id,
        "kind": one.kind,
        "slices": one.slices,
        "most": one.most,
        "multiprocessors": one.multiprocessors,
        "memory_bytes": one.memory_bytes,
        "placements": one.placements if one.placements is not None else _placements_error(gpu, one.id),
    }


def _placements_error(gpu: Gpu, profile_id: int) -> Any:  # noqa: ANN401 - an error, as recorded
    count = ctypes.c_uint(0)
    return _try(
        lambda: gpu.nvml.call("nvmlDeviceGetGpuInstancePossiblePlacements", gpu.handle, profile_id, None, ctypes.byref(count))
    )


def _instances(gpu: Gpu) -> Iterator[Json]:
    mode = gpu.mig_mode()
    for one in read_instances(gpu, read_offered_profiles(gpu)) if mode is not None and mode[0] else ():
        yield {
            "id": one.id,
            "kind": one.kind,
            "start": one.placed.start if one.placed else None,
            "compute_instances": one.compute_instances,
            "memory_bytes": one.memory.total_bytes if one.memory else None,
        }


def _processes(gpu: Gpu) -> Iterator[Json]:
    for number, process in enumerate(gpu.processes()):
        yield {"pid": 1001 + number, "memory_bytes": process.memory_bytes, "gpu_instance": process.gpu_instance}
