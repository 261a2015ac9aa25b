"""Processes that KFD knows, with the bytes that each has on each partition."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aimgpu.hardware.amd.sysfs import Sysfs
from aimgpu.hardware.amd.vram import PROCESSES, Descriptors, VramFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class KfdProcess:
    """A process holds every GPU that it can see, with bytes on it or not: each of them refuses a mode change."""

    pid: int
    name: str | None
    bytes_by_gpu: dict[int, int]  # by gpu_id; 0 where it only sees the GPU


def read_processes(sysfs: Sysfs) -> tuple[KfdProcess, ...]:
    return ProcessBook(sysfs, Descriptors(0)).read(())


def process_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:  # gone, or in another pid namespace
        return None


class ProcessBook:
    """Processes as last read. Each has a file for every partition that it sees, so only what may have changed is read again.

    That is: what a new process has, and what all of them have on the GPUs that the caller calls stale.
    """

    def __init__(self, sysfs: Sysfs, descriptors: Descriptors | None = None) -> None:
        self._sysfs = sysfs
        self._descriptors = descriptors or Descriptors()
        self._entries: dict[int, _Entry] = {}

    def read(self, stale: Sequence[int]) -> tuple[KfdProcess, ...]:
        """`stale`: gpu_ids whose use of memory changed."""
        pids = sorted(int(name) for name in self._sysfs.list(PROCESSES) if name.isdecimal())
        known, self._entries = self._entries, {}
        for pid in pids:
            entry = self._entry(pid, known.pop(pid, None), stale)
            if entry is not None:
                self._entries[pid] = entry
        for ended in known.values():
            ended.files.close()
        return tuple(entry.process for entry in self._entries.values())

    def _entry(self, pid: int, known: "_Entry | None", stale: Sequence[int]) -> "_Entry | None":
        stamp = self._sysfs.stamp(f"{PROCESSES}/{pid}")
        if known is not None and known.stamp == stamp:
            if known.files.refresh(stale):
                known.process = replace(known.process, bytes_by_gpu=known.files.bytes_by_gpu)
            return known
        if known is not None:  # a new process with the number of an old one
            known.files.close()
        if stamp is None:  # ended since it was listed
            return None
        files = VramFiles(self._sysfs, pid, self._descriptors)
        return _Entry(stamp, files, KfdProcess(pid=pid, name=process_name(pid), bytes_by_gpu=files.bytes_by_gpu))


@dataclass(slots=True)
class _Entry:
    stamp: object
    files: VramFiles
    process: KfdProcess
