"""From what the kernel's files say to devices, layouts and partitions."""

from dataclasses import replace

from aimgpu.domain import Device, Layout, Partition, Vendor
from aimgpu.hardware.amd import modes
from aimgpu.hardware.amd.gpus import AmdGpu
from aimgpu.hardware.amd.products import market_name, product_name
from aimgpu.hardware.amd.topology import KfdNode

WHOLE = "whole"


def describe_devices(gpus: tuple[AmdGpu, ...]) -> tuple[Device, ...]:
    """Ids that two GPUs share (some virtual functions) are replaced by PCI addresses."""
    ids = [gpu.id for gpu in gpus]
    unambiguous = [gpu.id if ids.count(gpu.id) == 1 else f"amd-{gpu.bdf}" for gpu in gpus]
    repeated = _repeated_unique_ids(gpus)
    return tuple(_device(gpu, unambiguous[index], index, repeated) for index, gpu in enumerate(gpus))


def _repeated_unique_ids(gpus: tuple[AmdGpu, ...]) -> frozenset[int]:
    """KFD ids that select nothing: older drivers give all partitions of a GPU the same."""
    seen = [node.unique_id for gpu in gpus for node in gpu.nodes]
    return frozenset(unique for unique in seen if not unique or seen.count(unique) > 1)


def _device(gpu: AmdGpu, device_id: str, index: int, repeated: frozenset[int]) -> Device:
    current = _current_layout(gpu, device_id, repeated)
    units, memory_bytes = _sum_known([node.compute_units for node in gpu.nodes]), _memory_bytes(gpu)
    seen = None if gpu.is_partly_hidden else units
    return Device(
        id=device_id,
        index=index,
        vendor=Vendor.AMD,
        product=product_name(gpu.pci_device, gpu.nodes[0].gfx_target if gpu.nodes else 0, seen, memory_bytes),
        market_name=gpu.product_name or market_name(gpu.pci_device, seen),
        memory_bytes=memory_bytes,
        compute_units=units,
        layout=current,
        layouts=_layouts(gpu, device_id, current),
        hive=f"{gpu.hive_id:016x}" if gpu.hive_id else None,
    )


def without_partitions(device: Device) -> Device:
    """As it is shown where no program can open it: nothing is free on it, under no layout."""
    empty = [replace(layout, partitions=()) for layout in (device.layout, *device.layouts)]
    return replace(device, layout=empty[0], layouts=tuple(empty[1:]))


def _current_layout(gpu: AmdGpu, device_id: str, repeated: frozenset[int]) -> Layout:
    kind = gpu.compute_mode.lower() if gpu.compute_mode else WHOLE if len(gpu.nodes) <= 1 else "partition"
    # Without nodes of the compute driver (KFD) no program can use the GPU: it has no partition to give away.
    partitions = tuple(
        replace(
            _partition(node, f"{device_id}/{kind}-{number}", size, None if node.unique_id in repeated else node.unique_id),
            capped=not gpu.uncapped or (len(gpu.nodes) == 1 and not gpu.is_partly_hidden),
        )
        for node, number, size in zip(gpu.nodes, gpu.partition_numbers, _sizes(gpu), strict=True)
    )
    return Layout(
        name=_name(gpu.compute_mode, gpu.memory_mode) if gpu.compute_mode else kind,
        compute_mode=gpu.compute_mode,
        memory_mode=gpu.memory_mode,
        partitions=partitions,
    )


def _partition(node: KfdNode, partition_id: str, size: int, unique_id: int | None) -> Partition:
    device_id, _, name = partition_id.rpartition("/")
    kind, _, number = name.rpartition("-")
    return Partition(
        id=partition_id,
        device_id=device_id,
        index=int(number),
        kind=kind,
        memory_bytes=size,
        compute_units=node.compute_units,
        uuid=None if unique_id is None else f"GPU-{unique_id:016x}",
        render_node=f"/dev/dri/renderD{node.render_minor}" if node.render_minor else None,
    )


def _layouts(gpu: AmdGpu, device_id: str, current: Layout) -> tuple[Layout, ...]:
    """What the device offers. It reports for the current memory mode only; for another the kernel's rules say.

    A GPU of which others have a part that we do not see stays as it is.
    """
    if gpu.compute_mode is None or gpu.memory_mode is None or gpu.is_partly_hidden:
        return (current,)
    chip = _chip(gpu)
    pairs = [
        (compute, memory)
        for compute in dict.fromkeys((*gpu.all_compute_modes, *gpu.compute_modes))
        for memory in gpu.memory_modes or (gpu.memory_mode,)
        if _is_offered(gpu, compute, memory)
    ]
    layouts = [
        current if name == current.name else _foretold(device_id, compute, memory, chip)
        for compute, memory in pairs
        for name in (_name(compute, memory),)
    ]
    return tuple(layouts if current in layouts else [current, *layouts])


def _is_offered(gpu: AmdGpu, compute: str, memory: str) -> bool:
    if memory == gpu.memory_mode:
        return compute in gpu.compute_modes
    return modes.are_compatible(compute, memory, gpu.nodes[0].gfx_target if gpu.nodes else 0)


def _foretold(device_id: str, compute: str, memory: str, chip: modes.Chip | None) -> Layout:
    """An unknown mode is offered without partitions: they are known once it is in effect."""
    predicted = modes.predict_layout(device_id, compute, memory, chip) if chip else None
    return predicted or Layout(name=_name(compute, memory), compute_mode=compute, memory_mode=memory, partitions=())


def _chip(gpu: AmdGpu) -> modes.Chip | None:
    xccs = _sum_known([node.xccs for node in gpu.nodes])
    units = _sum_known([node.compute_units for node in gpu.nodes])
    if not xccs or not units:
        return None
    memory = _memory_bytes(gpu)
    return modes.Chip(
        xccs=xccs,
        compute_units_each=units // xccs,
        memory_bytes=memory,
        gfx_target=gpu.nodes[0].gfx_target,
        apu=memory != gpu.vram_bytes,
    )


def _memory_bytes(gpu: AmdGpu) -> int:
    """An APU's partitions own host memory, of which its `vram` file knows nothing."""
    seen = sum(_sizes(gpu))
    return seen if gpu.is_partly_hidden else max(gpu.vram_bytes or 0, seen)


def _sizes(gpu: AmdGpu) -> tuple[int, ...]:
    """Bytes of each node. What several partitions may take is given away once: each has the share that it had with a cap."""
    reported = tuple(node.memory_bytes for node in gpu.nodes)
    if not gpu.uncapped or gpu.compute_mode is None or gpu.memory_mode is None:
        return reported
    vram, gfx = gpu.vram_bytes or 0, gpu.nodes[0].gfx_target if gpu.nodes else 0
    chip = modes.Chip(xccs=gpu.xccs, compute_units_each=0, memory_bytes=vram, gfx_target=gfx)
    shares = dict(enumerate((modes.partition_bytes(gpu.compute_mode, gpu.memory_mode, chip) if vram else None) or ()))
    numbered = zip(reported, gpu.partition_numbers, strict=True)
    return tuple(min(size, shares.get(number, size // len(reported))) for size, number in numbered)


def _name(compute: str, memory: str | None) -> str:
    return modes.layout_name(compute, memory) if memory else compute


def _sum_known(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None
