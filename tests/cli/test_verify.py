"""`doctor --verify`: what it tries holds on drivers that are there, and the report can be sent in."""

import ctypes
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.native.conftest import Toolchain

from aimgpu.cli.main import cli
from aimgpu.cli.verify import Outcome, VerifyReport, verify
from aimgpu.domain import Device
from aimgpu.errors import PartitionBusy
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.hardware.software.state import DriverState
from aimgpu.isolation import building
from aimgpu.units import GIB


class PresentHardware(SimulatedHardware):
    """Reports its GPUs as real ones, as programs on the stand-in driver find them."""

    def read_devices(self) -> tuple[Device, ...]:
        return tuple(replace(device, simulated=False) for device in super().read_devices())

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        return replace(super().apply_layout(device_id, layout_name, reload_driver=reload_driver), simulated=False)


class BusyHardware(PresentHardware):
    """Refuses one mode half-way, as a GPU does that a process has opened meanwhile."""

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        if layout_name == "QPX/NPS1":
            raise PartitionBusy("2 processes hold it", hint="Stop them.")
        return super().apply_layout(device_id, layout_name, reload_driver=reload_driver)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    if building.why_unavailable() is not None:
        pytest.skip("no C compiler here")
    return Toolchain(tmp_path_factory.mktemp("driver"), "plain")


@pytest.fixture
def driver(tools: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    state = tmp_path / "driver.state"
    made = DriverState(device_bytes=80 * GIB, kernel_ns=1_000_000)
    state.write_bytes(ctypes.string_at(ctypes.byref(made), ctypes.sizeof(made)))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tools.folder))
    monkeypatch.setenv("AIMGPU_SOFTWARE_GPU", str(state))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    return state


def outcomes(report: VerifyReport) -> dict[str, Outcome]:
    return {trial.what: trial.outcome for trial in report.trials}


@pytest.mark.parametrize("product", ["H200", "MI300X"])
@pytest.mark.usefixtures("driver")
def test_a_cap_is_tried_with_a_real_program(product: str) -> None:
    report = verify(PresentHardware([(product, 1)]), change_layouts=False)
    assert report.real
    found = {trial.what: trial for trial in report.trials}
    assert found["memory cap"].outcome is Outcome.PASSED, found["memory cap"].text
    assert found["memory cap"].text == "under a cap of 2GiB: 512MiB was allocated, 3GiB was refused"
    assert found["compute gate"].outcome is not Outcome.FAILED, found["compute gate"].text
    assert report.failed == 0


def test_modes_are_changed_only_when_asked_and_restored() -> None:
    hardware = BusyHardware([("MI300X", 1)])
    asked = outcomes(verify(hardware, change_layouts=False))
    assert asked["changing modes"] is Outcome.SKIPPED
    report = verify(hardware, change_layouts=True)
    assert outcomes(report) | {
        "mode DPX/NPS1": Outcome.PASSED,
        "mode QPX/NPS1": Outcome.SKIPPED,
        "mode CPX/NPS1": Outcome.PASSED,
        "restored": Outcome.PASSED,
        "unknown mode": Outcome.PASSED,
    } == outcomes(report)
    assert hardware.read_devices()[0].layout.name == "SPX/NPS1"


def test_every_kind_of_mig_instance_is_made_once_and_what_was_there_is_restored() -> None:
    hardware = PresentHardware([("H200", 1)])
    kinds = {partition.kind for layout in hardware.read_devices()[0].layouts for partition in layout.partitions}
    tried = {name: outcome for name, outcome in outcomes(verify(hardware, change_layouts=True)).items() if "mode " in name}
    made = {name.removeprefix("mode ") for name, outcome in tried.items() if outcome is Outcome.PASSED and "g." in name}
    layouts = {layout.name: layout for layout in hardware.read_devices()[0].layouts}
    assert {partition.kind for name in made for partition in layouts[name].partitions} == kinds - {"whole"}
    assert len(made) < len(kinds)
    assert hardware.read_devices()[0].layout.name == "whole"


def test_a_simulation_is_named_and_the_report_has_no_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    path = tmp_path / "report.json"
    cli.main(["doctor", "--verify", "--simulated", "MI300X", "--report", str(path)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "Ran on a SIMULATION (AMD Instinct MI300X): this is no evidence" in shown
    written = json.loads(path.read_text())
    assert written["real"] is False
    assert written["format"] == 1
    assert os.uname().nodename not in path.read_text()
    assert {trial["gpu"] for trial in written["trials"]} == {"gpu0"}
