"""Simulated AMD GPUs as a /sys tree that AMD's own tools read: DRM and PCI files here, KFD's in `kfd_tree`.

Pure: a tree is a dictionary from path to content. Names and formats follow Linux 7.2, amdgpu and amdkfd.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.hardware.emulation import kfd_tree
from tests.hardware.emulation.emulated import DRM_DEVICES_EACH, EmulatedGpu, EmulatedProcess, TreeStyle

from aimgpu.hardware.amd import modes


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link to another path of the tree."""

    target: str


Tree = dict[str, "str | Link | None"]  # None: a directory that may be empty


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedMachine:
    """Everything that a tree shows. `selected` are the modes that were written to xcp_config, by GPU number."""

    gpus: Sequence[EmulatedGpu]
    processes: Sequence[EmulatedProcess] = ()
    style: TreeStyle = field(default_factory=TreeStyle)
    selected: dict[int, str] = field(default_factory=dict)
    generation: int = 2
    driver_loaded: bool = True


def lay_out(machine: EmulatedMachine) -> Tree:
    """The files of a machine, path to text."""
    tree: Tree = {
        "bus/pci/devices": None,
        "class/drm": None,
        "class/net": None,
        "class/scsi_host": None,
        "class/infiniband": None,
    }
    if not machine.driver_loaded:
        for gpu in machine.gpus:
            _lay_out_unbound(tree, gpu)
        return tree
    tree |= {"module/amdgpu/initstate": "live\n", "module/amdgpu/version": "6.12.12\n", "bus/pci/drivers/amdgpu": None}
    tree["class/drm/version"] = "drm 1.1.0 20060810\n"
    for gpu in machine.gpus:
        _lay_out_pci(tree, gpu, machine.selected.get(gpu.number, gpu.compute_mode))
        _lay_out_drm(tree, gpu, machine.style)
    for path, text in kfd_tree.lay_out(machine.gpus, machine.processes, machine.style, machine.generation).items():
        tree[path] = text
    return tree


def write_tree(root: Path, tree: Tree) -> None:
    """As plain files and links. Reads true; a write to it is only a write to a file."""
    for path, content in tree.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            place.mkdir(exist_ok=True)
        elif isinstance(content, Link):
            place.symlink_to(relative_target(path, content))
        else:
            place.write_text(content, encoding="utf-8")


def relative_target(path: str, link: Link) -> str:
    return os.path.relpath(link.target, os.path.dirname(path))  # noqa: PTH120 - paths of the tree, not of this machine


def _lay_out_unbound(tree: Tree, gpu: EmulatedGpu) -> None:
    """What the PCI bus itself shows of a device that no driver has."""
    path = pci_path(gpu)
    tree[f"bus/pci/devices/{gpu.bdf}"] = Link(path)
    own = _identity_files(gpu)
    for name in ("vendor", "device", "subsystem_vendor", "subsystem_device", "revision", "class"):
        tree[f"{path}/{name}"] = f"{own[name]}\n"
    tree[f"{path}/uevent"] = f"PCI_CLASS=120000\nPCI_ID=1002:{gpu.pci_device:04X}\nPCI_SLOT_NAME={gpu.bdf}\n"


def _lay_out_pci(tree: Tree, gpu: EmulatedGpu, selected: str) -> None:
    path = pci_path(gpu)
    tree[f"bus/pci/devices/{gpu.bdf}"] = Link(path)
    tree[f"bus/pci/drivers/amdgpu/{gpu.bdf}"] = Link(path)
    tree[f"{path}/driver"] = Link("bus/pci/drivers/amdgpu")
    tree[f"{path}/subsystem"] = Link("bus/pci")
    for name, value in {**_identity_files(gpu), **_memory_files(gpu), **_mode_files(gpu)}.items():
        tree[f"{path}/{name}"] = f"{value}\n"
    for name, value in _selector_files(gpu, selected).items():
        tree[f"{path}/compute_partition_config/{name}"] = f"{value}\n"
    tree[f"{path}/uevent"] = f"DRIVER=amdgpu\nPCI_CLASS=120000\nPCI_ID=1002:{gpu.pci_device:04X}\nPCI_SLOT_NAME={gpu.bdf}\n"


def _identity_files(gpu: EmulatedGpu) -> dict[str, object]:
    device = f"0x{gpu.pci_device:04x}"
    return {
        "vendor": "0x1002",
        "device": device,
        "subsystem_vendor": "0x1002",
        "subsystem_device": device,
        "revision": "0x00",
        "class": "0x120000",
        "unique_id": f"{gpu.unique_id:016x}",
        "product_name": gpu.product.market_name,
        "serial_number": f"SIM{gpu.number:08d}",
        "numa_node": 0,
        "local_cpulist": "0-1",
        "current_link_speed": "32.0 GT/s PCIe",
        "current_link_width": 16,
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": 16,
        "power_state": "D0",
        "enable": 1,
    }


def _memory_files(gpu: EmulatedGpu) -> dict[str, object]:
    total = gpu.product.memory_bytes
    return {
        "mem_info_vram_total": total,
        "mem_info_vram_used": gpu.used_bytes,
        "mem_info_vis_vram_total": total,
        "mem_info_vis_vram_used": gpu.used_bytes,
        "mem_info_gtt_total": 1 << 39,
        "mem_info_gtt_used": 0,
        "gpu_busy_percent": gpu.busy_percent,
        "mem_busy_percent": 0,
    }


def _mode_files(gpu: EmulatedGpu) -> dict[str, object]:
    files = {
        "current_compute_partition": gpu.compute_mode,
        "available_compute_partition": ", ".join(gpu.available_compute_modes),
        "current_memory_partition": gpu.memory_mode,
        "compute_partition_mem_alloc_mode": gpu.allocation_mode,
    }
    if len(gpu.product.memory_modes) > 1:
        files["available_memory_partition"] = ", ".join(gpu.product.memory_modes)
    return dict(files)


def _selector_files(gpu: EmulatedGpu, selected: str) -> dict[str, object]:
    """What the driver would give for the mode that xcp_config names."""
    partitions = modes.partition_count(selected, gpu.chip.xccs) or 1
    files: dict[str, object] = {
        "supported_xcp_configs": ", ".join(modes.compute_modes(gpu.chip.xccs)),
        "xcp_config": selected,
    }
    if len(gpu.product.memory_modes) > 1:
        usable = [mode for mode in gpu.product.memory_modes if modes.are_compatible(selected, mode, gpu.chip.gfx_target)]
        files["supported_nps_configs"] = ", ".join(usable)
    for resource, count, rings in (("xcc", gpu.chip.xccs, 1), ("dma", gpu.chip.xccs * 2, 1), ("dec", 4, 1), ("jpeg", 4, 8)):
        files[f"{resource}/num_inst"] = max(1, count // partitions) * rings
        files[f"{resource}/num_shared"] = max(1, partitions // count)
    return files


def _lay_out_drm(tree: Tree, gpu: EmulatedGpu, style: TreeStyle) -> None:
    """Eight DRM devices in every mode: the first is the PCI device, the others are platform devices."""
    for number in range(DRM_DEVICES_EACH):
        minor = gpu.number * DRM_DEVICES_EACH + number
        xcp = f"amdgpu_xcp{style.xcp_separator}{gpu.number * (DRM_DEVICES_EACH - 1) + number - 1}"
        path = pci_path(gpu) if number == 0 else f"devices/platform/{xcp}"
        if number:
            tree[f"{path}/uevent"] = f"MODALIAS=platform:{xcp}\n"
        for name, char_minor in ((f"card{minor}", minor), (f"renderD{128 + minor}", 128 + minor)):
            node = f"{path}/drm/{name}"
            tree[f"{node}/dev"] = f"226:{char_minor}\n"
            tree[f"{node}/uevent"] = f"MAJOR=226\nMINOR={char_minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor\n"
            tree[f"{node}/device"] = Link(path)
            tree[f"class/drm/{name}"] = Link(node)
            tree[f"dev/char/226:{char_minor}"] = Link(node)


def pci_path(gpu: EmulatedGpu) -> str:
    """The folder of a GPU in the tree."""
    return f"devices/pci0000:00/{gpu.bdf}"
