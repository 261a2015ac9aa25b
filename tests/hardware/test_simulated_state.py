"""What simulated GPUs remember: a file that people edit by hand, several processes share and a crash can cut."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.examples import examples
from tests.hardware.contract import check_reading, check_usage

from aimgpu.errors import AimGpuError, DriverReloadNeeded, HardwareUnavailable, LayoutNotApplied, PartitionBusy, UnknownLayout
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.hardware.simulated.holders import DEVICE_VARIABLE, PARTITION_VARIABLE, SCOPE_VARIABLE, find_holders
from aimgpu.hardware.simulated.state import SimulatedState, State, StateStore, parse_state

GPU = "sim-mi300x-0"

WRONG: list[Any] = [
    None,
    3,
    "text",
    [],
    {"devices": []},
    {"devices": {GPU: None}},
    {"devices": {GPU: {}}},
    {"devices": {GPU: {"layout": 3}}},
    {"devices": {GPU: {"layout": "CPX/NPS1", "colour": 1}}},
    {"devices": {GPU: {"layout": "CPX/NPS1", "pending_memory_mode": 4}}},
    {"foreign": {}},
    {"foreign": [3]},
    {"foreign": [{"pid": 1}]},
    {"foreign": [{"device": GPU, "pid": "1"}]},
    {"foreign": [{"device": GPU, "pid": True}]},
    {"foreign": [{"device": GPU, "memory_bytes": 1.5}]},
    {"foreign": [{"device": GPU, "name": 7}]},
    {"faults": []},
    {"fault": {}},
]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_file_of_another_shape_is_refused_by_name_and_left_as_it_is(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps(value))
    hardware = SimulatedHardware([("MI300X", 1)], path)
    for act in (hardware.read_devices, hardware.read_usage, hardware.inspect, lambda: hardware.apply_layout(GPU, "CPX")):
        with pytest.raises(HardwareUnavailable) as caught:
            act()
        assert str(path) in caught.value.message
        assert "Remove the file" in str(caught.value.hint)
    assert json.loads(path.read_text()) == value


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"\x00" * 100, b'{"devices": {', b"[" * 100_000], ids=len)
def test_bytes_that_a_crash_or_a_disk_left_are_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(data)
    with pytest.raises(HardwareUnavailable, match=r"state\.json"):
        SimulatedHardware([("MI300X", 1)], path).read_devices()


def test_a_folder_in_the_place_of_the_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(HardwareUnavailable, match="cannot be read"):
        SimulatedHardware([("MI300X", 1)], tmp_path).read_devices()


def test_a_state_goes_through_json_the_same() -> None:
    value = {
        "devices": {GPU: {"layout": "CPX/NPS1", "pending_memory_mode": "NPS4"}},
        "foreign": [{"device": GPU, "pid": 7, "name": None, "memory_bytes": 5, "partition": f"{GPU}/cpx-0"}],
        "faults": {GPU: "stuck"},
    }
    state = parse_state(value)
    assert state.devices == {GPU: SimulatedState(layout="CPX/NPS1", pending_memory_mode="NPS4")}
    assert (state.foreign[0].pid, state.faults) == (7, {GPU: "stuck"})


@pytest.mark.parametrize("layout", ["", "OPX/NPS9", "whole", "1g.18gb@0", "\x00"])
def test_a_layout_that_this_gpu_cannot_have_is_read_as_the_one_it_comes_with(tmp_path: Path, layout: str) -> None:
    """As after another product was given the same name."""
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"devices": {GPU: {"layout": layout}, "sim-b200-7": {"layout": "whole"}}}))
    hardware = SimulatedHardware([("MI300X", 1)], path)
    (device,) = check_reading(hardware)
    assert device.layout.name == "SPX/NPS1"
    assert hardware.apply_layout(GPU, "CPX").layout.name == "CPX/NPS1"
    assert "sim-b200-7" in json.loads(path.read_text())["devices"]


def test_an_edit_that_fails_changes_nothing_and_leaves_no_file_behind(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    store = StateStore(path)
    with store.edit() as state:
        state.faults["a"] = "stuck"
    before = path.read_bytes()

    def failing() -> None:
        with store.edit() as state:
            state.faults.clear()
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        failing()
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["state.json", "state.json.lock"]
    in_memory = StateStore(None)
    with in_memory.edit() as state:
        state.faults["b"] = "lost"
    assert in_memory.read() == State(faults={"b": "lost"})


def change_often(path: Path, number: int) -> None:
    hardware = SimulatedHardware([("MI300X", 4)], path)
    for layout in ("CPX", "DPX", "SPX", "QPX"):
        hardware.apply_layout(f"sim-mi300x-{number}", layout)


def test_processes_that_change_gpus_at_once_lose_no_change(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=change_often, args=(path, number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert {device.layout.compute_mode for device in SimulatedHardware([("MI300X", 4)], path).read_devices()} == {"QPX"}


# --- what is put on a GPU by hand ---


def test_use_of_a_process_whose_memory_nobody_knows_is_unknown_and_not_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    foreign = [{"device": GPU, "pid": 1, "memory_bytes": 5}, {"device": GPU, "pid": 2}, {"device": "elsewhere", "pid": 3}]
    path.write_text(json.dumps({"foreign": foreign}))
    (usage,) = SimulatedHardware([("MI300X", 1)], path).read_usage()
    assert [(process.pid, process.memory_bytes) for process in usage.processes] == [(1, 5), (2, None)]
    assert usage.used_bytes is None


def test_a_gpu_that_is_lost_is_a_finding_and_one_that_is_stuck_keeps_its_layout(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"faults": {GPU: "lost", "sim-mi300x-1": "stuck", "sim-mi300x-2": "unheard of"}}))
    hardware = SimulatedHardware([("MI300X", 3)], path)
    assert [(found.code, found.subject) for found in hardware.inspect()] == [("lost", GPU)]
    with pytest.raises(LayoutNotApplied, match="is SPX/NPS1"):
        hardware.apply_layout("sim-mi300x-1", "CPX")
    assert hardware.apply_layout("sim-mi300x-2", "CPX").layout.name == "CPX/NPS1"


def write_process(proc: Path, pid: int, environment: dict[str, str], name: str = "engine") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "environ").write_bytes(b"\0".join(f"{key}={value}".encode() for key, value in environment.items()))
    (proc / str(pid) / "comm").write_text(f"{name}\n")


def test_holders_are_the_processes_of_this_machine_that_name_a_gpu(tmp_path: Path) -> None:
    mine = {SCOPE_VARIABLE: "here", DEVICE_VARIABLE: GPU}
    write_process(tmp_path, 30, mine | {PARTITION_VARIABLE: f"{GPU}/cpx-1"})
    write_process(tmp_path, 4, mine)
    write_process(tmp_path, 5, mine | {SCOPE_VARIABLE: "elsewhere"})
    write_process(tmp_path, 6, {SCOPE_VARIABLE: "here"})
    (tmp_path / "7").mkdir()  # ended while it was looked at
    (tmp_path / "self").mkdir()
    (tmp_path / "version").write_text("Linux")
    found = find_holders("here", tmp_path)
    assert [(one.pid, one.device_id, one.partition_id) for one in found] == [(4, GPU, None), (30, GPU, f"{GPU}/cpx-1")]


# --- any walk ---


class WalkThroughLayouts(RuleBasedStateMachine):
    """Two linked GPUs and one of another kind: what is read is what was last applied, over restarts too."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(os.environ.get("TMPDIR", "/tmp")) / f"walk-{os.getpid()}-{id(self)}.json"  # noqa: S108
        self.hardware = self.open()
        self.devices = [device.id for device in self.hardware.read_devices()]
        self.expected = {device.id: device.layout.name for device in self.hardware.read_devices()}

    def open(self) -> SimulatedHardware:
        return SimulatedHardware([("MI300X", 2), ("H100-80", 1)], self.path)

    @rule(number=st.integers(0, 2), choice=st.integers(0, 30), reload_driver=st.booleans())
    def apply(self, number: int, choice: int, *, reload_driver: bool) -> None:
        device = self.hardware.read_devices()[number]
        wanted = device.layouts[choice % len(device.layouts)]
        hive = [one for one in self.hardware.read_devices() if one.id == device.id or (one.hive and one.hive == device.hive)]
        same_memory = wanted.memory_mode == device.layout.memory_mode
        try:
            read = self.hardware.apply_layout(device.id, wanted.name, reload_driver=reload_driver)
        except DriverReloadNeeded:
            assert not same_memory
            assert not reload_driver
            return
        assert read.layout == wanted
        self.expected |= {one.id: wanted.name for one in hive} if not same_memory else {device.id: wanted.name}

    @rule(number=st.integers(0, 2), name=st.sampled_from(["", "OPX", "CPX/NPS9", "9g.1tb@0", "whole/NPS1", "+", "@"]))
    def ask_for_nonsense(self, number: int, name: str) -> None:
        with pytest.raises((UnknownLayout, AimGpuError)):
            self.hardware.apply_layout(self.devices[number], name, reload_driver=True)

    @rule(number=st.integers(0, 2))
    def hold(self, number: int) -> None:
        """A process of someone else comes, keeps the layout, and goes."""
        device = self.hardware.read_devices()[number]
        other = next(layout for layout in device.layouts if layout.name != device.layout.name)
        store = StateStore(self.path)
        with store.edit() as state:
            state.foreign = parse_state({"foreign": [{"device": device.id, "pid": 4242, "memory_bytes": 1}]}).foreign
        if other.memory_mode == device.layout.memory_mode:
            with pytest.raises(PartitionBusy, match="pid 4242"):
                self.hardware.apply_layout(device.id, other.name)
        with store.edit() as state:
            state.foreign = []

    @rule()
    def restart(self) -> None:
        self.hardware = self.open()

    @invariant()
    def what_is_read_is_what_was_applied(self) -> None:
        devices = check_reading(self.hardware)
        check_usage(self.hardware, devices)
        assert {device.id: device.layout.name for device in devices} == self.expected

    def teardown(self) -> None:
        for path in (self.path, self.path.with_name(self.path.name + ".lock")):
            path.unlink(missing_ok=True)


WalkThroughLayouts.TestCase.settings = settings(max_examples=examples(5), stateful_step_count=8)
TestAnyWalk = WalkThroughLayouts.TestCase
