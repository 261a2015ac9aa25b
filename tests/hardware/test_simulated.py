import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.hardware import contract

from aimgpu.domain import Device
from aimgpu.errors import (
    DriverReloadNeeded,
    HardwareUnavailable,
    LayoutNotApplied,
    PartitionBusy,
    UnknownDevice,
    UnknownLayout,
)
from aimgpu.hardware.simulated import SimulatedHardware, known_products

ALL_PARTS = [part.name for part in known_products()]


@contextmanager
def tenant(environment: Mapping[str, str]) -> Iterator[int]:
    """A process that holds what its environment names, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def environment_of(hardware: SimulatedHardware, device: Device, partition: int = 0) -> Mapping[str, str]:
    return hardware.identify(device, device.layout.partitions[partition]).environment


@pytest.mark.parametrize("part", ALL_PARTS)
def test_contract(part: str, tmp_path: Path) -> None:
    hardware = SimulatedHardware([(part, 2)], tmp_path / "state.json")
    devices = contract.check_reading(hardware)
    assert all(device.simulated for device in devices)
    contract.check_usage(hardware, devices)
    contract.check_every_layout(hardware, devices[0].id)
    contract.check_identity(hardware, hardware.read_devices())


def test_layouts_survive_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state.json"
    SimulatedHardware([("MI300X", 2)], state).apply_layout("sim-mi300x-1", "cpx")
    first, second = SimulatedHardware([("MI300X", 2)], state).read_devices()
    assert (first.layout.name, second.layout.name) == ("SPX/NPS1", "CPX/NPS1")
    assert not list(state.parent.glob("state.json.*tmp*"))


def test_mixed_parts_are_numbered_within_their_part() -> None:
    devices = SimulatedHardware([("MI300X", 2), ("H200-141", 1)]).read_devices()
    assert [device.id for device in devices] == ["sim-mi300x-0", "sim-mi300x-1", "sim-h200-141-0"]


def test_a_held_device_refuses_another_mode_and_names_who_holds_it() -> None:
    hardware = SimulatedHardware([("MI300X", 2)])
    device, other = hardware.read_devices()
    with tenant(environment_of(hardware, device)) as pid:
        (usage, idle) = hardware.read_usage()
        assert [(process.pid, process.memory_bytes, process.partition_id) for process in usage.processes] == [
            (pid, None, "sim-mi300x-0/spx-0")
        ]
        assert usage.used_bytes is None
        assert idle.used_bytes == 0
        with pytest.raises(PartitionBusy, match=str(pid)):
            hardware.apply_layout(device.id, "CPX/NPS1")
        assert hardware.read_devices() == (device, other)
        assert hardware.apply_layout(other.id, "CPX/NPS1").layout.name == "CPX/NPS1"
        assert hardware.apply_layout(device.id, "SPX/NPS1") == device  # nothing to change
    assert hardware.apply_layout(device.id, "CPX/NPS1").layout.name == "CPX/NPS1"


def test_another_simulated_machine_does_not_hold_this_one() -> None:
    here, there = SimulatedHardware([("MI300X", 1)]), SimulatedHardware([("MI300X", 1)])
    with tenant(environment_of(there, there.read_devices()[0])):
        assert here.read_usage()[0].processes == ()
        here.apply_layout("sim-mi300x-0", "CPX")


def test_a_memory_mode_needs_a_driver_reload_and_changes_nothing_without() -> None:
    hardware = SimulatedHardware([("MI300X", 2)])
    before = hardware.read_devices()
    with pytest.raises(DriverReloadNeeded, match="NPS4") as caught:
        hardware.apply_layout("sim-mi300x-0", "CPX/NPS4")
    assert "sim-mi300x-1" in str(caught.value.hint)
    assert hardware.read_devices() == before


def test_a_memory_mode_goes_to_the_whole_hive_and_to_no_other_gpu() -> None:
    hardware = SimulatedHardware([("MI300X", 2), ("MI325X", 1), ("H200-141", 1)])
    changed = hardware.apply_layout("sim-mi300x-0", "QPX/NPS4", reload_driver=True)
    assert changed.layout.name == "QPX/NPS4"
    assert [device.layout.name for device in hardware.read_devices()] == ["QPX/NPS4", "QPX/NPS4", "SPX/NPS1", "whole"]
    hardware.apply_layout("sim-mi325x-0", "DPX")
    hardware.apply_layout("sim-mi300x-1", "SPX/NPS1", reload_driver=True)
    assert [device.layout.name for device in hardware.read_devices()] == ["SPX/NPS1", "SPX/NPS1", "DPX/NPS1", "whole"]


def test_a_reload_stops_for_work_on_any_gpu_of_the_driver() -> None:
    hardware = SimulatedHardware([("MI300X", 1), ("MI325X", 1)])
    before = hardware.read_devices()
    with tenant(environment_of(hardware, before[1])) as pid, pytest.raises(PartitionBusy, match=str(pid)):
        hardware.apply_layout("sim-mi300x-0", "CPX/NPS4", reload_driver=True)
    assert hardware.read_devices() == before


def test_a_memory_mode_of_the_state_file_is_pending_until_the_driver_is_reloaded(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text('{"devices": {"sim-mi300x-0": {"layout": "SPX/NPS1", "pending_memory_mode": "NPS4"}}}')
    hardware = SimulatedHardware([("MI300X", 1)], state)
    (device,) = hardware.read_devices()
    assert (device.layout.memory_mode, device.pending_memory_mode) == ("NPS1", "NPS4")
    after = hardware.apply_layout("sim-mi300x-0", "CPX/NPS4", reload_driver=True)
    assert (after.layout.name, after.pending_memory_mode) == ("CPX/NPS4", None)


def test_a_part_without_memory_modes_refuses_them() -> None:
    hardware = SimulatedHardware([("MI300A", 1)])
    with pytest.raises(UnknownLayout, match="MI300A"):
        hardware.apply_layout("sim-mi300a-0", "CPX/NPS4", reload_driver=True)


def test_mig_can_be_on_with_nothing_made_yet() -> None:
    machine = SimulatedHardware([("H200-141", 1)])
    (device,) = machine.read_devices()
    assert machine.apply_layout(device.id, "mig-empty").layout.partitions == ()
    assert machine.apply_layout(device.id, "1g.18gb+me").layout.name == "1g.18gb+me@0"
    assert machine.apply_layout(device.id, "whole").layout.name == "whole"


def test_a_neighbour_keeps_its_mig_instance_while_another_is_made() -> None:
    hardware = SimulatedHardware([("H200-141", 1)])
    device = hardware.apply_layout("sim-h200-141-0", "3g.71gb@0")
    with tenant(environment_of(hardware, device)) as pid:
        grown = hardware.apply_layout(device.id, "3g.71gb@0+1g.18gb@4")
        assert grown.layout.partitions[0] == device.layout.partitions[0]
        assert grown.layout in grown.layouts
        with pytest.raises(PartitionBusy, match=str(pid)):
            hardware.apply_layout(device.id, "4g.71gb@0")
        with pytest.raises(PartitionBusy, match=str(pid)):
            hardware.apply_layout(device.id, "whole")


def test_injected_foreign_processes_are_counted_and_block(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"foreign": [{"device": "sim-mi300x-0", "pid": 4242, "name": "job", "memory_bytes": 5}]}))
    hardware = SimulatedHardware([("MI300X", 1)], state)
    (usage,) = hardware.read_usage()
    assert usage.used_bytes == 5
    assert usage.processes[0].pid == 4242
    with pytest.raises(PartitionBusy, match=r"pid 4242 \(job\)"):
        hardware.apply_layout("sim-mi300x-0", "CPX")


def test_a_change_that_does_not_take_effect_is_a_failure(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"faults": {"sim-mi300x-0": "stuck"}}))
    hardware = SimulatedHardware([("MI300X", 1)], state)
    with pytest.raises(LayoutNotApplied, match="SPX/NPS1"):
        hardware.apply_layout("sim-mi300x-0", "CPX")
    assert hardware.read_devices()[0].layout.name == "SPX/NPS1"


def test_unknown_devices_and_layouts_are_refused_with_those_there_are() -> None:
    hardware = SimulatedHardware([("MI300X", 1)])
    with pytest.raises(UnknownDevice) as device:
        hardware.apply_layout("sim-mi300x-7", "CPX")
    assert "sim-mi300x-0" in str(device.value.hint)
    with pytest.raises(UnknownLayout) as layout:
        hardware.apply_layout("sim-mi300x-0", "TPX")
    assert "CPX/NPS4" in str(layout.value.hint)


@pytest.mark.parametrize("text", ["{", '{"devices": 3}', "[]", '{"surprise": 1}'])
def test_a_broken_state_file_is_said_not_guessed(tmp_path: Path, text: str) -> None:
    state = tmp_path / "state.json"
    state.write_text(text)
    with pytest.raises(HardwareUnavailable, match=r"state\.json"):
        SimulatedHardware([("MI300X", 1)], state).read_devices()


def test_changes_by_many_threads_and_two_objects_are_all_kept(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    machines = [SimulatedHardware([("MI300X", 8)], state) for _ in range(2)]
    threads = [
        threading.Thread(target=machines[number % 2].apply_layout, args=(f"sim-mi300x-{number}", "CPX")) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {device.layout.name for device in machines[0].read_devices()} == {"CPX/NPS1"}


def test_identity_names_the_dies_of_a_partition() -> None:
    hardware = SimulatedHardware([("MI300X", 1)])
    device = hardware.apply_layout("sim-mi300x-0", "QPX")
    environment = environment_of(hardware, device, 1)
    assert environment["AIM_XCD_ID"] == "2,3"
    assert environment["AIM_COMPUTE_MODE"] == "QPX"
    assert environment["AIM_MEMORY_MODE"] == "NPS1"
    assert environment["AIM_SIMULATED_DEVICE"] == "sim-mi300x-0"
