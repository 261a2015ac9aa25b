"""Processes that KFD knows, with the bytes that each has on each partition."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from aimgpu.hardware.amd.sysfs import Sysfs

PROCESSES = "class/kfd/kfd/proc"
_VRAM = "vram_"


@dataclass(frozen=True, slots=True, kw_only=True)
class KfdProcess:
    """A process holds every GPU that it can see, with bytes on it or not: each of them refuses a mode change."""

    pid: int
    name: str | None
    bytes_by_gpu: dict[int, int]  # by gpu_id; 0 where it only sees the GPU


def read_processes(sysfs: Sysfs) -> tuple[KfdProcess, ...]:
    pids = sorted(int(name) for name in sysfs.list(PROCESSES) if name.isdecimal())
    return tuple(KfdProcess(pid=pid, name=process_name(pid), bytes_by_gpu=_read_bytes(sysfs, pid)) for pid in pids)


def process_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:  # gone, or in another pid namespace
        return None


def _read_bytes(sysfs: Sysfs, pid: int) -> dict[int, int]:
    path = f"{PROCESSES}/{pid}"
    names = [name for name in sysfs.list(path) if name.startswith(_VRAM) and name[len(_VRAM) :].isdecimal()]
    return {int(name[len(_VRAM) :]): size or 0 for name, size in zip(names, sysfs.read_ints(path, names), strict=True)}


class ProcessBook:
    """Processes as last read. Each has a file for every partition that it sees, so only what may have changed is read again.

    That is: what a new process has, and what all of them have on the GPUs that the caller calls stale.
    """

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._entries: dict[int, _Entry] = {}

    def read(self, stale: Iterable[int]) -> tuple[KfdProcess, ...]:
        """`stale`: gpu_ids whose use of memory changed."""
        ids = list(stale)
        pids = sorted(int(name) for name in self._sysfs.list(PROCESSES) if name.isdecimal())
        entries = {pid: self._entry(pid, ids) for pid in pids}
        self._entries = {pid: entry for pid, entry in entries.items() if entry is not None}
        return tuple(entry.process for entry in self._entries.values())

    def _entry(self, pid: int, stale: list[int]) -> "_Entry | None":
        path = f"{PROCESSES}/{pid}"
        stamp = self._sysfs.stamp(path)
        if stamp is None:  # ended since it was listed
            return None
        known = self._entries.get(pid)
        if known is None or known.stamp != stamp:  # a new process, perhaps with the number of an old one
            return _Entry(stamp, KfdProcess(pid=pid, name=process_name(pid), bytes_by_gpu=_read_bytes(self._sysfs, pid)))
        sizes = known.process.bytes_by_gpu
        ids = [gpu_id for gpu_id in stale if gpu_id in sizes]
        now = self._sysfs.read_ints(path, [f"{_VRAM}{gpu_id}" for gpu_id in ids]) if ids else ()
        changed = {gpu_id: size or 0 for gpu_id, size in zip(ids, now, strict=True) if (size or 0) != sizes[gpu_id]}
        return _Entry(stamp, replace(known.process, bytes_by_gpu=sizes | changed)) if changed else known


@dataclass(frozen=True, slots=True)
class _Entry:
    stamp: object
    process: KfdProcess
