"""One GPU as NVML reports it: questions with typed answers, None where there is none."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aimgpu.hardware.nvidia.nvml import Nvml

_NO_INSTANCE = 0xFFFFFFFF

_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
_LIST_VERSIONS = ("_v3", "_v2")  # drivers before R510 know the second only

# FP32 units of one multiprocessor, CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions".
_CORES_PER_MULTIPROCESSOR = {(7, 0): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 9): 128, (9, 0): 128, (10, 0): 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """`usable_bytes` is what can be given away: the driver's own reserve is taken off where the driver reports it."""

    total_bytes: int
    reserved_bytes: int | None
    used_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Without what the driver keeps."""
        return self.total_bytes - (self.reserved_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process as NVML reports it."""

    pid: int
    memory_bytes: int | None
    gpu_instance: int | None


class Gpu:
    """Questions to one device. Every method raises NvmlFailure when the device is gone."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self.nvml = nvml
        self.index = index
        self.handle: Any = nvml.call("nvmlDeviceGetHandleByIndex", index)
        self.uuid: str = nvml.call("nvmlDeviceGetUUID", self.handle)

    def name(self) -> str | None:
        """As NVIDIA sells it."""
        return as_text(self.nvml.ask("nvmlDeviceGetName", self.handle))

    def minor(self) -> int | None:
        """Of its device file."""
        return _number(self.nvml.ask("nvmlDeviceGetMinorNumber", self.handle))

    def bus_id(self) -> str | None:
        """Its PCI address."""
        info = self.nvml.ask("nvmlDeviceGetPciInfo", self.handle)
        return None if info is None else as_text(info.busId)

    def cores(self) -> int | None:
        """CUDA cores."""
        return _number(self.nvml.ask("nvmlDeviceGetNumGpuCores", self.handle))

    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor version."""
        pair = self.nvml.ask("nvmlDeviceGetCudaComputeCapability", self.handle)
        return None if pair is None else (int(pair[0]), int(pair[1]))

    def multiprocessors(self) -> int | None:
        """SMs; None where the driver does not report them."""
        cores, capability = self.cores(), self.compute_capability()
        each = _CORES_PER_MULTIPROCESSOR.get(capability) if capability else None
        return cores // each if cores and each else None

    def remapping(self) -> tuple[bool, bool]:
        """Whether rows with uncorrectable errors wait for a reset to be replaced, and whether some could not be."""
        rows = self.nvml.ask("nvmlDeviceGetRemappedRows", self.handle)
        return (False, False) if rows is None else (bool(rows[2]), bool(rows[3]))

    def compute_mode(self) -> int | None:
        """Whether processes may share it."""
        return _number(self.nvml.ask("nvmlDeviceGetComputeMode", self.handle))

    def memory(self) -> MemoryFacts:
        """Total, reserved and used bytes."""
        return read_memory(self.nvml, self.handle)

    def utilization_percent(self) -> int | None:
        """Of the last sample period."""
        rates = self.nvml.ask("nvmlDeviceGetUtilizationRates", self.handle)
        return None if rates is None else _number(rates.gpu)

    def mig_mode(self) -> tuple[bool, bool] | None:
        """Whether MIG is on now, and whether it will be after a reset; None: this GPU has no MIG."""
        modes = self.nvml.ask("nvmlDeviceGetMigMode", self.handle)
        return None if modes is None else (bool(modes[0]), bool(modes[1]))

    def processes(self) -> tuple[ProcessFacts, ...]:
        """Compute, graphics and MPS clients, each pid once for each instance."""
        found: dict[tuple[int, int | None], ProcessFacts] = {}
        for raw in self._running():
            process = _process(raw)
            key = (process.pid, process.gpu_instance)
            if key not in found or found[key].memory_bytes is None:
                found[key] = process
        return tuple(found[key] for key in sorted(found, key=lambda key: (key[0], key[1] or 0)))

    def lists_processes(self) -> bool:
        """False where neither version of the question is known: processes are then not listed, only their bytes counted."""
        return any(self.nvml.ask(f"{_LISTS[0]}{version}", self.handle) is not None for version in _LIST_VERSIONS)

    def _running(self) -> Iterator[Any]:
        for function in _LISTS:
            answers = (self.nvml.ask(f"{function}{version}", self.handle) for version in _LIST_VERSIONS)
            yield from next((answer for answer in answers if answer is not None), ())


def read_memory(nvml: Nvml, handle: Any) -> MemoryFacts:  # noqa: ANN401 - a handle of NVML
    """Version 2 reports the reserve apart from the use; older drivers count it as used."""
    version = getattr(nvml.module, "nvmlMemory_v2", None)
    info = nvml.ask("nvmlDeviceGetMemoryInfo", handle, version=version) if version else None
    if info is not None:
        return MemoryFacts(total_bytes=info.total, reserved_bytes=info.reserved, used_bytes=info.used)
    info = nvml.call("nvmlDeviceGetMemoryInfo", handle)
    return MemoryFacts(total_bytes=info.total, reserved_bytes=None, used_bytes=info.used)


def _process(raw: Any) -> ProcessFacts:  # noqa: ANN401 - a structure of NVML
    instance = getattr(raw, "gpuInstanceId", None)
    return ProcessFacts(
        pid=int(raw.pid),
        memory_bytes=raw.usedGpuMemory,
        gpu_instance=None if instance in (None, _NO_INSTANCE) else int(instance),
    )


def as_text(value: Any) -> str | None:  # noqa: ANN401 - bytes or str, by version of pynvml
    """NVML answers in bytes or text, depending on its version."""
    if isinstance(value, bytes):
        return value.decode(errors="replace") or None
    return str(value) if value else None


def _number(value: Any) -> int | None:  # noqa: ANN401 - a C number
    return None if value is None else int(value)
