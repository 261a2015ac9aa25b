"""Reloading the amdgpu driver, which puts a requested memory mode into effect and stops all GPU work on the machine."""

import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from aimgpu.errors import HardwareFailed, NotAllowed
from aimgpu.hardware.amd.command import CommandRunner, run_command
from aimgpu.hardware.amd.smi import AmdSmi
from aimgpu.hardware.amd.sysfs import Sysfs

_SYS_MODULE = 16  # number of the capability CAP_SYS_MODULE
_STEP_SECONDS = 180.0


class ReloadWay(StrEnum):
    """How a memory mode that amd-smi was given comes into effect, by ROCm generation."""

    BY_ITSELF = "by itself"  # 6.x: `amd-smi set -M` reloads
    SMI_RESET = "amd-smi reset -r"  # 7.0 to 7.11
    MODPROBE = "modprobe"  # since 7.12, and whenever the kernel's file was written


def reload_way(rocm: tuple[int, int] | None) -> ReloadWay:
    """An unknown version gets the way that does not depend on the tool."""
    if rocm is None or rocm >= (7, 12):
        return ReloadWay.MODPROBE
    return ReloadWay.SMI_RESET if rocm >= (7, 0) else ReloadWay.BY_ITSELF


class DriverReloader(Protocol):
    """Unloads and loads the driver."""

    def check(self) -> None:
        """Raises NotAllowed if this process could not reload the driver. Changes nothing."""

    def reload(self) -> None:
        """Returns when the driver is live again. Raises NotAllowed or HardwareFailed."""


class ModprobeReloader:
    """With modprobe, as root."""

    def __init__(
        self,
        sysfs: Sysfs,
        run: CommandRunner = run_command,
        *,
        proc: Path = Path("/proc"),
        seconds: float = _STEP_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sysfs = sysfs
        self._run = run
        self._proc = proc
        self._seconds = seconds
        self._sleep = sleep

    def check(self) -> None:
        """Raises NotAllowed where it could not be done."""
        status = (self._proc / "self" / "status").read_text(encoding="utf-8")
        effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
        if not effective >> _SYS_MODULE & 1:
            raise NotAllowed(
                "this process may not load kernel modules, so it cannot reload the driver",
                hint="Run as root on the host, or give the container --cap-add=SYS_MODULE -v /lib/modules:/lib/modules.",
            )

    def reload(self) -> None:
        """Raises PartitionBusy or HardwareFailed."""
        for step in (["modprobe", "-r", "amdgpu"], ["modprobe", "amdgpu"]):
            outcome = self._run(step, timeout_seconds=self._seconds)
            if outcome.status != 0:
                reported = (outcome.text.strip().splitlines() or ["no reason given"])[-1]
                raise HardwareFailed(
                    f"the driver reload failed at `{' '.join(step)}`: {reported}",
                    hint="Stop all GPU work (also monitoring and display servers), then reload the driver by hand.",
                )
        wait_until_live(self._sysfs, self._seconds, self._sleep)


class SmiReloader:
    """`amd-smi reset -r`, of ROCm 7.0 to 7.11."""

    def __init__(self, smi: AmdSmi, sysfs: Sysfs, *, seconds: float = _STEP_SECONDS) -> None:
        self._smi = smi
        self._sysfs = sysfs
        self._seconds = seconds

    def check(self) -> None:
        """The tool checks for itself."""

    def reload(self) -> None:
        """Raises PartitionBusy or HardwareFailed."""
        outcome = self._smi.call("reset", "-r", answer="y\n", seconds=self._seconds)
        if outcome.status != 0:
            reported = (outcome.text.strip().splitlines() or ["no reason given"])[-1]
            raise HardwareFailed(f"the driver reload failed: {reported}", hint="Stop all GPU work, then reload by hand.")
        wait_until_live(self._sysfs, self._seconds, time.sleep)


class SelfReload:
    """ROCm 6: the tool reloads the driver while it sets the mode, so this only waits."""

    def __init__(self, sysfs: Sysfs, *, seconds: float = _STEP_SECONDS) -> None:
        self._sysfs = sysfs
        self._seconds = seconds

    def check(self) -> None:
        """The tool checks for itself."""

    def reload(self) -> None:
        """Raises PartitionBusy or HardwareFailed."""
        wait_until_live(self._sysfs, self._seconds, time.sleep)


def choose_reloader(smi: AmdSmi, sysfs: Sysfs) -> DriverReloader:
    """For changes that go through amd-smi: what its generation needs after `set -M`."""
    match reload_way(smi.read_version()):
        case ReloadWay.BY_ITSELF:
            return SelfReload(sysfs)
        case ReloadWay.SMI_RESET:
            return SmiReloader(smi, sysfs)
        case ReloadWay.MODPROBE:
            return ModprobeReloader(sysfs)


def wait_until_live(sysfs: Sysfs, seconds: float, sleep: Callable[[float], None], pause: float = 0.5) -> None:
    """Until the module says so, for at most `seconds`."""
    for _ in range(max(1, round(seconds / pause))):
        if sysfs.read("module/amdgpu/initstate") == "live":
            return
        sleep(pause)
    raise HardwareFailed(
        f"the amdgpu driver did not come back within {seconds:g}s", hint="Look at the kernel log; a reboot may be needed."
    )
