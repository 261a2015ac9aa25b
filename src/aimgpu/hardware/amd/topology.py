"""GPU nodes of KFD, the compute driver: one per partition, with its exact bytes and compute units."""

from dataclasses import dataclass

from aimgpu.hardware.amd.sysfs import Sysfs, parse_properties

NODES = "class/kfd/kfd/topology/nodes"
GENERATION = "class/kfd/kfd/topology/generation_id"
_LOCAL_HEAPS = (1, 2)  # public and private frame buffer
_AMD = 0x1002
_MOST_BANKS = 64  # real nodes have one or two


@dataclass(frozen=True, slots=True, kw_only=True)
class KfdNode:
    """A partition as the compute driver lists it."""

    number: int
    ordinal: int  # among the GPU nodes that can be seen: what ROCr counts by
    gpu_id: int  # changes with every mode change
    bdf: str  # of the physical GPU, function 0
    partition: int  # its number within the GPU; 0 for all of them with drivers that do not report
    compute_units: int | None
    xccs: int | None
    memory_bytes: int
    gfx_target: int
    pci_device: int
    render_minor: int
    unique_id: int
    hive_id: int


def read_nodes(sysfs: Sysfs) -> tuple[KfdNode, ...]:
    """In the order of their numbers. Nodes that vanish while being read, or that a device cgroup hides, are left out."""
    nodes: list[KfdNode] = []
    seen = 0  # ROCr counts every GPU node, also one that we cannot use
    for number in sorted(int(name) for name in sysfs.list(NODES) if name.isdecimal()):
        gpu_id = sysfs.read_int(f"{NODES}/{number}/gpu_id")
        if gpu_id:
            node = _read_node(sysfs, number, gpu_id, seen)
            seen += 1
            if node is not None:
                nodes.append(node)
    return tuple(nodes)


def _read_node(sysfs: Sysfs, number: int, gpu_id: int, ordinal: int) -> KfdNode | None:
    path = f"{NODES}/{number}"
    properties = parse_properties(sysfs.read(f"{path}/properties") or "")
    memory = _local_memory(sysfs, path, properties.get("mem_banks_count", 1))
    if properties.get("vendor_id") != _AMD or memory is None:
        return None
    simds, simds_each = properties.get("simd_count"), properties.get("simd_per_cu")
    return KfdNode(
        number=number,
        ordinal=ordinal,
        gpu_id=gpu_id,
        bdf=_bdf(properties.get("domain", 0), properties.get("location_id", 0)),
        partition=_partition_number(properties.get("location_id", 0)),
        compute_units=simds // simds_each if simds and simds_each else None,
        xccs=properties.get("num_xcc") or None,
        memory_bytes=memory,
        gfx_target=properties.get("gfx_target_version", 0),
        pci_device=properties.get("device_id", 0),
        render_minor=properties.get("drm_render_minor", 0),
        unique_id=properties.get("unique_id", 0),
        hive_id=properties.get("hive_id", 0),
    )


def _local_memory(sysfs: Sysfs, path: str, banks: int) -> int | None:
    total = None
    for bank in range(min(banks, _MOST_BANKS)):
        properties = parse_properties(sysfs.read(f"{path}/mem_banks/{bank}/properties") or "")
        if properties.get("heap_type") in _LOCAL_HEAPS:
            total = (total or 0) + properties.get("size_in_bytes", 0)
    return total


def _partition_number(location: int) -> int:
    """Bits 2:0 of the location (mainline) or 31:28 (AMD's packaged driver) hold it."""
    return location >> 28 & 0xF or location & 0x7


def _bdf(domain: int, location: int) -> str:
    """The lowest bits are no PCI function but the partition."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"
