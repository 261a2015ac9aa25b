"""AMD GPUs of which not everything is ours: a container that sees some partitions, and partitions without a cap on memory."""

from collections.abc import Collection

import pytest
from tests.hardware.contract import check_identity, check_reading, check_usage
from tests.hardware.emulation.emulated import TreeStyle
from tests.hardware.emulation.kernel import EmulatedKernel, KernelReloader, TreeSysfs
from tests.hardware.emulation.sysfs_tree import pci_path

from aimgpu.control.snapshots import foreign_bytes
from aimgpu.errors import UnknownLayout
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.amd.topology import NODES
from aimgpu.units import GIB

GPU0 = "amd-1122334455660000"
STYLES = {
    "mainline": TreeStyle(),
    "packaged": TreeStyle(partition_in_high_bits=True),
}


class ContainerSysfs(TreeSysfs):
    """KFD refuses to tell of nodes whose render node the device cgroup forbids."""

    def __init__(self, kernel: EmulatedKernel, visible: Collection[int]) -> None:
        super().__init__(kernel)
        self._visible = {f"{NODES}/{node}/" for node in visible}

    def read(self, path: str) -> str | None:
        if path.startswith(f"{NODES}/") and not path.startswith(tuple(self._visible)):
            return None
        return super().read(path)


def container(kernel: EmulatedKernel, visible: Collection[int]) -> AmdHardware:
    """`visible`: numbers of KFD nodes; node 1 is the first partition of the first GPU."""
    return AmdHardware(ContainerSysfs(kernel, visible), reloader=KernelReloader(kernel))


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
def test_a_container_sees_its_partitions_under_their_own_numbers(style: TreeStyle) -> None:
    kernel = EmulatedKernel(["MI300X"], style)
    kernel.change_gpu(0, compute_mode="CPX")
    hardware = container(kernel, {4, 6})
    (device,) = check_reading(hardware)
    check_usage(hardware, (device,))
    check_identity(hardware, (device,))
    assert [part.id for part in device.layout.partitions] == [f"{GPU0}/cpx-3", f"{GPU0}/cpx-5"]
    assert [part.render_node for part in device.layout.partitions] == ["/dev/dri/renderD131", "/dev/dri/renderD133"]
    assert device.memory_bytes == sum(kernel.machine.gpus[0].partition_bytes[:2])
    identity = hardware.identify(device, device.layout.partitions[1])
    assert identity.environment["AIM_XCD_ID"] == "5"
    assert identity.device_nodes == ("/dev/kfd", "/dev/dri/renderD133")


@pytest.mark.parametrize("visible", [{1}, {8}, {1, 2, 3}])
def test_a_gpu_that_others_share_is_not_laid_out_from_a_container(visible: set[int]) -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode="CPX")
    hardware = container(kernel, visible)
    (device,) = hardware.read_devices()
    assert device.layouts == (device.layout,)
    assert "partly-hidden" in {finding.code for finding in hardware.inspect()}
    with pytest.raises(UnknownLayout):
        hardware.apply_layout(GPU0, "SPX")
    assert kernel.writes == []


def test_what_neighbours_use_does_not_count_on_the_partition_that_is_ours() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode="CPX", used_bytes=120 * GIB)
    kernel.add_process(4001, {(0, 0): 20 * GIB, (0, 3): 0})
    kernel.add_process(4002, {(0, 3): 2 * GIB})
    hardware = container(kernel, {4})
    (device,), (usage,) = hardware.read_devices(), hardware.read_usage()
    assert usage.used_bytes is None
    assert usage.used_bytes_by_partition == {f"{GPU0}/cpx-3": 2 * GIB}
    assert foreign_bytes(device, usage, (), frozenset()) == {f"{GPU0}/cpx-3": 2 * GIB}


@pytest.mark.parametrize(
    ("part", "compute", "memory"), [("MI300X", "CPX", "NPS1"), ("MI300X", "CPX", "NPS4"), ("MI355X", "QPX", "NPS2")]
)
def test_memory_that_every_partition_may_take_is_given_away_once(part: str, compute: str, memory: str) -> None:
    kernel = EmulatedKernel([part])
    kernel.change_gpu(0, compute_mode=compute, memory_mode=memory)
    capped = check_reading(container(kernel, range(16)))
    kernel.write(f"bus/pci/devices/{kernel.machine.gpus[0].bdf}/compute_partition_mem_alloc_mode", "ALL")
    hardware = container(kernel, range(16))
    uncapped = check_reading(hardware)
    assert [part.memory_bytes for part in uncapped[0].layout.partitions] == [
        part.memory_bytes for part in capped[0].layout.partitions
    ]
    assert uncapped[0].memory_bytes == capped[0].memory_bytes
    assert {layout.name for layout in uncapped[0].layouts} == {layout.name for layout in capped[0].layouts}
    (finding,) = [finding for finding in hardware.inspect() if finding.code == "uncapped"]
    assert finding.serious
    assert "CAPPING" in str(finding.hint)
    assert not any(part.capped for part in uncapped[0].layout.partitions)
    assert all(part.capped for part in capped[0].layout.partitions)


def test_a_whole_gpu_without_a_cap_has_no_neighbour_to_take_its_memory() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, allocation_mode="ALL")
    (device,) = container(kernel, range(16)).read_devices()
    assert [part.capped for part in device.layout.partitions] == [True]


def test_a_container_with_one_partition_without_a_cap_gives_away_its_share() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode="CPX", allocation_mode="ALL")
    (device,) = container(kernel, {2}).read_devices()
    assert [part.memory_bytes for part in device.layout.partitions] == [kernel.machine.gpus[0].partition_bytes[1]]
    assert device.memory_bytes == device.layout.memory_bytes
    assert not device.layout.partitions[0].capped


def test_partitions_without_a_cap_on_a_gpu_that_does_not_tell_its_memory_share_what_they_tell() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode="DPX", allocation_mode="ALL")
    del kernel.tree[f"{pci_path(kernel.machine.gpus[0])}/mem_info_vram_total"]
    (device,) = container(kernel, range(16)).read_devices()
    assert device.memory_bytes == kernel.machine.gpus[0].told_bytes[0]
