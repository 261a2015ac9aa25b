"""What the kernel's files say of this machine's AMD GPUs, as JSON without anything that names the machine or its people.

A recording is a part of the /sys tree: path to text. Unique ids and hives are numbered in order of appearance, and so are pids;
serial numbers are not read. Played back through `RecordedSysfs`, the reader sees the machine again.
"""

import errno
import os
import platform
import re
from collections.abc import Iterable, Iterator
from typing import Any

from aimgpu.hardware.amd.devices import describe_devices
from aimgpu.hardware.amd.gpus import device_path, read_gpus
from aimgpu.hardware.amd.sysfs import Sysfs, parse_int
from aimgpu.hardware.amd.topology import GENERATION, NODES
from aimgpu.hardware.amd.vram import PROCESSES
from aimgpu.hardware.recordings import RecordedDevice

Json = dict[str, Any]

_MODULE = ("module/amdgpu/initstate", "module/amdgpu/version", GENERATION)
_PCI_FILES = (
    *("vendor", "device", "subsystem_vendor", "subsystem_device", "revision", "class", "unique_id", "product_name"),
    *("current_compute_partition", "available_compute_partition", "current_memory_partition", "available_memory_partition"),
    *("compute_partition_mem_alloc_mode", "compute_partition_config/supported_xcp_configs"),
    *("compute_partition_config/xcp_config", "compute_partition_config/supported_nps_configs"),
    *("mem_info_vram_total", "mem_info_vram_used", "mem_info_gtt_total", "gpu_busy_percent"),
)
_IDS = re.compile(r"^(unique_id|hive_id) (\d+)$", re.MULTILINE)
_FIRST_PID = 1001


class RecordedSysfs(Sysfs):
    """The files of a recording; nothing can be written to it."""

    def __init__(self, files: dict[str, str]) -> None:
        super().__init__()
        self._files = files

    def read(self, path: str) -> str | None:
        """The recorded text."""
        return self._files.get(path)

    def read_all(self, directory: str, names: Iterable[str]) -> list[bytes]:
        """The recorded texts."""
        return [(self.read(f"{directory}/{name}") or "").encode() for name in names]

    def open_all(self, directory: str, names: Iterable[str]) -> list[int]:  # noqa: ARG002 - none of them is a file
        """None: nothing of a recording is a file."""
        return []

    def list(self, path: str) -> list[str]:
        """Names below a recorded folder."""
        prefix = f"{path}/"
        return sorted({name[len(prefix) :].partition("/")[0] for name in self._files if name.startswith(prefix)})

    def why_not_writable(self, path: str) -> OSError | None:
        """A recording is read-only."""
        return OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def stamp(self, path: str) -> object:
        """Never changes."""
        return path

    def write(self, path: str, text: str) -> None:
        """Always refused."""
        raise OSError(errno.EROFS, f"{os.strerror(errno.EROFS)}: {path} ({text})")


def record_amd(sysfs: Sysfs | None = None) -> Json | None:
    """Every AMD GPU that can be seen here; None where there is none."""
    sysfs = sysfs or Sysfs()
    gpus = read_gpus(sysfs)
    if not gpus:
        return None
    mask = _Mask()
    files = {path: mask.text(path, text) for path, text in _read_files(sysfs, [gpu.bdf for gpu in gpus])}
    files |= dict(_read_processes(sysfs))
    driver = files.get("module/amdgpu/version") or f"of Linux {platform.release().partition('-')[0]}"
    names = [device.market_name or device.product for device in describe_devices(gpus)]
    return {"vendor": "amd", "driver": driver, "devices": [{"name": name} for name in names], "files": files}


def summarize_amd(recorded: Json) -> tuple[RecordedDevice, ...]:
    """The kinds of GPU in a recording, each once."""
    devices = describe_devices(read_gpus(RecordedSysfs(recorded["files"])))
    found = {
        RecordedDevice(
            product=device.product,
            market_name=device.market_name or device.product,
            driver=recorded["driver"],
            memory_bytes=device.memory_bytes,
            layouts=tuple(layout.name for layout in device.layouts),
        )
        for device in devices
    }
    return tuple(sorted(found, key=lambda device: device.product))


class _Mask:
    """Equal ids stay equal, different ones different; nothing else is left of them."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {0: 0}

    def text(self, path: str, text: str) -> str:
        if path.endswith("/unique_id"):
            unique = parse_int(f"0x{text}")
            return "" if unique is None else f"{self._number(unique):016x}"  # text that is not a number may name anything
        return _IDS.sub(lambda match: f"{match[1]} {self._number(int(match[2]))}", text)

    def _number(self, value: int) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def _read_files(sysfs: Sysfs, bdfs: list[str]) -> Iterator[tuple[str, str]]:
    nodes = sorted((name for name in sysfs.list(NODES) if name.isdecimal()), key=int)
    paths = [
        *_MODULE,
        *(f"{device_path(bdf)}/{name}" for bdf in bdfs for name in _PCI_FILES),
        *(f"{NODES}/{node}/{name}" for node in nodes for name in ("gpu_id", "properties")),
        *(f"{NODES}/{node}/mem_banks/{bank}/properties" for node in nodes for bank in sysfs.list(f"{NODES}/{node}/mem_banks")),
    ]
    for path in paths:
        text = sysfs.read(path)
        if text is not None:
            yield path, text


def _read_processes(sysfs: Sysfs) -> Iterator[tuple[str, str]]:
    pids = sorted((name for name in sysfs.list(PROCESSES) if name.isdecimal()), key=int)
    for number, pid in enumerate(pids, _FIRST_PID):
        for name in sysfs.list(f"{PROCESSES}/{pid}"):
            text = sysfs.read(f"{PROCESSES}/{pid}/{name}") if name.startswith("vram_") else None
            if text is not None:
                yield f"{PROCESSES}/{number}/{name}", text
