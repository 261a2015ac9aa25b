"""A node with AMD GPUs that are not there: the kernel's files, real device nodes, and a driver library that counts."""

import os
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.node import Node
from tests.hardware.emulation.emulated import EmulatedGpu
from tests.hardware.emulation.sysfs_tree import EmulatedMachine, Tree, lay_out, write_tree
from tests.native.conftest import Toolchain

from aimgpu.hardware.simulated import find_product
from aimgpu.hardware.software.state import DriverState
from aimgpu.units import GIB

STANDIN_ID = 0xA0A0A0A0A0A0A0A0  # hipDeviceGetUuid of the stand-in driver for its first device
NULL_MAJOR, NULL_MINOR = "1", "3"  # opens and does nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedNode:
    sysfs: Path
    driver: Path  # folder with the stand-in driver library and its state, to be mounted into containers

    @property
    def options(self) -> tuple[str, ...]:
        return ("--sysfs", str(self.sysfs))


def emulate(node: Node, folder: Path, *, gpus: int = 2, compute_mode: str = "SPX") -> EmulatedNode:
    machine = EmulatedMachine(
        gpus=[EmulatedGpu(product=find_product("MI300X"), number=number, compute_mode=compute_mode) for number in range(gpus)]
    )
    sysfs = folder / f"sysfs-{compute_mode.lower()}"
    write_tree(sysfs, _known_to_driver(lay_out(machine), machine.gpus[0].unique_id))
    node.run("mkdir", "-p", "/dev/dri")
    paths = ["/dev/kfd", *(f"/dev/dri/renderD{gpu.render_minor(number)}" for gpu in machine.gpus for number in range(8))]
    for path in paths:
        if not os.path.lexists(node.path(path)):
            node.run("mknod", path, "c", NULL_MAJOR, NULL_MINOR)
    driver = folder / "driver"
    if not driver.exists():
        driver.mkdir()
        Toolchain(driver, "plain")
    state = DriverState()
    state.device_bytes = 192 * GIB
    (driver / "state").write_bytes(bytes(state))
    (driver / "state").chmod(0o666)
    return EmulatedNode(sysfs=sysfs, driver=driver)


def _known_to_driver(tree: Tree, unique_id: int) -> Tree:
    """The first GPU by the id that the stand-in driver reports: the interposer refuses a GPU that was not granted."""
    names = {f"{unique_id:016x}": f"{STANDIN_ID:016x}", str(unique_id): str(STANDIN_ID)}
    changed: Tree = {}
    for path, content in tree.items():
        changed[path] = content
        if isinstance(content, str):
            for old, new in names.items():
                content = content.replace(old, new)  # noqa: PLW2901 - one name after the other
            changed[path] = content
    return changed
