"""Processes that KFD knows, with the bytes that each has on each partition."""

from dataclasses import dataclass
from pathlib import Path

from aimgpu.hardware.amd.sysfs import Sysfs, parse_int

PROCESSES = "class/kfd/kfd/proc"
_VRAM = "vram_"


@dataclass(frozen=True, slots=True, kw_only=True)
class KfdProcess:
    """A process holds every GPU that it can see, with bytes on it or not: each of them refuses a mode change."""

    pid: int
    bytes_by_gpu: dict[int, int]  # by gpu_id; 0 where it only sees the GPU


def read_processes(sysfs: Sysfs) -> tuple[KfdProcess, ...]:
    pids = sorted(int(name) for name in sysfs.list(PROCESSES) if name.isdecimal())
    return tuple(KfdProcess(pid=pid, bytes_by_gpu=_read_bytes(sysfs, pid)) for pid in pids)


def process_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:  # gone, or in another pid namespace
        return None


def _read_bytes(sysfs: Sysfs, pid: int) -> dict[int, int]:
    path = f"{PROCESSES}/{pid}"
    found: dict[int, int] = {}
    for name in sysfs.list(path):
        if name.startswith(_VRAM):
            gpu_id = parse_int(name[len(_VRAM) :])
            if gpu_id is not None:
                found[gpu_id] = sysfs.read_int(f"{path}/{name}") or 0
    return found
