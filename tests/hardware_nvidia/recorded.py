"""A fake library that answers as a recorded machine did."""

import json
from pathlib import Path
from typing import Any

from tests.hardware_nvidia.fake_nvml import FakeLibrary
from tests.hardware_nvidia.gpus import MIB, FakeGpu, FakeProcess, MigProfile

RECORDINGS = sorted((Path(__file__).parents[1] / "recordings").glob("nvidia-*.json"))


def read_recording(path: Path) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return recorded


def library_of(recorded: dict[str, Any]) -> FakeLibrary:
    old = any(device["memory"]["reserved"] is None for device in recorded["devices"] if "error" not in device)
    return FakeLibrary(
        [_gpu(device) for device in recorded["devices"]],
        driver=recorded["driver"],
        missing=frozenset({"nvmlDeviceGetMemoryInfo_v2"} if old else ()),
    )


def _gpu(device: dict[str, Any]) -> FakeGpu:
    if "error" in device:
        return FakeGpu(name="lost", uuid="GPU-lost", total_bytes=1, lost=True)
    gpu = FakeGpu(
        name=device["name"],
        uuid=device["uuid"],
        total_bytes=device["memory"]["total"],
        reserved_bytes=device["memory"]["reserved"] or 0,
        minor=device["minor"],
        bus_id=device["bus_id"],
        cores=_value(device["cores"]),
        capability=tuple(device["compute_capability"]),
        compute_mode=device["compute_mode"],
        utilization=_value(device["utilization_percent"]),
        profiles=tuple(_profile(one) for one in device["profiles"]),
        mig_on=bool(_value(device["mig_mode"]) and device["mig_mode"][0]),
        tells_placements_when_off=all(isinstance(one["placements"], list) for one in device["profiles"]),
    )
    for one in device["instances"]:
        gpu.make(one["kind"], one["start"])
    gpu.processes = [FakeProcess(one["pid"], one["memory_bytes"], instance=one["gpu_instance"]) for one in device["processes"]]
    return gpu


def _profile(one: dict[str, Any]) -> MigProfile:
    placements = _value(one["placements"]) or [[0, 1]]
    return MigProfile(
        number=one["number"],
        id=one["id"],
        kind=one["kind"],
        slices=one["slices"],
        most=one["most"],
        multiprocessors=one["multiprocessors"],
        memory_mb=one["memory_bytes"] // MIB,
        starts=tuple(start for start, _ in placements),
        size=placements[0][1],
    )


def _value(answer: Any) -> Any:
    return None if isinstance(answer, dict) and "error" in answer else answer
