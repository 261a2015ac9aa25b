"""Every recorded machine, played back: the contract holds on it, and recording it again gives the same."""

import json
from pathlib import Path

import pytest
from tests.hardware.contract import check_every_layout, check_identity, check_reading, check_usage
from tests.hardware_nvidia.conftest import Connect
from tests.hardware_nvidia.fake_nvml import FakeLibrary, nvml_over
from tests.hardware_nvidia.gpus import FakeProcess, h100, h200, l4
from tests.hardware_nvidia.recorded import RECORDINGS, library_of, read_recording
from tools.record_device import write_recording

from aimgpu.hardware.nvidia.recording import record_nvidia, summarize_nvidia
from aimgpu.hardware.simulated import SimulatedHardware

HEAD = {"format", "recorded", "aimgpu", "checked"}
each_recording = pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)


@each_recording
def test_the_contract_holds_on_every_recorded_machine(connect: Connect, path: Path) -> None:
    hardware = connect(library_of(read_recording(path)))
    devices = check_reading(hardware)
    check_usage(hardware, devices)
    check_identity(hardware, devices)
    for device in devices:
        check_every_layout(hardware, device.id)


@each_recording
def test_a_recording_that_is_played_back_records_the_same(path: Path) -> None:
    recorded = read_recording(path)
    again = json.loads(json.dumps(record_nvidia(nvml_over(library_of(recorded)))))
    assert again == {name: value for name, value in recorded.items() if name not in HEAD}


def test_the_simulated_h200_is_the_recorded_one(connect: Connect) -> None:
    """Layouts, bytes and units of the model that people plan with are those of the real GPU."""
    path = next(path for path in RECORDINGS if path.stem == "nvidia-h200")
    (real,) = connect(library_of(read_recording(path))).read_devices()
    (simulated,) = SimulatedHardware([("H200-141", 1)]).read_devices()
    assert (real.product, real.compute_units) == (simulated.product, simulated.compute_units)
    for layout in simulated.layouts[1:]:
        twin = next(one for one in real.layouts if one.name.split("+") == sorted(layout.name.split("+"), key=_start))
        assert [(p.kind, p.start, p.memory_bytes, p.compute_units) for p in twin.partitions] == [
            (p.kind, p.start, p.memory_bytes, p.compute_units) for p in layout.partitions
        ]


def test_a_recording_says_nothing_of_the_machine_or_its_people(tmp_path: Path) -> None:
    gpu = h200(uuid="GPU-deadbeef-1234-5678-9abc-def012345678", mig_on=True)
    gpu.make("1g.18gb", 0)
    gpu.processes = [FakeProcess(31337, 5, instance=1)]
    recorded = record_nvidia(nvml_over(FakeLibrary([gpu, h100(1, lost=True), l4(2)])))
    assert recorded is not None
    path = write_recording(recorded, tmp_path, None, ("mps",))
    text = path.read_text()
    assert path.name == "nvidia-h200.json"
    for secret in ("deadbeef", "31337", "9abc"):
        assert secret not in text
    assert '"pid": 1001' in text
    assert read_recording(path)["checked"] == ["read", "mps"]
    assert read_recording(path)["devices"][1] == {"error": 15, "function": "nvmlDeviceGetHandleByIndex"}


def test_what_is_claimed_comes_from_the_recording_alone() -> None:
    recorded = record_nvidia(nvml_over(FakeLibrary([h200(), h200(1), l4(2), h100(3, lost=True)])))
    assert recorded is not None
    large, small = summarize_nvidia(recorded)
    assert (large.product, small.product) == ("H200-141", "L4-24")
    assert "7g.141gb" in large.layouts
    assert small.layouts == ("whole",)


def test_a_machine_without_a_gpu_has_nothing_to_record() -> None:
    assert record_nvidia(nvml_over(FakeLibrary([]))) is None
    assert record_nvidia(nvml_over(FakeLibrary([], init_code=9))) is None


def _start(name: str) -> int:
    return int(name.rpartition("@")[2])
