"""Chooses the concrete backends of the node agent."""

import os
from pathlib import Path

from aimgpu.errors import HardwareUnavailable
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.amd.sysfs import Sysfs
from aimgpu.hardware.combined import CombinedHardware
from aimgpu.hardware.nvidia import NvidiaHardware
from aimgpu.hardware.nvidia.mps import MpsDaemons
from aimgpu.hardware.protocols import Hardware
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.building import find_checker, find_interposer
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.cu_masks import CuMasks
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.mps_limits import MpsMechanism
from aimgpu.kubernetes.node.agent.options import Options
from aimgpu.kubernetes.node.grants import staged_library
from aimgpu.kubernetes.node.layout_rights import LimitedHardware, read_limits

SIMULATED_STATE = "simulated-gpus.json"


def make_hardware(options: Options) -> LimitedHardware:
    """Simulated GPUs only where they are asked for: a node without a GPU has none to offer."""
    limits = read_limits(options.layouts, options.sysfs, real=not options.simulated)
    return LimitedHardware(_whole_hardware(options), limits)


def _whole_hardware(options: Options) -> Hardware:
    if options.simulated:
        return SimulatedHardware(list(options.simulated), options.state / SIMULATED_STATE)
    return CombinedHardware((AmdHardware(Sysfs(options.sysfs, options.dev)), NvidiaHardware(dev=options.dev)))


def make_interposer(options: Options) -> Interposer:
    return Interposer(
        options.run / "regions", find_library=staged_library(find_interposer, find_checker, options.state / "lib")
    )


def make_isolator(options: Options, interposer: Interposer) -> MechanismChooser:
    """As on one machine, without the kernel's dmem groups: control groups of pods belong to the kubelet."""
    mps = [MpsMechanism(MpsDaemons(options.run / "mps"))] if os.environ.get("AIMGPU_MPS") == "1" else []
    return MechanismChooser(
        (HardwareBoundary(), *mps, interposer, EngineFlags()),
        companions=[CuMasks(options.state / "cu-masks.json")],
        partners={MpsMechanism.name: interposer},
    )


def read_driver_version(vendor: str, sysfs: Path, proc: Path = Path("/proc")) -> str | None:
    """Of the kernel driver, where it says."""
    try:
        if vendor == "amd":
            return (sysfs / "module/amdgpu/version").read_text(encoding="utf-8").strip() or None
        words = (proc / "driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def check_hardware(hardware: Hardware) -> None:
    """Raises HardwareUnavailable where there is a GPU that cannot be read: offering none would look like success."""
    if not hardware.read_devices() and (findings := hardware.inspect()):
        raise HardwareUnavailable(
            "this node has a GPU that cannot be used: " + "; ".join(finding.text for finding in findings),
            hint=" ".join(dict.fromkeys(finding.hint for finding in findings if finding.hint)) or None,
        )
