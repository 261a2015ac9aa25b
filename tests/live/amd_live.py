"""Tries the AMD backend on real GPUs: the contract, and whether amd-smi says the same. Changes nothing.

    PYTHONPATH=src:. python tests/live/amd_live.py OUT_FOLDER [--sysfs FOLDER]

Writes a masked recording into OUT_FOLDER, for tests/recordings and docs/reference/supported.md; fails if anything did not hold.
"""

import argparse
import sys
from pathlib import Path

from tests.hardware.contract import check_identity, check_reading, check_usage
from tools.record_device import write_recording

from aimgpu.domain import Device
from aimgpu.hardware.amd import AmdHardware, AmdSmi, Sysfs
from aimgpu.hardware.amd.recording import record_amd
from aimgpu.units import MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    options = parser.parse_args()
    sysfs = Sysfs(options.sysfs)
    hardware = AmdHardware(sysfs)
    recorded = record_amd(sysfs)
    if recorded is None:
        sys.stderr.write("no AMD GPU here\n")
        return 1
    devices = check_reading(hardware)
    check_usage(hardware, devices)
    check_identity(hardware, devices)
    for device in devices:
        sys.stdout.write(f"{device.id}: {device.product}, {device.layout.name}, {len(device.layout.partitions)} partitions\n")
    smi = AmdSmi()
    checked = ("amd-smi",) if smi.is_installed else ()
    if smi.is_installed:
        compare(devices, smi)
    sys.stdout.write(f"{write_recording(recorded, options.out, None, checked)}\n")
    return 0


def compare(devices: tuple[Device, ...], smi: AmdSmi) -> None:
    """Both list partitions by PCI address; the tool shows the whole GPU's memory for a GPU's first partition."""
    rows = iter(zip(smi.read_gpus(), smi.read_memory().values(), strict=True))
    modes = smi.read_partition_modes()
    for device in devices:
        for partition in device.layout.partitions:
            row, memory = next(rows)
            first = partition.index == 0
            assert f"/dev/dri/{row.render}" == partition.render_node, (row, partition)
            assert memory == (device.memory_bytes if first else partition.memory_bytes) // MIB * MIB, (row, memory, partition)
            if first:
                assert modes[row.gpu] == (device.layout.compute_mode, device.layout.memory_mode), (row, device.layout.name)
    assert next(rows, None) is None


if __name__ == "__main__":
    sys.exit(main())
