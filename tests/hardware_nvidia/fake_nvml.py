# ruff: noqa: N802 - the methods are C functions, named and called as NVIDIA does
"""A libnvidia-ml.so that is not there: the real nvidia-ml-py runs on top of it.

`FakeLibrary` has the C functions as methods, with C's calling convention: handles and out-parameters in, return code out. A
function that an old driver lacks is simply not found, as with the real library. MIG follows NVIDIA's rules (user guide,
"Supported MIG Profiles" and `nvidia-smi mig -lgipp`): places that may not overlap, compute instances inside GPU instances,
nothing destroyed while it is in use.
"""

import ctypes
import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tests.hardware_nvidia.gpus import FakeComputeInstance, FakeGpu, FakeInstance, FakeProcess, MigProfile

from aimgpu.hardware.nvidia.nvml import Nvml

SUCCESS = 0
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
GPU_IS_LOST = 15
IN_USE = 19
INSUFFICIENT_RESOURCES = 23

_NONE = 0xFFFFFFFF
_UNKNOWN_BYTES = 0xFFFFFFFFFFFFFFFF


@dataclass
class Fault:
    """The `at`-th call of a function (from 1) returns `code`; `times` calls in a row do so, None: all from there on."""

    function: str
    code: int
    at: int = 1
    times: int | None = 1

    def strikes(self, count: int) -> bool:
        return count >= self.at and (self.times is None or count < self.at + self.times)


@dataclass
class MigDevice:
    """What a MIG device handle points to."""

    gpu: FakeGpu
    instance: FakeInstance
    compute: FakeComputeInstance

    @property
    def uuid(self) -> str:
        return f"MIG-{self.gpu.uuid[4:]}-{self.instance.id}-{self.compute.id}"


@dataclass
class FakeLibrary:
    gpus: list[FakeGpu]
    driver: str = "580.159.04"
    init_code: int = SUCCESS
    missing: frozenset[str] = frozenset()  # functions that this driver does not have
    faults: list[Fault] = field(default_factory=list)
    privileged: bool = True
    calls: list[str] = field(default_factory=list)
    on_call: Callable[[str], None] | None = None  # sees every call before it is served

    def __post_init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._names: dict[tuple[int, ...], int] = {}
        self._numbers = itertools.count(0x1000)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return object.__getattribute__(self, name)
        if name in self.missing or not hasattr(type(self), name):
            raise AttributeError(name)
        return _Function(name, object.__getattribute__(self, name), self)

    # --- library and devices ---

    def nvmlInitWithFlags(self, flags: int) -> int:
        return self.init_code

    def nvmlShutdown(self) -> int:
        return SUCCESS

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = self.driver.encode()
        return SUCCESS

    def nvmlSystemGetNVMLVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = f"13.{self.driver}".encode()
        return SUCCESS

    def nvmlErrorString(self, code: Any) -> bytes:
        return b"error"

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return _put(count, len(self.gpus))

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        if index.value >= len(self.gpus):
            return INVALID_ARGUMENT
        gpu = self.gpus[index.value]
        return GPU_IS_LOST if gpu.lost else self._give(handle, gpu)

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        wanted = uuid.value.decode()
        for gpu in self.gpus:
            by_uuid: dict[str, object] = {gpu.uuid: gpu, **{device.uuid: device for device in _mig_devices(gpu)}}
            if wanted in by_uuid:
                return GPU_IS_LOST if gpu.lost else self._give(handle, by_uuid[wanted])
        return NOT_FOUND

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = self._at(handle).uuid.encode()
        return SUCCESS

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        subject = self._at(handle)
        if isinstance(subject, MigDevice):
            whole = subject.compute.slices == subject.instance.profile.slices
            cut = "" if whole else f"{subject.compute.slices}c."
            buffer.value = f"{subject.gpu.name} MIG {cut}{subject.instance.profile.kind}".encode()
        else:
            buffer.value = subject.name.encode()
        return SUCCESS

    def nvmlDeviceGetMinorNumber(self, handle: Any, minor: Any) -> int:
        return _put(minor, self._gpu(handle).minor)

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:
        info._obj.busId = self._gpu(handle).bus_id.encode()
        return SUCCESS

    def nvmlDeviceGetNumGpuCores(self, handle: Any, cores: Any) -> int:
        gpu = self._gpu(handle)
        return NOT_SUPPORTED if gpu.cores is None else _put(cores, gpu.cores)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        capability = self._gpu(handle).capability
        _put(major, capability[0])
        return _put(minor, capability[1])

    def nvmlDeviceGetComputeMode(self, handle: Any, mode: Any) -> int:
        return _put(mode, self._gpu(handle).compute_mode)

    def nvmlDeviceGetRemappedRows(self, handle: Any, *counts: Any) -> int:
        remapped = self._gpu(handle).remapped
        if remapped is None:
            return NOT_SUPPORTED
        for count, value in zip(counts, remapped, strict=True):
            _put(count, value)
        return SUCCESS

    def nvmlDeviceGetMemoryInfo(self, handle: Any, info: Any) -> int:
        if self._hides_memory(handle):
            return NO_PERMISSION
        total, reserved, used = self._memory(handle)
        info._obj.total, info._obj.used, info._obj.free = total, used + reserved, total - used - reserved
        return SUCCESS

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, info: Any) -> int:
        if self._hides_memory(handle):
            return NO_PERMISSION
        total, reserved, used = self._memory(handle)
        info._obj.total, info._obj.reserved, info._obj.used, info._obj.free = total, reserved, used, total - used - reserved
        return SUCCESS

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        gpu = self._gpu(handle)
        if gpu.utilization is None or gpu.mig_on:  # NVML does not tell it in MIG mode
            return NOT_SUPPORTED
        rates._obj.gpu = gpu.utilization
        return SUCCESS

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, array: Any) -> int:
        return self._list_processes(handle, count, array, "compute")

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Any, count: Any, array: Any) -> int:
        return self._list_processes(handle, count, array, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, array: Any) -> int:
        return self._list_processes(handle, count, array, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, array: Any) -> int:
        return self._list_processes(handle, count, array, "mps")

    # --- MIG ---

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        gpu = self._gpu(handle)
        if not gpu.profiles:
            return NOT_SUPPORTED
        _put(current, int(gpu.mig_on))
        return _put(pending, int(gpu.mig_pending if gpu.mig_pending is not None else gpu.mig_on))

    def nvmlDeviceSetMigMode(self, handle: Any, mode: int, status: Any) -> int:
        gpu = self._gpu(handle)
        if not gpu.profiles:
            return NOT_SUPPORTED
        if not self.privileged:
            return NO_PERMISSION
        if gpu.mode_needs_reset and bool(mode) != gpu.mig_on:
            gpu.mig_pending = bool(mode)
            return _put(status, IN_USE)
        if gpu.processes and bool(mode) != gpu.mig_on:
            return IN_USE
        if not mode and gpu.instances:
            return IN_USE
        gpu.mig_on, gpu.mig_pending = bool(mode), None
        return _put(status, SUCCESS)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        return _put(count, 7 if self._gpu(handle).profiles else 0)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, mig: Any) -> int:
        devices = _mig_devices(self._gpu(handle))
        return self._give(mig, devices[index.value]) if index.value < len(devices) else NOT_FOUND

    def nvmlDeviceGetGpuInstanceId(self, handle: Any, number: Any) -> int:
        return _put(number, self._at(handle).instance.id)

    def nvmlDeviceGetComputeInstanceId(self, handle: Any, number: Any) -> int:
        return _put(number, self._at(handle).compute.id)

    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Any, number: int, info: Any) -> int:
        gpu = self._gpu(handle)
        profile = next((one for one in gpu.profiles if one.number == number), None)
        if profile is None or not (gpu.mig_on or gpu.tells_profiles):
            return NOT_SUPPORTED
        out = info._obj
        out.id, out.sliceCount, out.instanceCount = profile.id, profile.slices, profile.most
        out.multiprocessorCount, out.memorySizeMB = profile.multiprocessors, profile.memory_mb
        return SUCCESS

    def nvmlDeviceGetGpuInstanceProfileInfoV(self, handle: Any, number: int, info: Any) -> int:
        code = FakeLibrary.nvmlDeviceGetGpuInstanceProfileInfo(self, handle, number, info)
        if code == SUCCESS:
            profile = next(one for one in self._gpu(handle).profiles if one.number == number)
            info._obj.name = f"MIG {profile.kind}".encode()
        return code

    def nvmlDeviceGetGpuInstancePossiblePlacements_v2(self, handle: Any, profile_id: int, array: Any, count: Any) -> int:
        gpu = self._gpu(handle)
        if not gpu.mig_on and not gpu.tells_placements_when_off:
            return NOT_SUPPORTED
        profile = _profile(gpu, profile_id)
        if profile is None:
            return INVALID_ARGUMENT
        if array is not None:
            for position, start in enumerate(profile.starts):
                array[position].start, array[position].size = start, profile.size
        return _put(count, len(profile.starts))

    def nvmlDeviceGetGpuInstances(self, handle: Any, profile_id: int, array: Any, count: Any) -> int:
        gpu = self._gpu(handle)
        if not gpu.mig_on:
            return NOT_SUPPORTED
        if not self.privileged:
            return NO_PERMISSION
        found = [one for one in gpu.instances if one.profile.id == profile_id]
        for position, instance in enumerate(found):
            array[position] = ctypes.cast(ctypes.c_void_p(self._name(instance)), array._type_)
        return _put(count, len(found))

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, handle: Any, profile_id: int, placement: Any, out: Any) -> int:
        gpu = self._gpu(handle)
        if not self.privileged:
            return NO_PERMISSION
        profile, start = _profile(gpu, profile_id), placement._obj.start
        if not gpu.mig_on or profile is None:
            return NOT_SUPPORTED
        if start not in profile.starts or placement._obj.size != profile.size:
            return INVALID_ARGUMENT
        if not gpu.fits(profile, start):
            return INSUFFICIENT_RESOURCES
        return self._give(out, gpu.add(profile, start))

    def nvmlGpuInstanceDestroy(self, handle: Any) -> int:
        instance = self._at(handle)
        gpu = self._owner(instance)
        if gpu is None:
            return INVALID_ARGUMENT
        if instance.computes or gpu.uses(instance):
            return IN_USE
        gpu.instances.remove(instance)
        return SUCCESS

    def nvmlGpuInstanceGetInfo(self, handle: Any, info: Any) -> int:
        instance = self._at(handle)
        if self._owner(instance) is None:
            return INVALID_ARGUMENT
        info._obj.id, info._obj.profileId = instance.id, instance.profile.id
        info._obj.placement.start, info._obj.placement.size = instance.start, instance.profile.size
        return SUCCESS

    def nvmlGpuInstanceGetComputeInstanceProfileInfoV(self, handle: Any, number: int, engine: int, info: Any) -> int:
        slices = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}.get(number)
        instance = self._at(handle)
        if slices is None or slices > instance.profile.slices:
            return NOT_SUPPORTED
        info._obj.id, info._obj.sliceCount, info._obj.instanceCount = number, slices, instance.profile.slices // slices
        return SUCCESS

    def nvmlGpuInstanceGetComputeInstances(self, handle: Any, profile_id: int, array: Any, count: Any) -> int:
        slices = (1, 2, 3, 4, 7)[profile_id]
        found = [one for one in self._at(handle).computes if one.slices == slices]
        for position, compute in enumerate(found):
            array[position] = ctypes.cast(ctypes.c_void_p(self._name(compute)), array._type_)
        return _put(count, len(found))

    def nvmlGpuInstanceCreateComputeInstance(self, handle: Any, profile_id: int, out: Any) -> int:
        instance, slices = self._at(handle), (1, 2, 3, 4, 7)[profile_id]
        if sum(one.slices for one in instance.computes) + slices > instance.profile.slices:
            return INSUFFICIENT_RESOURCES
        return self._give(out, instance.add_compute(slices))

    def nvmlComputeInstanceDestroy(self, handle: Any) -> int:
        compute = self._at(handle)
        for gpu in self.gpus:
            for instance in gpu.instances:
                if compute in instance.computes:
                    if gpu.uses(instance):
                        return IN_USE
                    instance.computes.remove(compute)
                    return SUCCESS
        return INVALID_ARGUMENT

    def nvmlComputeInstanceGetInfo_v2(self, handle: Any, info: Any) -> int:
        compute = self._at(handle)
        info._obj.id, info._obj.placement.size = compute.id, compute.slices
        return SUCCESS

    # --- handles ---

    def _name(self, subject: object) -> int:
        """The same handle for the same thing; `_objects` keeps it alive, so its id is not used again."""
        key = (id(subject.instance), id(subject.compute)) if isinstance(subject, MigDevice) else (id(subject),)
        if key not in self._names:
            self._names[key] = next(self._numbers)
            self._objects[self._names[key]] = subject
        return self._names[key]

    def _give(self, out: Any, subject: object) -> int:
        ctypes.c_void_p.from_buffer(out._obj).value = self._name(subject)
        return SUCCESS

    def _at(self, handle: Any) -> Any:
        return self._objects[ctypes.cast(handle, ctypes.c_void_p).value or 0]

    def _gpu(self, handle: Any) -> FakeGpu:
        subject = self._at(handle)
        return subject.gpu if isinstance(subject, MigDevice) else subject

    def _owner(self, instance: FakeInstance) -> FakeGpu | None:
        return next((gpu for gpu in self.gpus if instance in gpu.instances), None)

    def _hides_memory(self, handle: Any) -> bool:
        """In MIG mode the sums of a GPU are for privileged users."""
        subject = self._at(handle)
        return isinstance(subject, FakeGpu) and subject.mig_on and not self.privileged

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        subject = self._at(handle)
        if isinstance(subject, MigDevice):
            return subject.instance.profile.memory_mb << 20, 0, subject.gpu.used_by(subject.instance)
        return subject.total_bytes, subject.reserved_bytes, subject.used_by(None)

    def _list_processes(self, handle: Any, count: Any, array: Any, kind: str) -> int:
        found: list[FakeProcess] = [one for one in self._gpu(handle).processes if one.kind == kind]
        room = count._obj.value
        _put(count, len(found))
        if len(found) > room:
            return INSUFFICIENT_SIZE
        for position, process in enumerate(found):
            array[position].pid = process.pid
            array[position].usedGpuMemory = _UNKNOWN_BYTES if process.memory_bytes is None else process.memory_bytes
            array[position].gpuInstanceId = _NONE if process.instance is None else process.instance
            array[position].computeInstanceId = _NONE if process.instance is None else 0
        return SUCCESS


class _Function:
    """One C function: notes the call, lets scripted faults strike, answers GPU_IS_LOST for a GPU that is gone."""

    def __init__(self, name: str, plain: Callable[..., int], library: FakeLibrary) -> None:
        self.plain = plain
        self._name = name
        self._library = library

    def __call__(self, *args: Any) -> int:
        library = self._library
        library.calls.append(self._name)
        if library.on_call is not None:
            library.on_call(self._name)
        for fault in library.faults:
            if fault.function == self._name and fault.strikes(library.calls.count(self._name)):
                return fault.code
        if args and self._points_to_lost(args[0]):
            return GPU_IS_LOST
        return self.plain(*args)

    def _points_to_lost(self, handle: Any) -> bool:
        if not isinstance(handle, ctypes._Pointer):
            return False
        subject = self._library._objects.get(ctypes.cast(handle, ctypes.c_void_p).value or 0)
        gpu = subject.gpu if isinstance(subject, MigDevice) else subject
        return isinstance(gpu, FakeGpu) and gpu.lost


def load_pynvml(library: object) -> ModuleType:
    """A private copy of nvidia-ml-py that has this library loaded, so that tests do not share its global state."""
    found = importlib.util.find_spec("pynvml")
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location(f"pynvml_copy_{id(library)}", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up while it is loaded
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    module.nvmlLib = library  # type: ignore[attr-defined]
    return module


def nvml_over(library: FakeLibrary) -> Nvml:
    return Nvml(lambda: load_pynvml(library))


def _mig_devices(gpu: FakeGpu) -> list[MigDevice]:
    return [MigDevice(gpu, instance, compute) for instance in gpu.instances for compute in instance.computes]


def _profile(gpu: FakeGpu, profile_id: int) -> MigProfile | None:
    return next((one for one in gpu.profiles if one.id == profile_id), None)


def _put(out: Any, value: int) -> int:
    out._obj.value = value
    return SUCCESS
