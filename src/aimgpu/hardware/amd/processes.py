"""Processes that KFD knows, with the bytes that each has on each partition."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
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
    """Processes that the compute driver knows."""
    return ProcessBook(sysfs, Descriptors(0)).read(())


def process_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    """None for one that ended or may not be read."""
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:  # gone, or in another pid namespace
        return None


class ProcessBook:
    """Processes as last read. Each has a file for every partition that it sees, so only what may have changed is read again.

    That is: what a new process has, and of the others what they have on the GPUs that the caller names.
    """

    def __init__(self, sysfs: Sysfs, descriptors: Descriptors | None = None) -> None:
        self._sysfs = sysfs
        self._descriptors = descriptors or Descriptors()
        self._entries: dict[int, _Entry] = {}
        self.touched: dict[int, Collection[int]] = {}  # gpu_ids by pid, whose bytes the last read found changed
        self.growth: Counter[int] = Counter()  # bytes by gpu_id, all processes together, since the read before

    def read(self, stale: Sequence[int], busy: Collection[int] = ()) -> tuple[KfdProcess, ...]:
        """`stale`: gpu_ids of which every process is asked; `busy`: of which only those that had bytes there are."""
        pids = sorted(int(name) for name in self._sysfs.list(PROCESSES) if name.isdecimal())
        self.touched, self.growth = {}, Counter()
        known, self._entries = self._entries, {}
        for pid in pids:
            entry = self._entry(pid, known.pop(pid, None))
            if entry is not None:
                self._entries[pid] = entry
        for ended in known.values():
            self._end(ended)
        return self._refresh(stale, busy, new=frozenset(self.touched))

    def read_more(self, stale: Sequence[int]) -> tuple[KfdProcess, ...]:
        """Read these GPUs too, for every process of the last read."""
        return self._refresh(stale)

    def _refresh(self, stale: Sequence[int], busy: Collection[int] = (), new: Collection[int] = ()) -> tuple[KfdProcess, ...]:
        for pid, entry in self._entries.items():
            changed = entry.files.refresh(stale, busy) if pid not in new else None
            if changed:
                entry.process = KfdProcess(pid=pid, name=entry.process.name, bytes_by_gpu=entry.files.bytes_by_gpu)
                self.touched[pid] = {*self.touched.get(pid, ()), *changed}
                self.growth.update(changed)
        return tuple([entry.process for entry in self._entries.values()])

    def _entry(self, pid: int, known: "_Entry | None") -> "_Entry | None":
        stamp = self._sysfs.stamp(f"{PROCESSES}/{pid}")
        if known is not None and known.stamp == stamp:
            return known
        if known is not None:  # a new process with the number of an old one
            self._end(known)
        if stamp is None:  # ended since it was listed
            return None
        files = VramFiles(self._sysfs, pid, self._descriptors)
        self.touched[pid] = files.bytes_by_gpu.keys()
        self.growth.update(files.bytes_by_gpu)
        return _Entry(stamp, files, KfdProcess(pid=pid, name=process_name(pid), bytes_by_gpu=files.bytes_by_gpu))

    def _end(self, entry: "_Entry") -> None:
        self.growth.subtract(entry.files.bytes_by_gpu)
        entry.files.close()


@dataclass(slots=True)
class _Entry:
    stamp: object
    files: VramFiles
    process: KfdProcess
