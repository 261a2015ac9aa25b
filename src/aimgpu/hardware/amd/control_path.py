"""Which way a change goes: the kernel's files, or `amd-smi` where this process may not write them."""

from dataclasses import dataclass
from typing import Protocol

from aimgpu.hardware.amd.gpus import MEMORY_MODE, AmdGpu
from aimgpu.hardware.amd.reload import DriverReloader, choose_reloader
from aimgpu.hardware.amd.smi import AmdSmi
from aimgpu.hardware.amd.sysfs import Sysfs
from aimgpu.hardware.amd.writers import ModeWriter, SmiWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPath:
    """What asks for a mode, and what then puts a memory mode into effect."""

    writer: ModeWriter
    reloader: DriverReloader


class ControlPathChooser(Protocol):
    def __call__(self, gpu: AmdGpu, file: str) -> ControlPath:
        """For a change of this mode file of this GPU."""


class FilesElseTool:
    """The files where they can be written. The tool may have rights, or know a place, that this process does not."""

    def __init__(self, files: ControlPath, sysfs: Sysfs, smi: AmdSmi) -> None:
        self._files = files
        self._sysfs = sysfs
        self._smi = smi

    def __call__(self, gpu: AmdGpu, file: str) -> ControlPath:
        if not self._smi.is_installed:
            return self._files
        denied = self._sysfs.why_not_writable(f"{gpu.path}/{file}")
        if denied is None:
            return self._files
        reloader = choose_reloader(self._smi, self._sysfs) if file == MEMORY_MODE else self._files.reloader
        return ControlPath(writer=SmiWriter(self._smi, instead_of=denied), reloader=reloader)
