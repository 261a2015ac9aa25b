"""Physical AMD GPUs as the kernel's files describe them: the PCI device with its modes, and its KFD nodes."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from aimgpu.hardware.amd import modes
from aimgpu.hardware.amd.sysfs import Sysfs, parse_int, parse_modes
from aimgpu.hardware.amd.topology import KfdNode, read_nodes

DRIVER = "bus/pci/drivers/amdgpu"
COMPUTE_MODE = "current_compute_partition"
MEMORY_MODE = "current_memory_partition"
ALLOCATION_MODE = "compute_partition_mem_alloc_mode"
_DEFAULT_MODE = "SPX"  # every GPU has it; a driver without a list of all modes names it only where it is available now
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdGpu:
    """`compute_mode` is None where the device cannot be partitioned or does not say."""

    bdf: str
    unique_id: int | None
    pci_device: int
    product_name: str | None
    vram_bytes: int | None
    compute_mode: str | None
    memory_mode: str | None
    compute_modes: tuple[str, ...]  # valid under the current memory mode
    all_compute_modes: tuple[str, ...]
    memory_modes: tuple[str, ...]
    uncapped: bool  # each partition may take all memory of its range: the sizes that KFD reports add up to more than there is
    nodes: tuple[KfdNode, ...]

    @property
    def id(self) -> str:
        """Stays the same over reboots and mode changes."""
        return f"amd-{self.unique_id:016x}" if self.unique_id else f"amd-{self.bdf}"

    @property
    def partition_numbers(self) -> tuple[int, ...]:
        """Of each node: as the driver reports, else counted."""
        reported = tuple(node.partition for node in self.nodes)
        return (
            reported if self.compute_mode is not None and len(set(reported)) == len(reported) else tuple(range(len(reported)))
        )

    @property
    def xccs(self) -> int:
        """Of the whole GPU, where its modes show it; else of what can be seen."""
        return modes.xccs_of(self.all_compute_modes) or sum(node.xccs or 0 for node in self.nodes)

    @property
    def is_partly_hidden(self) -> bool:
        """Whether it has partitions that cannot be seen from here: a device cgroup shows a container its own alone."""
        if self.compute_mode is None or not self.nodes:
            return False
        expected = modes.partition_count(self.compute_mode, self.xccs) or 0
        return len(self.nodes) < max(expected, *(number + 1 for number in self.partition_numbers))

    @property
    def hive_id(self) -> int:
        """Of the GPUs that it is linked to; None where it stands alone."""
        return self.nodes[0].hive_id if self.nodes else 0

    @property
    def path(self) -> str:
        """Its folder under /sys."""
        return device_path(self.bdf)


def device_path(bdf: str) -> str:
    """The folder of a GPU under /sys."""
    return f"bus/pci/devices/{bdf}"


def read_gpus(sysfs: Sysfs, before: Iterable[AmdGpu] = ()) -> tuple[AmdGpu, ...]:
    """Ordered by PCI address, as AMD's tools do.

    Of a GPU that was read `before` and has the same KFD nodes, the mode files are left alone: reading them may wake the GPU,
    and every change of a mode changes the nodes, whose ids are checksums over it.
    """
    known = {gpu.bdf: gpu for gpu in before if gpu.nodes and gpu.compute_mode is not None}
    by_bdf: dict[str, list[KfdNode]] = {}
    for node in read_nodes(sysfs):
        by_bdf.setdefault(node.bdf, []).append(node)
    # Without KFD a GPU can be listed but not computed on; with KFD, one that has no node here is hidden from us.
    bdfs = sorted(by_bdf) or sorted(name for name in sysfs.list(DRIVER) if _BDF.fullmatch(name))
    found = (_read_gpu(sysfs, bdf, tuple(by_bdf.get(bdf, ())), known.get(bdf)) for bdf in bdfs)
    return tuple(gpu for gpu in found if gpu is not None)


def _read_gpu(sysfs: Sysfs, bdf: str, nodes: tuple[KfdNode, ...], before: AmdGpu | None) -> AmdGpu | None:
    path = device_path(bdf)
    pci_device = sysfs.read_int(f"{path}/device")
    vram = sysfs.read_int(f"{path}/mem_info_vram_total")
    if pci_device is None or (vram is None and not nodes):  # gone between two reads, or no amdgpu device
        return None
    uncapped = sysfs.read(f"{path}/{ALLOCATION_MODE}") == "ALL"
    if before is not None and before.nodes == nodes:
        return replace(before, vram_bytes=vram, uncapped=uncapped)
    unique = sysfs.read(f"{path}/unique_id")
    current = sysfs.read(f"{path}/{COMPUTE_MODE}")
    memory = parse_modes(sysfs.read(f"{path}/{MEMORY_MODE}"))
    available = parse_modes(sysfs.read(f"{path}/available_compute_partition"))
    compute = parse_modes(current)
    return AmdGpu(
        bdf=bdf,
        unique_id=parse_int(f"0x{unique}") if unique else None,
        pci_device=pci_device,
        product_name=sysfs.read(f"{path}/product_name") or None,
        vram_bytes=vram,
        compute_mode=compute[0] if compute else None,
        memory_mode=memory[0] if memory else None,
        compute_modes=available,
        all_compute_modes=parse_modes(sysfs.read(f"{path}/compute_partition_config/supported_xcp_configs"))
        or tuple(dict.fromkeys((*available, *([_DEFAULT_MODE] if available else [])))),
        memory_modes=parse_modes(sysfs.read(f"{path}/available_memory_partition")),
        uncapped=uncapped,
        nodes=nodes,
    )
