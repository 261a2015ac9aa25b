"""Two ways to ask for a mode: the kernel's file, or `amd-smi set`.

That a call returned means only that nothing refused it: the caller reads back.
"""

from typing import Protocol

from aimgpu.errors import AimGpuError, LayoutNotApplied, PartitionBusy
from aimgpu.hardware.amd import smi_json
from aimgpu.hardware.amd.command import CommandResult
from aimgpu.hardware.amd.gpus import COMPUTE_MODE, MEMORY_MODE, AmdGpu
from aimgpu.hardware.amd.refusals import explain_errno, explain_status
from aimgpu.hardware.amd.smi import AmdSmi
from aimgpu.hardware.amd.sysfs import Sysfs

_SET_SECONDS = 60.0
_SELF_RELOADING_SECONDS = 200.0  # ROCm 6 reloads the driver inside `set -M`, for up to 140 s


class ModeWriter(Protocol):
    """One way to change the modes of a GPU."""

    def set_compute_mode(self, gpu: AmdGpu, mode: str) -> None:
        """Raises PartitionBusy (without names), NotAllowed, HardwareUnavailable or LayoutNotApplied."""

    def set_memory_mode(self, gpu: AmdGpu, mode: str) -> None:
        """Ask for it, for the whole hive; in effect after a driver reload. Raises as `set_compute_mode`."""


class SysfsWriter:
    """Through the kernel's own files."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs

    def set_compute_mode(self, gpu: AmdGpu, mode: str) -> None:
        """Raises what the driver or the tool refused."""
        self._write(gpu, COMPUTE_MODE, mode)

    def set_memory_mode(self, gpu: AmdGpu, mode: str) -> None:
        """Takes effect at the next driver reload."""
        self._write(gpu, MEMORY_MODE, mode)

    def _write(self, gpu: AmdGpu, name: str, mode: str) -> None:
        try:
            self._sysfs.write(f"{gpu.path}/{name}", mode)
        except OSError as error:
            raise explain_errno(error, gpu, mode) from error


class SmiWriter:
    """`instead_of`: why the kernel's file could not be written, where the tool is the second choice."""

    def __init__(self, smi: AmdSmi, *, instead_of: OSError | None = None) -> None:
        self._smi = smi
        self._instead_of = instead_of

    def set_compute_mode(self, gpu: AmdGpu, mode: str) -> None:
        """Raises what the driver or the tool refused."""
        self._set(gpu, mode, "-C", seconds=_SET_SECONDS)

    def set_memory_mode(self, gpu: AmdGpu, mode: str) -> None:
        """Takes effect at the next driver reload."""
        self._set(gpu, mode, "-M", answer="y\n", seconds=_SELF_RELOADING_SECONDS)

    def _set(self, gpu: AmdGpu, mode: str, option: str, *, seconds: float, answer: str = "") -> None:
        try:
            outcome = self._smi.call("set", "-g", gpu.bdf, option, mode, "--json", answer=answer, seconds=seconds)
            _check(outcome, gpu, mode)
        except PartitionBusy:
            raise
        except AimGpuError as error:
            if self._instead_of is None:
                raise
            first = explain_errno(self._instead_of, gpu, mode)
            raise type(first)(f"{first.message}; amd-smi could not either: {error.message}", hint=first.hint) from error


def _check(outcome: CommandResult, gpu: AmdGpu, mode: str) -> None:
    """`set -M` ends with 0 when it failed: the words count first, then the status."""
    failure = smi_json.find_failure(outcome.text)
    if failure is not None:
        raise explain_status(*failure, gpu, mode)
    if outcome.status != 0:
        last = (outcome.text.strip().splitlines() or ["it printed nothing"])[-1]
        raise LayoutNotApplied(f"amd-smi could not set {mode} on {gpu.id}: {last}", hint="Run it by hand to see more.")
