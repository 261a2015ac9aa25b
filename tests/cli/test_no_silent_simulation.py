"""A GPU that cannot be used is not replaced by a simulated one behind the user's back.

As root, a whole machine is put before the command: a /sys with a GPU on its bus and no driver for it.
"""

import json
import os
from pathlib import Path

import pytest
from tests.hardware.emulation.kernel import EmulatedKernel
from tests.hardware.emulation.namespace import aimgpu_on
from tests.hardware.emulation.sysfs_tree import write_tree

from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.errors import HardwareUnavailable
from aimgpu.hardware.combined import CombinedHardware
from aimgpu.hardware.protocols import Finding
from aimgpu.home import Home
from aimgpu.wiring import choose_hardware, real_backends, refuse_in_place_of

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting another /sys needs root")


@pytest.fixture(params=["amd", "nvidia"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = tmp_path / "sys"
    if request.param == "amd":
        kernel = EmulatedKernel(["MI300X"])
        kernel.change(driver_loaded=False)
        write_tree(place, kernel.tree)
    else:
        gpu = place / "bus/pci/devices/0000:18:00.0"
        gpu.mkdir(parents=True)
        (gpu / "vendor").write_text("0x10de\n")
        (gpu / "class").write_text("0x030200\n")
    return place


@needs_root
def test_a_gpu_without_its_driver_stops_every_command_that_would_simulate(tree: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("models: {chat: {model: HuggingFaceTB/SmolLM2-135M-Instruct}}\n")
    for arguments in (["gpus"], ["partition", "list"], ["up", "-f", str(stack), "--detach", "--port", "0"]):
        outcome = aimgpu_on(tree, tmp_path / "home", *arguments)
        assert outcome.returncode == HardwareUnavailable.exit_status, outcome
        assert "this machine has a GPU that cannot be used" in outcome.stderr, outcome
        assert "--simulated MI300X" in outcome.stderr
        assert "SIMULATED" not in outcome.stdout


@needs_root
def test_a_simulated_gpu_that_is_asked_for_is_shown_all_the_same(tree: Path, tmp_path: Path) -> None:
    outcome = aimgpu_on(tree, tmp_path / "home", "gpus", "--simulated", "MI300X", "--json")
    assert json.loads(outcome.stdout)["gpus"][0]["simulated"] is True


@needs_root
def test_the_doctor_calls_it_a_problem(tree: Path, tmp_path: Path) -> None:
    outcome = aimgpu_on(tree, tmp_path / "home", "doctor", "--json")
    found = [finding for finding in json.loads(outcome.stdout)["findings"] if finding["topic"] == "GPU"]
    assert outcome.returncode == 1
    assert any(finding["verdict"] == "problem" and "GPU at 0000:" in finding["text"] for finding in found)


def test_every_finding_and_every_way_out_is_told() -> None:
    found = [
        Finding(code="no-driver", subject="a", text="there is a GPU at a", hint="Load it."),
        Finding(code="lost", subject="b", text="GPU b is lost", hint="Reset it."),
    ]
    with pytest.raises(HardwareUnavailable, match="GPU at a; GPU b is lost") as caught:
        refuse_in_place_of(found)
    assert str(caught.value.hint).startswith("Load it. Reset it. To go on without it")
    refuse_in_place_of([])


@pytest.mark.skipif(bool(CombinedHardware(real_backends()).read_devices()), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_simulated_and_says_so(tmp_path: Path) -> None:
    devices = choose_hardware(GpuChoice(), Home(tmp_path)).read_devices()
    assert [device.simulated for device in devices] == [True]
