"""A recorded machine, played back, is the machine; and a recording says nothing of whose it was."""

import json
from pathlib import Path

import pytest
from tests.hardware import contract
from tests.hardware.emulation.emulated import TreeStyle
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs
from tools.record_device import write_recording

from aimgpu.errors import NotAllowed
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.amd.change import Patience
from aimgpu.hardware.amd.recording import RecordedSysfs, record_amd, summarize_amd

RECORDED = sorted((Path(__file__).parents[1] / "recordings").glob("amd-*.json"))


def emulated() -> EmulatedKernel:
    kernel = EmulatedKernel(["MI300X", "MI355X", "MI300A"])
    kernel.change_gpu(0, compute_mode="CPX", memory_mode="NPS4")
    kernel.add_process(31337, {(0, 2): 5 << 30, (1, 0): 0})
    return kernel


def check_contract(files: dict[str, str]) -> None:
    hardware = AmdHardware(RecordedSysfs(files))
    devices = contract.check_reading(hardware)
    contract.check_usage(hardware, devices)
    contract.check_identity(hardware, devices)


@pytest.mark.skipif(not RECORDED, reason="no AMD GPU was recorded yet")
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_contract_holds_on_every_recorded_machine(path: Path) -> None:
    check_contract(json.loads(path.read_text())["files"])


@pytest.mark.parametrize("style", [TreeStyle(), TreeStyle(one_unique_id=True), TreeStyle(partition_in_high_bits=True)])
def test_a_recorded_machine_is_read_as_the_machine(style: TreeStyle) -> None:
    kernel = emulated()
    kernel.change(style=style)
    recorded = record_amd(TreeSysfs(kernel))
    assert recorded is not None
    check_contract(recorded["files"])
    live, played = AmdHardware(TreeSysfs(kernel)), AmdHardware(RecordedSysfs(recorded["files"]))
    for one, other in zip(live.read_devices(), played.read_devices(), strict=True):
        assert (one.product, one.memory_bytes, one.compute_units) == (other.product, other.memory_bytes, other.compute_units)
        assert [layout.name for layout in one.layouts] == [layout.name for layout in other.layouts]
        assert [(p.memory_bytes, p.render_node) for p in one.layout.partitions] == [
            (p.memory_bytes, p.render_node) for p in other.layout.partitions
        ]
    assert [process.memory_bytes for process in played.read_usage()[0].processes] == [5 << 30]
    assert record_amd(RecordedSysfs(recorded["files"])) == recorded


def test_a_recording_names_neither_devices_nor_processes(tmp_path: Path) -> None:
    kernel = emulated()
    recorded = record_amd(TreeSysfs(kernel))
    assert recorded is not None
    text = write_recording(recorded, tmp_path, None, ()).read_text()
    gpu = kernel.machine.gpus[0]
    for secret in ("31337", f"{gpu.unique_id:016x}", str(gpu.unique_id), str(gpu.hive_id), "SIM0000"):
        assert secret not in text
    assert (tmp_path / "amd-instinct-mi300x.json").exists()


def test_a_recording_is_summed_up_by_what_the_devices_told() -> None:
    recorded = record_amd(TreeSysfs(emulated()))
    assert recorded is not None
    by_part = {device.product: device for device in summarize_amd(recorded)}
    assert by_part["MI300A"].layouts == ("SPX/NPS1", "TPX/NPS1", "CPX/NPS1")
    assert by_part["MI300X"].memory_bytes == 206141652992
    assert by_part["MI355X"].driver == "6.12.12"


def test_a_machine_without_amd_gpus_is_not_recorded() -> None:
    kernel = EmulatedKernel([])
    assert record_amd(TreeSysfs(kernel)) is None


def test_a_recording_cannot_be_changed() -> None:
    recorded = record_amd(TreeSysfs(EmulatedKernel(["MI300X"])))
    assert recorded is not None
    hardware = AmdHardware(RecordedSysfs(recorded["files"]), patience=Patience(tries=1))
    with pytest.raises(NotAllowed, match="read-only"):
        hardware.apply_layout(hardware.read_devices()[0].id, "CPX")
