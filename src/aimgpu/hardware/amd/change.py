"""Changing the layout of an AMD GPU: checked before, read back after, never believed."""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from aimgpu.domain import Device, Layout
from aimgpu.errors import (
    AimGpuError,
    DriverReloadNeeded,
    LayoutNotApplied,
    PartitionBusy,
    UnknownDevice,
    UnknownLayout,
)
from aimgpu.hardware.amd import modes
from aimgpu.hardware.amd.control_path import ControlPath, ControlPathChooser
from aimgpu.hardware.amd.devices import describe_devices
from aimgpu.hardware.amd.gpus import COMPUTE_MODE, MEMORY_MODE, AmdGpu, read_gpus
from aimgpu.hardware.amd.processes import process_name, read_processes
from aimgpu.hardware.amd.products import is_virtual_function
from aimgpu.hardware.amd.refusals import explain_errno
from aimgpu.hardware.amd.smi import AmdSmi
from aimgpu.hardware.amd.sysfs import Sysfs


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a process that just ended to release its GPU, and for a change to become visible."""

    tries: int = 10
    pause_seconds: float = 0.3
    sleep: Callable[[float], None] = time.sleep


class AmdPartitioner:
    """Changes modes, verifies them, and restores the old ones where that fails."""

    def __init__(
        self,
        sysfs: Sysfs,
        choose_path: ControlPathChooser,
        *,
        patience: Patience | None = None,
        smi: AmdSmi | None = None,
    ) -> None:
        self._sysfs = sysfs
        self._choose_path = choose_path
        self._patience = patience or Patience()
        self._smi = smi or AmdSmi()

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        """See hardware.protocols.Partitioner."""
        gpu, device = self._find(device_id)
        compute, memory = modes.wanted_modes(layout_name, gpu.memory_mode or "")
        wanted = modes.layout_name(compute, memory)
        if wanted == device.layout.name:
            return device
        layout = next((layout for layout in device.layouts if layout.name == wanted), None)
        if layout is None:
            if is_virtual_function(gpu.pci_device):
                raise explain_errno(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), gpu, layout_name)
            names = ", ".join(known.name for known in device.layouts)
            raise UnknownLayout(
                f"{device_id} ({device.product}) cannot have the layout {layout_name!r}", hint=f"It offers: {names}."
            )
        if memory == gpu.memory_mode:
            self._set_compute_mode(gpu, compute)
        else:
            self._change_memory_mode(gpu, compute, memory, reload_driver=reload_driver)
        return self._read_back(device_id, layout)

    def _change_memory_mode(self, gpu: AmdGpu, compute: str, memory: str, *, reload_driver: bool) -> None:
        before = read_gpus(self._sysfs)
        if not reload_driver:
            others = [other.id for other in before if other.bdf != gpu.bdf and gpu.hive_id and other.hive_id == gpu.hive_id]
            raise DriverReloadNeeded(
                f"{memory} on {gpu.id} takes a driver reload, which stops all GPU work on this machine",
                hint="Pass --reload-driver when it may stop." + (f" It changes {', '.join(others)} too." if others else ""),
                page_hint="Choose to reload the driver when it may stop.",
            )
        path = self._choose_path(gpu, MEMORY_MODE)
        path.reloader.check()
        self._wait_until_free(before, memory)
        path.writer.set_memory_mode(gpu, memory)
        try:
            path.reloader.reload()
        except AimGpuError as error:
            raise self._withdraw(gpu, path, error) from error
        self._settle(before, compute)
        now = self._look_at(gpu.bdf)
        if now is not None and now.memory_mode != memory:
            kept = LayoutNotApplied(
                f"{gpu.id} was asked to become {memory}, and is {now.compute_mode}/{now.memory_mode} after the driver reload",
                hint="The driver may not have been reloaded, or the firmware refused. Look at the kernel log.",
            )
            raise self._withdraw(gpu, path, kept)

    def _wait_until_free(self, gpus: tuple[AmdGpu, ...], mode: str) -> None:
        """Nothing may run on any GPU; what was just stopped may take a moment to be gone."""
        for _ in range(self._patience.tries):
            if not _holders(self._sysfs, gpus):
                return
            self._patience.sleep(self._patience.pause_seconds)
        raise self._busy(gpus, mode)

    def _withdraw(self, gpu: AmdGpu, path: ControlPath, error: AimGpuError) -> AimGpuError:
        """A request that stays would take effect at the next reload by any program; without a driver there is none."""
        now = self._look_at(gpu.bdf)
        if gpu.memory_mode is None or now is None or now.memory_mode is None:
            return error
        try:
            path.writer.set_memory_mode(gpu, gpu.memory_mode)
        except AimGpuError as second:
            kept = f"{error.message}; the request stays and takes effect at the next reload ({second.message})"
            return type(error)(kept, hint=error.hint)
        return error

    def _settle(self, before: tuple[AmdGpu, ...], compute: str) -> None:
        """After a reload the driver chose the compute modes: set the wanted one where it changes, else the earlier one."""
        for was in before:
            now = self._look_at(was.bdf)
            if now is None:
                continue
            mode = was.compute_mode if now.memory_mode == was.memory_mode else compute
            if mode in now.compute_modes and mode != now.compute_mode:
                self._set_compute_mode(now, mode)

    def _look_at(self, bdf: str) -> AmdGpu | None:
        return next((gpu for gpu in read_gpus(self._sysfs) if gpu.bdf == bdf), None)

    def _set_compute_mode(self, gpu: AmdGpu, mode: str) -> None:
        path = self._choose_path(gpu, COMPUTE_MODE)
        for attempt in range(1, self._patience.tries + 1):
            try:
                path.writer.set_compute_mode(gpu, mode)
            except PartitionBusy as error:
                if attempt == self._patience.tries:
                    raise self._busy((gpu,), mode) from error
                self._patience.sleep(self._patience.pause_seconds)
            else:
                return

    def _read_back(self, device_id: str, wanted: Layout) -> Device:
        """KFD takes a moment to show its new nodes; what is read in the end is what is reported."""
        read: Device | None = None
        for _ in range(self._patience.tries):
            read = next((device for _, device in self._read() if device.id == device_id), None)
            if read is not None and _has_become(read, wanted):
                return read
            self._patience.sleep(self._patience.pause_seconds)
        now = f"is {read.layout.name} with {len(read.layout.partitions)} partitions" if read else "is gone"
        raise LayoutNotApplied(
            f"{device_id} was asked to become {wanted.name} and {now}", hint="Look at the kernel log before trying again."
        )

    def _busy(self, gpus: tuple[AmdGpu, ...], mode: str) -> PartitionBusy:
        held = _holders(self._sysfs, gpus) or [(pid, process_name(pid)) for pid in self._smi.find_pids()]
        names = ", ".join(f"pid {pid} ({name})" if name else f"pid {pid}" for pid, name in held)
        where = ", ".join(gpu.id for gpu in gpus)
        return PartitionBusy(
            f"cannot set {mode} on {where}: held by {names or 'a process that cannot be seen from here'}",
            hint="Stop them, or let `aimgpu partition apply` drain what it started. A process holds every GPU that it can see.",
            page_hint="Stop them. Models that aimgpu started are drained first.",
        )

    def _find(self, device_id: str) -> tuple[AmdGpu, Device]:
        found = self._read()
        for gpu, device in found:
            if device.id == device_id:
                return gpu, device
        names = ", ".join(device.id for _, device in found) or "none"
        raise UnknownDevice(f"there is no AMD GPU {device_id}", hint=f"GPUs here: {names}.")

    def _read(self) -> list[tuple[AmdGpu, Device]]:
        gpus = read_gpus(self._sysfs)
        return list(zip(gpus, describe_devices(gpus), strict=True))


def _has_become(device: Device, wanted: Layout) -> bool:
    """A layout that could not be foretold is complete when it has any partition."""
    there = len(device.layout.partitions)
    return device.layout.name == wanted.name and there == (len(wanted.partitions) or there)


def _holders(sysfs: Sysfs, gpus: tuple[AmdGpu, ...]) -> list[tuple[int, str | None]]:
    ids = {node.gpu_id for gpu in gpus for node in gpu.nodes}
    return [(process.pid, process.name) for process in read_processes(sysfs) if ids.intersection(process.bytes_by_gpu)]
