"""The files that show what one process has on each GPU, kept open: reading them again is one call each instead of three."""

import os
import resource
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import repeat

from aimgpu.hardware.amd.sysfs import Sysfs, parse_int

PROCESSES = "class/kfd/kfd/proc"
_VRAM = "vram_"
_MOST_BYTES = 64
_PART_OF_LIMIT = 4


class Descriptors:
    """How many files may stay open: by default a quarter of what the process may open, as it has more to do than this."""

    def __init__(self, most: int | None = None) -> None:
        self._left = most if most is not None else resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _PART_OF_LIMIT

    def take(self, count: int) -> bool:
        if count > self._left:
            return False
        self._left -= count
        return True

    def give_back(self, count: int) -> None:
        self._left += count


class VramFiles:
    """Bytes by gpu_id of one process: 0 where it only sees the GPU, or where the kernel does not answer."""

    def __init__(self, sysfs: Sysfs, pid: int, descriptors: Descriptors) -> None:
        self._sysfs = sysfs
        self._directory = f"{PROCESSES}/{pid}"
        self._descriptors = descriptors
        names = [name[len(_VRAM) :] for name in sysfs.list(self._directory) if name.startswith(_VRAM)]
        ids = [int(name) for name in names if name.isdecimal()]
        self._files: dict[int, int] = {}
        if descriptors.take(len(ids)):
            self._files = dict(zip(ids, sysfs.open_all(self._directory, map(_name, ids)), strict=False))
            descriptors.give_back(len(ids) - len(self._files))
        self._texts = dict.fromkeys(ids, b"")
        self._held: list[int] = []
        self.bytes_by_gpu = dict.fromkeys(ids, 0)
        self.refresh(ids)

    def refresh(self, stale: Iterable[int], busy: Collection[int] = ()) -> dict[int, int]:
        """Reads again the files of `stale` GPUs, and of `busy` ones where it had bytes; by how much each changed."""
        texts, before = self._texts, self.bytes_by_gpu
        ids = [gpu_id for gpu_id in stale if gpu_id in before]
        if busy:
            ids += [gpu_id for gpu_id in self._held if gpu_id in busy]
        changed = [(gpu_id, text) for gpu_id, text in zip(ids, self._read(ids), strict=True) if text != texts[gpu_id]]
        if not changed:
            return {}
        texts.update(changed)
        now = {gpu_id: parse_int(text.decode("ascii", "replace")) or 0 for gpu_id, text in changed}
        self.bytes_by_gpu = before | now
        if any(bool(size) != bool(before[gpu_id]) for gpu_id, size in now.items()):
            self._held = [gpu_id for gpu_id, size in self.bytes_by_gpu.items() if size]
        return {gpu_id: size - before[gpu_id] for gpu_id, size in now.items()}

    def close(self) -> None:
        """Close what is held open."""
        files, self._files = self._files, {}
        for descriptor in files.values():
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.give_back(len(files))

    def __del__(self) -> None:
        self.close()

    def _read(self, ids: list[int]) -> list[bytes]:
        if not self._files:
            return self._sysfs.read_all(self._directory, map(_name, ids))
        try:
            return list(map(os.pread, map(self._files.__getitem__, ids), repeat(_MOST_BYTES), repeat(0)))
        except OSError:  # the process ended just now, or one of its GPUs is hidden or in reset
            return self._sysfs.read_all(self._directory, map(_name, ids))


def _name(gpu_id: int) -> str:
    return f"{_VRAM}{gpu_id}"
