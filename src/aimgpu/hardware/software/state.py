"""The state of the software GPU: what its driver measured, and how it should behave.

`native/software_gpu/gpu.h` describes the same bytes. The driver alone writes what is measured; the interposer does not know
the file, so a limit that was not kept shows here.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_DEVICES, MOST_PROCESSES, LOG = 64, 256, 8192
VARIABLE = "AIMGPU_SOFTWARE_GPU"
NAME = "software GPU"
_FLOCK = "hhxxxxqqixxxx"
_u64 = ctypes.c_uint64


class DriverProcess(ctypes.LittleEndianStructure):
    """One process that uses the software GPU."""

    _fields_ = (
        *((name, _u64) for name in ("pid", "used", "locked", "launches", "busy_ns")),
        ("used_on", _u64 * MOST_DEVICES),
    )


class Launch(ctypes.LittleEndianStructure):
    """One launch, in nanoseconds of the monotonic clock."""

    _fields_ = tuple((name, _u64) for name in ("pid", "at", "begins", "ends", "device", "kernel"))


class DriverState(ctypes.LittleEndianStructure):
    """`struct state` of gpu.h."""

    _fields_ = (
        *((name, _u64) for name in ("device_bytes", "used", "peak", "kernel_ns", "call_ns", "fail_after")),
        *((name, _u64) for name in ("allocations", "frees", "launches", "pool_grain", "context_bytes", "devices")),
        *((name, _u64) for name in ("block_launches", "entered", "events", "bad_streams", "bad_captures", "bad_contexts")),
        *((name, _u64) for name in ("bad_pools", "pool_scatters", "block_bytes", "stream_bytes", "counts", "pid_offset")),
        ("counting", _u64),
        *((name, _u64 * MOST_DEVICES) for name in ("free_at", "used_on", "bytes_of", "busy_ns")),
        ("arrived", _u64 * 64),
        ("processes", DriverProcess * MOST_PROCESSES),
        ("log", Launch * LOG),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeteredProcess:
    """What the driver measured of one live process."""

    pid: int
    used_bytes: Mapping[int, int]  # by device; the ones where it holds something
    launches: int
    busy_seconds: float


class SoftwareGpu:
    """The file of one software GPU, made where there is none."""

    def __init__(self, path: Path, *, device_bytes: Sequence[int] | None = None) -> None:
        """`device_bytes`: of each device, for a new one."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = ctypes.sizeof(DriverState)
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)
        self.state = DriverState.from_buffer(self._map)
        if device_bytes is not None:
            self.set_devices(device_bytes)

    def set_devices(self, sizes: Sequence[int]) -> None:
        """Give it devices of these sizes. The caller sees to it that nothing runs on it."""
        self.state.devices = len(sizes)
        self.state.device_bytes = max(sizes)
        for index in range(MOST_DEVICES):
            self.state.bytes_of[index] = sizes[index] if index < len(sizes) else 0

    def read_processes(self) -> tuple[MeteredProcess, ...]:
        """Those that live; what a dead one held is free, as the driver will find at its next call."""
        found = []
        for slot, one in enumerate(self.state.processes):
            if one.pid and (not one.locked or self._is_held(slot)):
                held = {device: size for device, size in enumerate(one.used_on) if size}
                found.append(
                    MeteredProcess(pid=one.pid, used_bytes=held, launches=one.launches, busy_seconds=one.busy_ns / 1e9)
                )
        return tuple(found)

    def read_used_bytes(self) -> tuple[int, ...]:
        """Of every device."""
        processes = self.read_processes()
        return tuple(sum(one.used_bytes.get(device, 0) for one in processes) for device in range(self.state.devices or 1))

    def close(self) -> None:
        """Unmap it."""
        del self.state
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._descriptor)

    def _is_held(self, slot: int) -> bool:
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, ctypes.sizeof(DriverState) + slot, 1, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, request)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
