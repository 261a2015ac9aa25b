"""The part of the tree that KFD, the compute driver, shows: topology and processes."""

from collections.abc import Iterator, Mapping, Sequence

from tests.hardware.emulation.emulated import EmulatedGpu, EmulatedProcess, TreeStyle

KFD = "class/kfd/kfd"
NODES = f"{KFD}/topology/nodes"
_PARTITION_SHIFT = 28
_EMPTY = ("p2p_links", "caches", "perf")


def lay_out(
    gpus: Sequence[EmulatedGpu], processes: Sequence[EmulatedProcess], style: TreeStyle, generation: int
) -> dict[str, str | None]:
    tree: dict[str, str | None] = {
        f"{KFD}/dev": "511:0\n",
        f"{KFD}/proc": None,
        f"{KFD}/topology/generation_id": f"{generation}\n",
        f"{KFD}/topology/system_properties": _lines({"platform_oem": 0, "platform_id": 0, "platform_rev": 0}),
    }
    partitions = [(gpu, index) for gpu in gpus for index in range(len(gpu.partition_bytes))]
    _add_node(tree, 0, 0, _cpu_properties(len(partitions)), {"heap_type": 0, "size_in_bytes": 1 << 40})
    for number, (gpu, index) in enumerate(partitions, 1):
        memory = {"heap_type": 1, "size_in_bytes": gpu.told_bytes[index]}
        _add_node(tree, number, gpu.gpu_id(index), _gpu_properties(gpu, index, style), memory)
        _add_link(tree, number, 0, 0)
        _add_link(tree, 0, number - 1, number)
    for process in processes:
        tree |= dict(_process_files(process, gpus))
    return tree


def _add_node(
    tree: dict[str, str | None], number: int, gpu_id: int, properties: Mapping[str, int], memory: Mapping[str, int]
) -> None:
    path = f"{NODES}/{number}"
    tree[f"{path}/gpu_id"] = f"{gpu_id}\n"
    tree[f"{path}/name"] = "ip discovery\n" if gpu_id else "\n"
    tree[f"{path}/properties"] = _lines(properties)
    tree[f"{path}/mem_banks/0/properties"] = _lines({**memory, "flags": 0, "width": 8192, "mem_clk_max": 1300})
    for name in _EMPTY:
        tree[f"{path}/{name}"] = None


def _add_link(tree: dict[str, str | None], node: int, link: int, to: int) -> None:
    """A PCIe link; AMD's tools stop at a node without any."""
    properties = {"type": 2, "version_major": 0, "version_minor": 0, "node_from": node, "node_to": to, "weight": 20}
    limits = {"min_latency": 0, "max_latency": 0, "min_bandwidth": 312, "max_bandwidth": 64000}
    rest = {"recommended_transfer_size": 0, "recommended_sdma_engine_id_mask": 0, "flags": 1}
    tree[f"{NODES}/{node}/io_links/{link}/properties"] = _lines({**properties, **limits, **rest})


def _cpu_properties(links: int) -> dict[str, int]:
    shared = {"cpu_cores_count": 96, "simd_count": 0, "mem_banks_count": 1, "caches_count": 0}
    return {**shared, "io_links_count": links, "p2p_links_count": 0, "vendor_id": 0, "device_id": 0, "drm_render_minor": 0}


def _gpu_properties(gpu: EmulatedGpu, index: int, style: TreeStyle) -> dict[str, int]:
    count = len(gpu.partition_bytes)
    xccs = gpu.chip.xccs // count
    place = (index << _PARTITION_SHIFT if style.partition_in_high_bits else index) if count > 1 else 0
    shared_id = count == 1 or style.one_unique_id
    return {
        "cpu_cores_count": 0,
        "simd_count": gpu.chip.compute_units_each * xccs * 4,
        "mem_banks_count": 1,
        "caches_count": 0,
        "io_links_count": 1,
        "p2p_links_count": 0,
        "max_waves_per_simd": 8,
        "lds_size_in_kb": 64,
        "num_gws": 64,
        "wave_front_size": 64,
        "array_count": 4 * xccs,
        "simd_arrays_per_engine": 1,
        "cu_per_simd_array": 10,
        "simd_per_cu": 4,
        "gfx_target_version": gpu.chip.gfx_target,
        "vendor_id": 0x1002,
        "device_id": gpu.pci_device,
        "location_id": gpu.bus << 8 | place,
        "domain": 0,
        "drm_render_minor": gpu.render_minor(index),
        "hive_id": gpu.hive_id,
        "num_sdma_engines": 2,
        "num_cp_queues": 24,
        "local_mem_size": 0,
        "unique_id": gpu.unique_id if shared_id else gpu.unique_id + index + 1,
        "num_xcc": xccs,
    }


def _process_files(process: EmulatedProcess, gpus: Sequence[EmulatedGpu]) -> Iterator[tuple[str, str | None]]:
    path = f"{KFD}/proc/{process.pid}"
    yield f"{path}/pasid", "32769\n"
    yield f"{path}/queues", None
    by_number = {gpu.number: gpu for gpu in gpus}
    for queue, ((number, index), size) in enumerate(process.bytes_by_partition.items()):
        gpu_id = by_number[number].gpu_id(index)
        yield f"{path}/vram_{gpu_id}", f"{size}\n"
        yield f"{path}/sdma_{gpu_id}", "0\n"
        yield f"{path}/stats_{gpu_id}/cu_occupancy", "0\n"
        yield f"{path}/stats_{gpu_id}/evicted_ms", "0\n"
        if size:
            yield f"{path}/queues/{queue}/gpuid", f"{gpu_id}\n"
            yield f"{path}/queues/{queue}/type", "2\n"
            yield f"{path}/queues/{queue}/size", "65536\n"


def _lines(values: Mapping[str, int]) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())
