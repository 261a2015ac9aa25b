"""Reading AMD GPUs from the kernel's files, laid out by the simulator."""

from dataclasses import replace

import pytest
from tests.hardware import contract
from tests.hardware.emulation.emulated import TreeStyle
from tests.hardware.emulation.kernel import EmulatedKernel, KernelReloader, TreeSysfs
from tests.hardware.emulation.sysfs_tree import pci_path

from aimgpu.errors import HardwareUnavailable
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.simulated import SimulatedHardware, known_products

AMD_PARTS = [part.name for part in known_products() if part.chip]
STYLES = {
    "current": TreeStyle(),
    "older": TreeStyle(xcp_separator=".", one_unique_id=True),
    "packaged": TreeStyle(partition_in_high_bits=True),
}


def hardware_of(kernel: EmulatedKernel) -> AmdHardware:
    return AmdHardware(TreeSysfs(kernel), reloader=KernelReloader(kernel))


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("part", AMD_PARTS)
def test_contract(part: str, style: TreeStyle) -> None:
    hardware = hardware_of(EmulatedKernel([part, part], style))
    devices = contract.check_reading(hardware)
    contract.check_usage(hardware, devices)
    contract.check_every_layout(hardware, devices[0].id)
    contract.check_identity(hardware, hardware.read_devices())


@pytest.mark.parametrize("part", AMD_PARTS)
def test_the_reader_sees_what_the_simulator_says(part: str) -> None:
    simulated = SimulatedHardware([(part, 1)]).read_devices()[0]
    kernel = EmulatedKernel([part])
    for layout in simulated.layouts:
        kernel.change_gpu(0, compute_mode=layout.compute_mode, memory_mode=layout.memory_mode)
        (read,) = hardware_of(kernel).read_devices()
        assert (read.product, read.market_name) == (simulated.product, simulated.market_name)
        assert (read.memory_bytes, read.compute_units) == (simulated.memory_bytes, simulated.compute_units)
        assert read.layout.name == layout.name
        assert [(p.memory_bytes, p.compute_units, p.kind) for p in read.layout.partitions] == [
            (p.memory_bytes, p.compute_units, p.kind) for p in layout.partitions
        ]
        assert [each.name for each in read.layouts] == [each.name for each in simulated.layouts]


def test_gpus_in_different_modes_are_told_apart() -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X", "MI300X"])
    kernel.change_gpu(1, compute_mode="CPX")
    first, second, third = hardware_of(kernel).read_devices()
    assert [len(device.layout.partitions) for device in (first, second, third)] == [1, 8, 1]
    assert [p.render_node for p in second.layout.partitions] == [f"/dev/dri/renderD{128 + 8 + i}" for i in range(8)]
    assert third.layout.partitions[0].render_node == "/dev/dri/renderD144"
    assert first.hive == second.hive == third.hive


def test_ids_stay_when_modes_change() -> None:
    kernel = EmulatedKernel(["MI300X"])
    before = hardware_of(kernel).read_devices()[0].id
    kernel.change_gpu(0, compute_mode="QPX", memory_mode="NPS4")
    assert hardware_of(kernel).read_devices()[0].id == before == "amd-1122334455660000"


def test_identity_counts_past_the_partitions_of_other_gpus_where_uuids_do_not_select() -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"], TreeStyle(one_unique_id=True))
    kernel.change_gpu(0, compute_mode="DPX")
    kernel.change_gpu(1, compute_mode="CPX")
    hardware = hardware_of(kernel)
    device = hardware.read_devices()[1]
    identity = hardware.identify(device, device.layout.partitions[3])
    assert identity.environment["ROCR_VISIBLE_DEVICES"] == "5"
    assert identity.environment["AIM_XCD_ID"] == "3"
    assert identity.device_nodes == ("/dev/kfd", "/dev/dri/renderD139")


def test_identity_is_by_uuid_where_each_partition_has_its_own() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode="CPX")
    hardware = hardware_of(kernel)
    device = hardware.read_devices()[0]
    environment = hardware.identify(device, device.layout.partitions[2]).environment
    assert environment["ROCR_VISIBLE_DEVICES"] == "GPU-1122334455660003"
    assert (environment["AIM_COMPUTE_MODE"], environment["AIM_MEMORY_MODE"]) == ("CPX", "NPS1")


def test_the_identity_of_a_partition_that_is_gone_is_refused() -> None:
    kernel = EmulatedKernel(["MI300X"])
    hardware = hardware_of(kernel)
    device = hardware.read_devices()[0]
    kernel.change_gpu(0, compute_mode="CPX")
    with pytest.raises(HardwareUnavailable, match="spx-0"):
        hardware.identify(device, device.layout.partitions[0])


def test_usage_is_told_by_device_partition_and_process() -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])
    kernel.change_gpu(0, compute_mode="CPX", used_bytes=9000, busy_percent=40)
    kernel.add_process(1, {(0, 0): 5000, (0, 3): 3000, (1, 0): 0})
    hardware = hardware_of(kernel)
    busy, idle = hardware.read_usage()
    assert (busy.used_bytes, busy.utilization_percent) == (9000, 40)
    assert [(p.pid, p.memory_bytes, p.partition_id) for p in busy.processes] == [
        (1, 5000, "amd-1122334455660000/cpx-0"),
        (1, 3000, "amd-1122334455660000/cpx-3"),
    ]
    assert busy.used_bytes_by_partition["amd-1122334455660000/cpx-3"] == 3000
    assert [(p.pid, p.memory_bytes, p.partition_id) for p in idle.processes] == [(1, 0, None)]  # holds it, uses none of it


def test_polling_usage_leaves_the_mode_files_alone_until_the_topology_changes() -> None:
    kernel = EmulatedKernel(["MI300X"])
    sysfs = TreeSysfs(kernel)
    hardware = AmdHardware(sysfs)
    hardware.read_usage()
    read: list[str] = []
    sysfs.before_read = read.append
    hardware.read_usage()
    assert not [path for path in read if "partition" in path]
    kernel.change_gpu(0, compute_mode="CPX")
    assert len(hardware.read_usage()[0].used_bytes_by_partition) == 8


def test_devices_that_did_not_change_are_read_again_without_their_mode_files() -> None:
    kernel = EmulatedKernel(["MI300X", "MI350X"])
    sysfs = TreeSysfs(kernel)
    hardware = AmdHardware(sysfs, reloader=KernelReloader(kernel))
    before = hardware.read_devices()
    read: list[str] = []
    sysfs.before_read = read.append
    assert hardware.read_devices() == before
    assert not [path for path in read if path.endswith(("compute_partition", "memory_partition"))]
    for number, modes in enumerate([("CPX", "NPS1"), ("CPX", "NPS4"), ("QPX", "NPS4"), ("QPX", "NPS1"), ("SPX", "NPS1")]):
        kernel.change_gpu(0, compute_mode=modes[0], memory_mode=modes[1])
        assert [device.layout.name for device in hardware.read_devices()] == ["/".join(modes), "SPX/NPS1"], number


def test_a_machine_without_the_driver_has_no_gpus() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change(driver_loaded=False)
    assert hardware_of(kernel).read_devices() == ()
    assert hardware_of(kernel).read_usage() == ()


def test_a_gpu_that_vanishes_between_two_reads_is_left_out() -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])
    sysfs = TreeSysfs(kernel)

    def vanish(path: str) -> None:
        if path.endswith("/device"):
            kernel.change(gpus=kernel.machine.gpus[-1:])

    sysfs.before_read = vanish
    assert [device.id for device in AmdHardware(sysfs).read_devices()] == ["amd-1122334455660100"]


def test_a_gpu_without_compute_driver_is_listed_by_its_memory() -> None:
    kernel = EmulatedKernel(["MI300X"])
    for path in [path for path in kernel.tree if path.startswith("class/kfd")]:
        del kernel.tree[path]
    (device,) = hardware_of(kernel).read_devices()
    assert (device.memory_bytes, device.layout.partitions) == (206141652992, ())
    assert device.compute_units is None


def test_a_driver_that_lists_only_what_it_can_do_now_still_leads_back_to_the_whole_gpu() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode="CPX", memory_mode="NPS4")
    del kernel.tree[f"{pci_path(kernel.machine.gpus[0])}/compute_partition_config/supported_xcp_configs"]
    (device,) = AmdHardware(TreeSysfs(kernel)).read_devices()
    assert {layout.name for layout in device.layouts} == {"CPX/NPS1", "CPX/NPS4", "QPX/NPS1", "QPX/NPS4", "SPX/NPS1"}


def test_a_part_that_cannot_be_partitioned_is_one_whole() -> None:
    kernel = EmulatedKernel(["MI300X"])
    for path in [path for path in kernel.tree if "partition" in path]:
        del kernel.tree[path]
    (device,) = hardware_of(kernel).read_devices()
    assert [layout.name for layout in device.layouts] == ["whole"]
    assert device.layout.partitions[0].kind == "whole"


@pytest.mark.parametrize("words", ["Not supported\n", "UNKNOWN\n", "\n"])
def test_words_that_are_no_mode_offer_none(words: str) -> None:
    kernel = EmulatedKernel(["MI300X"])
    for path in [path for path in kernel.tree if path.endswith(("current_compute_partition", "available_compute_partition"))]:
        kernel.tree[path] = words
    (device,) = hardware_of(kernel).read_devices()
    assert [layout.name for layout in device.layouts] == ["whole"]


def test_a_mode_that_no_table_knows_is_offered_and_read() -> None:
    kernel = EmulatedKernel(["MI355X"])
    available = next(path for path in kernel.tree if path.endswith("available_compute_partition"))
    current = next(path for path in kernel.tree if path.endswith("current_compute_partition"))
    kernel.tree[available] = "SPX, OPX\n"
    (device,) = hardware_of(kernel).read_devices()
    offered = next(layout for layout in device.layouts if layout.name == "OPX/NPS1")
    assert offered.partitions == ()
    kernel.tree[current] = "OPX\n"
    (device,) = hardware_of(kernel).read_devices()
    assert device.layout.name == "OPX/NPS1"
    assert device.layout.partitions[0].kind == "opx"
    assert device.layout.partitions[0].memory_bytes == device.memory_bytes


def test_a_device_without_a_name_is_called_by_its_architecture_and_number() -> None:
    kernel = EmulatedKernel(["MI300X"])
    gpu = kernel.machine.gpus[0]
    kernel.change(gpus=(replace(gpu, product=replace(gpu.product, pci_device=0x74FF)),))
    assert hardware_of(kernel).read_devices()[0].product == "gfx942-74ff"


def test_two_gpus_that_claim_one_unique_id_are_named_by_their_address() -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])
    for path in [path for path in kernel.tree if path.endswith("/unique_id")]:
        kernel.tree[path] = "00000000deadbeef\n"
    assert [device.id for device in hardware_of(kernel).read_devices()] == ["amd-0000:05:00.0", "amd-0000:15:00.0"]


@pytest.mark.parametrize(("mode", "last"), [("DPX", "4,5,6,7"), ("QPX", "6,7"), ("CPX", "7")])
def test_a_partition_names_the_dies_that_it_has_in_every_mode(mode: str, last: str) -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode=mode)
    hardware = hardware_of(kernel)
    (device,) = hardware.read_devices()
    assert hardware.identify(device, device.layout.partitions[-1]).environment["AIM_XCD_ID"] == last
