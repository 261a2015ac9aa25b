"""Changes the MIG layout of one GPU: only the instances that differ are touched, and a failure is undone."""

import ctypes
from collections.abc import Callable
from typing import Any

from aimgpu.errors import AimGpuError, HardwareFailed, LayoutNotApplied, PartitionBusy, UnknownLayout
from aimgpu.hardware.nvidia.devices import mig_layout, read_device
from aimgpu.hardware.nvidia.facts import Gpu
from aimgpu.hardware.nvidia.instances import (
    MigInstance,
    OfferedProfile,
    compute_instance_handles,
    compute_profiles,
    instance_handles,
    placeable,
    read_instances,
    read_offered_profiles,
)
from aimgpu.hardware.nvidia.mig import WHOLE, Placed, find_layout, layout_name
from aimgpu.hardware.nvidia.nvml import IN_USE, NvmlFailure, translate
from aimgpu.hardware.nvidia.usage import describe

_ON, _OFF = 1, 0
_Undo = tuple[str, Callable[[], object]]  # what it brings back, and how


class MigChange:
    """One change of one GPU. `undo` holds what leads back, newest last."""

    def __init__(self, gpu: Gpu, wanted: str) -> None:
        self._gpu = gpu
        self._wanted = wanted
        self._undo: list[_Undo] = []
        self.expected = wanted  # the name that it should have then

    def apply(self) -> None:
        """Apply the layout, or restore the earlier one and raise."""
        try:
            self._change()
        except (NvmlFailure, AimGpuError) as error:
            left = self._roll_back()
            if isinstance(error, AimGpuError) and not left:
                raise
            raise self._not_applied(error, left) from error

    def _change(self) -> None:
        mode = self._gpu.mig_mode()
        if self._wanted == WHOLE:
            if mode is not None and mode[0]:
                self._become_whole()
            return
        if mode is None:
            raise UnknownLayout(f"{self._gpu.uuid} ({self._gpu.name()}) has no MIG", hint="Its only layout is: whole.")
        if not mode[0]:
            known = placeable(read_offered_profiles(self._gpu))
            if known:  # some drivers report placements before MIG is on: refuse before anything is touched
                find_layout(self._wanted, known)
            self._refuse_if_held(None)
            self._set_mode(_ON)
        self._become()

    def _become_whole(self) -> None:
        self._refuse_if_held(None)
        for instance in read_instances(self._gpu, read_offered_profiles(self._gpu)):
            self._destroy(instance)
        self._set_mode(_OFF)

    def _become(self) -> None:
        offered = read_offered_profiles(self._gpu)
        placed = find_layout(self._wanted, placeable(offered))
        self.expected = layout_name(placed)
        existing = read_instances(self._gpu, offered)
        staying = {one.placed for one in existing if one.usable and one.placed in placed}
        leaving = [one for one in existing if one.placed not in staying]
        self._refuse_if_held(frozenset(one.id for one in leaving))
        for instance in leaving:
            self._destroy(instance)
        for one in placed:
            if one not in staying:
                self._create(one, next(profile for profile in offered if profile.kind == one.kind))

    def _refuse_if_held(self, gpu_instances: frozenset[int] | None) -> None:
        """None: nothing at all may run on this GPU."""
        held = [process for process in self._gpu.processes() if gpu_instances is None or process.gpu_instance in gpu_instances]
        if held:
            who = ", ".join(describe(process) for process in held)
            raise PartitionBusy(
                f"cannot set {self._wanted} on {self._gpu.uuid}: {len(held)} process{'es hold' if len(held) > 1 else ' holds'}"
                f" what must go: {who}",
                hint="Stop them, or let `aimgpu partition apply` drain what it started.",
                page_hint="Stop them. Models that aimgpu started are drained first.",
            )

    def _set_mode(self, mode: int) -> None:
        nvml, handle = self._gpu.nvml, self._gpu.handle
        self._undo.append(("MIG mode", lambda: self._restore_mode(_OFF if mode else _ON)))
        status = nvml.call("nvmlDeviceSetMigMode", handle, mode)
        now = self._gpu.mig_mode()
        if status or now is None or now[0] != bool(mode):
            raise LayoutNotApplied(
                f"MIG mode of {self._gpu.uuid} does not change before the GPU is reset (NVML status {status})",
                hint="Stop whatever uses the GPU (dcgm and nvsm too) and reset it, or reboot, then try again.",
            )

    def _restore_mode(self, before: int) -> None:
        if self._gpu.mig_mode() != (bool(before), bool(before)):
            self._gpu.nvml.call("nvmlDeviceSetMigMode", self._gpu.handle, before)

    def _destroy(self, instance: MigInstance) -> None:
        """An instance that was cut up comes back as one: its compute instances are not remembered."""
        profile, handle, placed = self._find(instance)
        self._undo.append((str(placed), lambda: self._bring_back(placed, profile)))
        self._remove(handle)

    def _create(self, placed: Placed, profile: OfferedProfile) -> None:
        handle = self._make(placed, profile)
        self._undo.append((f"no {placed}", lambda: self._remove(handle)))
        self._fill(handle, profile)

    def _make(self, placed: Placed, profile: OfferedProfile) -> Any:  # noqa: ANN401 - a handle of NVML
        nvml, size = self._gpu.nvml, dict(profile.placements or ()).get(placed.start, 0)
        place = nvml.module.c_nvmlGpuInstancePlacement_t(start=placed.start, size=size)
        name = "nvmlDeviceCreateGpuInstanceWithPlacement"
        return nvml.call(name, self._gpu.handle, profile.id, ctypes.byref(place))

    def _fill(self, handle: Any, profile: OfferedProfile) -> None:  # noqa: ANN401 - a handle of NVML
        """One compute instance over the whole GPU instance."""
        nvml = self._gpu.nvml
        full = [info for info in compute_profiles(nvml, handle) if info.sliceCount == profile.slices]
        if not full:
            raise LayoutNotApplied(f"{profile.kind} offers no full compute instance", hint="Update the driver.")
        nvml.call("nvmlGpuInstanceCreateComputeInstance", handle, full[0].id)

    def _remove(self, handle: Any) -> None:  # noqa: ANN401 - a handle of NVML
        for compute_instance in compute_instance_handles(self._gpu.nvml, handle):
            self._gpu.nvml.call("nvmlComputeInstanceDestroy", compute_instance)
        self._gpu.nvml.call("nvmlGpuInstanceDestroy", handle)

    def _bring_back(self, placed: Placed, profile: OfferedProfile) -> None:
        """A full instance here again, whether it was destroyed, only emptied, or not touched yet."""
        for handle in instance_handles(self._gpu, profile.id, profile.most):
            if self._gpu.nvml.call("nvmlGpuInstanceGetInfo", handle).placement.start == placed.start:
                if not compute_instance_handles(self._gpu.nvml, handle):
                    self._fill(handle, profile)
                return
        self._fill(self._make(placed, profile), profile)

    def _find(self, instance: MigInstance) -> tuple[OfferedProfile, Any, Placed]:
        for profile in read_offered_profiles(self._gpu):
            if profile.kind == instance.kind:
                for handle in instance_handles(self._gpu, profile.id, profile.most):
                    info = self._gpu.nvml.call("nvmlGpuInstanceGetInfo", handle)
                    if info.id == instance.id:
                        return profile, handle, Placed(kind=profile.kind, start=info.placement.start)
        raise LayoutNotApplied(f"instance {instance.id} of {self._gpu.uuid} vanished", hint="Someone else changes it too.")

    def _roll_back(self) -> list[str]:
        """Undo the changes, newest first. One that fails does not stop the others; returns those that failed."""
        left = []
        while self._undo:
            what, undo = self._undo.pop()
            try:
                undo()
            except (NvmlFailure, AimGpuError) as error:
                left.append(f"{what}: {error}")
        return left

    def _not_applied(self, error: Exception, left: list[str]) -> AimGpuError:
        message = f"cannot set {self._wanted} on {self._gpu.uuid}"
        if isinstance(error, NvmlFailure) and not left:
            if error.code == IN_USE:
                message += f" ({self._holders()})"
            known = translate(error, message)
            if type(known) is not HardwareFailed:
                return known
        undone = "; ".join(left)
        return LayoutNotApplied(
            f"{message}: {error}. It is {self._read_back()} now" + (f", what was before is not back: {undone}" if left else ""),
            hint=getattr(error, "hint", None) or "Look at dmesg, then try again.",
        )

    def _holders(self) -> str:
        who = ", ".join(describe(process) for process in self._gpu.processes())
        return f"held by {who}" if who else "NVML lists no process; dcgm, nvsm or a display may hold it"

    def _read_back(self) -> str:
        try:
            mode = self._gpu.mig_mode()
            if mode is None or not mode[0]:
                return WHOLE
            return mig_layout(self._gpu.uuid, read_instances(self._gpu, read_offered_profiles(self._gpu))).name
        except NvmlFailure as failure:
            return f"unreadable ({failure})"


def change_layout(gpu: Gpu, wanted: str) -> None:
    """Raises PartitionBusy, UnknownLayout, NotAllowed or LayoutNotApplied; then nothing has changed, or the error says what."""
    change = MigChange(gpu, wanted.strip().lower())
    change.apply()
    read = read_device(gpu).layout.name
    if read != change.expected:
        raise LayoutNotApplied(
            f"{gpu.uuid} was asked to become {change.expected} and is {read}",
            hint="The change was accepted and did not take effect. Look at dmesg, then try again.",
        )
