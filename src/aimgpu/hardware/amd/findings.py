"""What reading cannot raise: a GPU on the bus that no driver has, that is hidden from us, or that this user may not open."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from aimgpu.hardware.amd.gpus import ALLOCATION_MODE, COMPUTE_MODE, AmdGpu
from aimgpu.hardware.amd.products import is_virtual_function
from aimgpu.hardware.amd.smi import AmdSmi
from aimgpu.hardware.amd.sysfs import Sysfs
from aimgpu.hardware.amd.topology import NODES
from aimgpu.hardware.protocols import Finding

_BUS = "bus/pci/devices"
_AMD = "0x1002"
_GPU_CLASSES = ("0x03", "0x12")  # display controllers and processing accelerators
_OWN_DRIVER = "amdgpu"
_NO_COMPUTE = ("radeon",)  # the driver of GPUs that never computed, such as a server's own display
_UNCORRECTABLE = re.compile(r"^ue: ([0-9]{1,18})$", re.MULTILINE | re.ASCII)
_JOIN_GROUP = "Add yourself to their group, then log in again: sudo usermod -aG render,video $USER"


def inspect_machine(sysfs: Sysfs, gpus: tuple[AmdGpu, ...], smi: AmdSmi) -> tuple[Finding, ...]:
    """`gpus`: those that could be read. On a machine without an AMD GPU there is nothing to say."""
    found = [*_on_bus(sysfs, {gpu.bdf for gpu in gpus})]
    for gpu in gpus:
        found += _of_gpu(sysfs, gpu)
    if gpus:
        found += _device_files(gpus, sysfs.dev)
        if not smi.is_installed:
            found.append(
                Finding(
                    code="no-tool",
                    subject=None,
                    text="amd-smi is not installed: everything is read from the kernel's files",
                    hint="Nothing to do, unless changes of layout should go through it.",
                    serious=False,
                )
            )
    return tuple(found)


def amd_gpus_on_bus(sysfs: Sysfs) -> dict[str, str | None]:
    """Driver by PCI address; None where no driver has it."""
    return {
        address: driver
        for address in sorted(sysfs.list(_BUS))
        if sysfs.read(f"{_BUS}/{address}/vendor") == _AMD
        and (sysfs.read(f"{_BUS}/{address}/class") or "").startswith(_GPU_CLASSES)
        and (driver := _driver(sysfs, address)) not in _NO_COMPUTE
    }


def _on_bus(sysfs: Sysfs, readable: set[str]) -> Iterator[Finding]:
    hidden = []
    for address, driver in amd_gpus_on_bus(sysfs).items():
        if address in readable:
            continue
        if driver == _OWN_DRIVER:
            hidden.append(address)
        else:
            yield _without_driver(sysfs, address, driver)
    if hidden:
        yield Finding(
            code="hidden",
            subject=hidden[0] if len(hidden) == 1 else None,
            text=f"AMD GPUs on the bus that cannot be seen from here: {', '.join(hidden)}",
            hint="In a container, pass /dev/kfd and their /dev/dri/renderD* into it; else look at the kernel log (dmesg).",
            serious=not readable,
        )


def _without_driver(sysfs: Sysfs, address: str, driver: str | None) -> Finding:
    if driver is not None:
        text = f"there is an AMD GPU at {address}, and the kernel driver {driver} has it"
        hint = f"Give it back to amdgpu, or use it where {driver} hands it to."
    elif sysfs.read("module/amdgpu/initstate") is None and not sysfs.list("module/amdgpu"):
        text = f"there is an AMD GPU at {address}, but the amdgpu driver is not loaded"
        hint = "Install ROCm's amdgpu-dkms, then: sudo modprobe amdgpu"
    else:
        text = f"there is an AMD GPU at {address} that the amdgpu driver did not take"
        hint = "Look at the kernel log (dmesg | grep amdgpu)."
    return Finding(code="no-driver", subject=address, text=text, hint=hint)


def _of_gpu(sysfs: Sysfs, gpu: AmdGpu) -> Iterator[Finding]:
    if not gpu.nodes:
        yield Finding(
            code="no-kfd",
            subject=gpu.id,
            text=f"the compute driver (KFD) does not know {gpu.id}: no model can run on it",
            hint="Use a kernel with CONFIG_HSA_AMD, or ROCm's amdgpu-dkms."
            if not sysfs.list(NODES)
            else "Look at the kernel log (dmesg | grep kfd).",
        )
    if gpu.compute_mode is None and gpu.compute_modes:
        yield Finding(
            code="unreadable",
            subject=gpu.id,
            text=f"{gpu.id} does not report its compute mode: it may be in reset",
            hint="Wait until the reset is over, then look again.",
        )
    errors = _UNCORRECTABLE.search(sysfs.read(f"{gpu.path}/ras/umc_err_count") or "")
    if errors is not None and int(errors[1]):
        yield Finding(
            code="memory-errors",
            subject=gpu.id,
            text=f"{gpu.id} has had {errors[1]} uncorrectable memory errors since its driver was loaded",
            hint="Look at the kernel log (dmesg | grep amdgpu). If there are more, have the GPU replaced.",
            serious=False,
        )
    if gpu.uncapped and len(gpu.nodes) > 1:
        yield Finding(
            code="uncapped",
            subject=gpu.id,
            text=f"partitions of {gpu.id} may take each other's memory: its {ALLOCATION_MODE} is ALL",
            hint="Set a cap: sudo amd-smi set -g all --compute-partition-mem-alloc-mode CAPPING",
        )
    if gpu.is_partly_hidden:
        yield Finding(
            code="partly-hidden",
            subject=gpu.id,
            text=f"{gpu.id} has partitions that cannot be seen from here",
            hint="Its layout can be changed where all of them are seen: on the host.",
            serious=False,
        )
    if is_virtual_function(gpu.pci_device):
        yield Finding(
            code="virtual-function",
            subject=gpu.id,
            text=f"{gpu.id} is a virtual function: its layout is what its host gave it",
            hint="Partition the GPU on the host.",
            serious=False,
        )
    elif len(gpu.compute_modes) > 1 and os.geteuid() == 0 and sysfs.why_not_writable(f"{gpu.path}/{COMPUTE_MODE}"):
        yield Finding(
            code="read-only",
            subject=gpu.id,
            text=f"the layout of {gpu.id} cannot be changed from here: its files are read-only",
            hint="A container: run it privileged, or change the layout on the host.",
            serious=False,
        )


def _device_files(gpus: tuple[AmdGpu, ...], dev: Path) -> Iterator[Finding]:
    """What a model's process has to open. Reading needs none of them."""
    minors = sorted({node.render_minor for gpu in gpus for node in gpu.nodes if node.render_minor})
    nodes = [dev / "kfd", *(dev / "dri" / f"renderD{minor}" for minor in minors)]
    missing = [str(node) for node in nodes if not node.exists()]
    closed = [str(node) for node in nodes if node.exists() and not os.access(node, os.R_OK | os.W_OK)]
    if missing:
        yield Finding(
            code="no-device-file",
            subject=None,
            text=f"missing, so that no model can run: {_shorten(missing)}",
            hint="In a container, pass the GPU's devices into it.",
        )
    if closed:
        yield Finding(code="no-permission", subject=None, text=f"this user may not open {_shorten(closed)}", hint=_JOIN_GROUP)


def _driver(sysfs: Sysfs, address: str) -> str | None:
    lines = (sysfs.read(f"{_BUS}/{address}/uevent") or "").splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith("DRIVER=")), None)


def _shorten(paths: list[str], most: int = 4) -> str:
    """The first few names, and how many more."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return f"{', '.join(paths[:most])}{more}"
