"""The amdgpu driver's answers to reads and writes of its files, for GPUs that are not there."""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tests.hardware.emulation.emulated import EmulatedGpu, EmulatedProcess, TreeStyle
from tests.hardware.emulation.sysfs_tree import EmulatedMachine, Link, Tree, lay_out

from aimgpu.hardware.amd import modes
from aimgpu.hardware.amd.sysfs import Sysfs
from aimgpu.hardware.simulated import find_product

WRITABLE = ("current_compute_partition", "current_memory_partition", "xcp_config", "compute_partition_mem_alloc_mode")


class EmulatedKernel:
    """State in `machine`; `write` follows the driver's rules and errnos. `faults`: what a write to a file of this name does."""

    def __init__(self, parts: Sequence[str], style: TreeStyle | None = None) -> None:
        gpus = [EmulatedGpu(product=find_product(name), number=number) for number, name in enumerate(parts)]
        gpus = [replace(gpu, hive_id=gpu.hive_id + gpu.pci_device if gpu.product.linked else 0) for gpu in gpus]
        self.machine = EmulatedMachine(gpus=tuple(gpus), style=style or TreeStyle())
        self.pending: dict[int, str] = {}
        self.faults: dict[str, Callable[[], None]] = {}
        self.writes: list[tuple[str, str]] = []
        self._tree: Tree | None = None
        self._directories: dict[str, set[str]] | None = None

    @property
    def tree(self) -> Tree:
        if self._tree is None:
            self._tree = lay_out(self.machine)
        return self._tree

    @property
    def directories(self) -> dict[str, set[str]]:
        """Names in each directory."""
        if self._directories is None:
            found: dict[str, set[str]] = {"": set()}
            for path in self.tree:
                while path:
                    parent, _, name = path.rpartition("/")
                    found.setdefault(parent, set()).add(name)
                    path = parent  # noqa: PLW2901 - walking up
            self._directories = found
        return self._directories

    def change(self, **fields: object) -> None:
        """Replace fields of the machine."""
        self.machine = replace(self.machine, **fields)  # type: ignore[arg-type]
        self._tree = self._directories = None

    def change_gpu(self, number: int, **fields: object) -> None:
        gpus = [replace(gpu, **fields) if gpu.number == number else gpu for gpu in self.machine.gpus]  # type: ignore[arg-type]
        self.change(gpus=tuple(gpus), generation=self.machine.generation + 1)

    def add_process(self, pid: int, bytes_by_partition: dict[tuple[int, int], int]) -> None:
        self.change(processes=(*self.machine.processes, EmulatedProcess(pid=pid, bytes_by_partition=bytes_by_partition)))

    def end_processes(self) -> None:
        self.change(processes=())

    def write(self, path: str, text: str) -> None:
        real = self.resolve(path)
        content = self.tree.get(real)
        if not isinstance(content, str):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        name = real.rpartition("/")[2]
        if name in self.faults:
            self.faults[name]()
            return
        if name not in WRITABLE:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        self.writes.append((name, text.strip()))
        gpu = next(gpu for gpu in self.machine.gpus if gpu.bdf in real)
        match name:
            case "current_compute_partition":
                self._set_compute(gpu, text.strip().upper())
            case "current_memory_partition":
                self._request_memory(gpu, text.strip().upper())
            case "xcp_config":
                self._select(gpu, text.strip().upper())
            case "compute_partition_mem_alloc_mode":
                self.change_gpu(gpu.number, allocation_mode=text.strip().upper())

    def reload(self) -> None:
        """Unload and load: requests take effect, and the driver chooses compute modes."""
        if self.machine.processes:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        gpus = []
        for gpu in self.machine.gpus:
            memory = self.pending.get(gpu.number, gpu.memory_mode)
            gpus.append(replace(gpu, memory_mode=memory, compute_mode=modes.mode_after_reload(memory, gpu.chip)))
        self.pending.clear()
        self.change(gpus=tuple(gpus), selected={}, generation=self.machine.generation + 1)

    def resolve(self, path: str) -> str:
        """The path behind all links, as the kernel would walk it."""
        done = ""
        rest = [part for part in path.split("/") if part]
        while rest:
            part = rest.pop(0)
            done = os.path.normpath(f"{done}/{part}").strip("/")
            content = self.tree.get(done)
            if isinstance(content, Link):
                done, rest = "", [*content.target.split("/"), *rest]
        return done

    def _set_compute(self, gpu: EmulatedGpu, mode: str) -> None:
        if mode not in gpu.available_compute_modes:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if any(number == gpu.number for process in self.machine.processes for number, _ in process.bytes_by_partition):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        self.change_gpu(gpu.number, compute_mode=mode, allocation_mode="CAPPING")
        self.change(selected={key: value for key, value in self.machine.selected.items() if key != gpu.number})

    def _request_memory(self, gpu: EmulatedGpu, mode: str) -> None:
        if len(gpu.product.memory_modes) == 1:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if mode not in gpu.product.memory_modes:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        for other in self.machine.gpus:
            if other.number == gpu.number or (gpu.hive_id and other.hive_id == gpu.hive_id):
                self.pending[other.number] = mode

    def _select(self, gpu: EmulatedGpu, mode: str) -> None:
        if mode not in modes.compute_modes(gpu.chip.xccs):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.change(selected={**self.machine.selected, gpu.number: mode})


class TreeSysfs(Sysfs):
    """The kernel's files without a file system: the same door that the backend reads and writes real ones through."""

    def __init__(self, kernel: EmulatedKernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.before_read: Callable[[str], None] = lambda _: None
        self.read_only = False  # as /sys in a container

    def read(self, path: str) -> str | None:
        self.before_read(path)
        content = self.kernel.tree.get(self.kernel.resolve(path))
        return content.strip() if isinstance(content, str) else None

    def read_all(self, directory: str, names: Iterable[str]) -> list[bytes]:
        return [(self.read(f"{directory}/{name}") or "").encode() for name in names]

    def open_all(self, directory: str, names: Iterable[str]) -> list[int]:
        return []

    def list(self, path: str) -> list[str]:
        prefix = self.kernel.resolve(path) + "/"
        return sorted({name[len(prefix) :].partition("/")[0] for name in self.kernel.tree if name.startswith(prefix)})

    def why_not_writable(self, path: str) -> OSError | None:
        number = errno.EROFS if self.read_only else errno.ENOENT
        missing = not isinstance(self.kernel.tree.get(self.kernel.resolve(path)), str)
        return OSError(number, os.strerror(number)) if self.read_only or missing else None

    def stamp(self, path: str) -> object:
        return self.kernel.resolve(path)

    def write(self, path: str, text: str) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        self.kernel.write(path, text)


class KernelReloader:
    """Reloads the emulated driver where the real one would call modprobe."""

    def __init__(self, kernel: EmulatedKernel) -> None:
        self._kernel = kernel
        self.reloads = 0

    def check(self) -> None:
        """Always allowed."""

    def reload(self) -> None:
        self.reloads += 1
        self._kernel.reload()
