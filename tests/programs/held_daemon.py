"""The daemon of `daemon.py` on a GPU that is not simulated: what the stand-in driver counted is what its hardware measures.

AIMGPU_TEST_DRIVER: JSON {"state": the driver's state file, "libraries": the folder of its libcuda}.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.isolation.conftest import build_device
from tests.programs import daemon

from aimgpu import wiring
from aimgpu.control.dependencies import Dependencies
from aimgpu.daemon.assembly import main
from aimgpu.domain import Device, DeviceUsage, ForeignProcess, Partition
from aimgpu.errors import UnknownLayout
from aimgpu.hardware.protocols import Finding, Hardware, Identity
from aimgpu.hardware.software.state import DriverState
from aimgpu.home import Home


class StandInGpu:
    """One GPU whose driver is the stand-in: it lists every process that took memory, whoever it was and however."""

    def __init__(self, state: Path, libraries: Path) -> None:
        self._state = state
        self._libraries = libraries

    def read_devices(self) -> tuple[Device, ...]:
        return (build_device(),)

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        driver = DriverState.from_buffer_copy(self._state.read_bytes())
        held = {one.pid: one.used for one in driver.processes if one.pid and Path(f"/proc/{one.pid}").exists()}
        processes = tuple(ForeignProcess(pid=pid, name=None, memory_bytes=used) for pid, used in held.items())
        used = sum(held.values())
        return (
            DeviceUsage(
                device_id="gpu0",
                used_bytes=used,
                used_bytes_by_partition={"gpu0/whole-0": used},
                utilization_percent=None,
                processes=processes,
            ),
        )

    def identify(self, device: Device, partition: Partition) -> Identity:
        del device, partition
        return Identity(environment={"AIMGPU_SOFTWARE_GPU": str(self._state), "LD_LIBRARY_PATH": str(self._libraries)})

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        raise UnknownLayout(f"{device_id} has no layout {layout_name} (reload {reload_driver})")

    def inspect(self) -> tuple[Finding, ...]:
        return ()


def make_dependencies(home: Home, hardware: Hardware, in_flight: Callable[[str], int]) -> Dependencies:
    made = daemon.make_dependencies(home, hardware, in_flight)
    return replace(made, isolator=wiring.make_isolator(home))


if __name__ == "__main__":
    given = json.loads(os.environ["AIMGPU_TEST_DRIVER"])
    gpu = StandInGpu(Path(given["state"]), Path(given["libraries"]))
    wiring.choose_hardware = lambda choice, home: gpu  # noqa: ARG005
    sys.exit(main(make_dependencies))
