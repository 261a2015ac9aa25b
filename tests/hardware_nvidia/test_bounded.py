"""A driver that hangs costs a bounded time, and is named."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.hardware_nvidia.fake_nvml import FakeLibrary, nvml_over
from tests.hardware_nvidia.gpus import h200

from aimgpu.errors import HardwareUnavailable, InvalidInput
from aimgpu.hardware.nvidia.bounded import BoundedCalls
from aimgpu.hardware.nvidia.hardware import NvidiaHardware
from aimgpu.hardware.nvidia.nvml import Nvml


def test_answers_and_errors_come_through() -> None:
    calls = BoundedCalls()
    assert calls.run("add", 30, lambda: 1 + 1) == 2

    def fail() -> None:
        raise InvalidInput("no")

    with pytest.raises(InvalidInput, match="no"):
        calls.run("fail", 30, fail)


def test_a_call_that_hangs_is_left_and_the_next_ones_fail_at_once_until_it_returns() -> None:
    calls, gate, left = BoundedCalls(), threading.Event(), threading.Event()

    def hang() -> None:
        gate.wait()
        left.set()

    with pytest.raises(HardwareUnavailable, match=r"cannot read the GPUs: the NVIDIA driver gave no answer within 0.05 s"):
        calls.run("read the GPUs", 0.05, hang)
    with pytest.raises(HardwareUnavailable, match="still gets no answer"):
        calls.run("read the GPUs", 30, lambda: 1)
    gate.set()
    left.wait()
    for thread in threading.enumerate():
        if thread.name.startswith("nvml: "):
            thread.join()
    assert calls.run("read the GPUs", 30, lambda: 1) == 1


def test_a_hanging_driver_is_an_error_of_reading_and_a_finding() -> None:
    library, gate = FakeLibrary([h200()]), threading.Event()
    nvml = nvml_over(library)
    assert len(NvidiaHardware(nvml).read_devices()) == 1  # with the usual bound: a busy machine may need more than the next one
    hardware = NvidiaHardware(nvml, read_seconds=0.05)
    nvml._invoke = lambda *_args, **_kwargs: gate.wait()  # type: ignore[method-assign]
    try:
        with pytest.raises(HardwareUnavailable, match="gave no answer within"):
            hardware.read_devices()
        (finding,) = hardware.inspect()
        assert finding.code == "no-answer"
        assert "dmesg" in (finding.hint or "")
    finally:
        gate.set()


@pytest.mark.parametrize("sign", ["device file", "bus"])
def test_a_driver_that_hangs_while_it_is_loaded_is_bounded_too(sign: str, tmp_path: Path) -> None:
    """Without a device file, NVML asks for the kernel module before it answers."""
    pci, dev, gate = tmp_path / "pci", tmp_path / "dev", threading.Event()
    gpu = pci / "0000:18:00.0"
    gpu.mkdir(parents=True)
    dev.mkdir()
    if sign == "bus":
        (gpu / "vendor").write_text("0x10de\n")
        (gpu / "class").write_text("0x030200\n")
    else:
        (dev / "nvidiactl").touch()
    hanging = SimpleNamespace(NVMLError=OSError, nvmlInit=gate.wait)
    hardware = NvidiaHardware(Nvml(lambda: hanging), pci=pci, dev=dev, read_seconds=0.05)
    try:
        for read in (hardware.read_devices, hardware.read_usage):
            with pytest.raises(HardwareUnavailable, match="no answer"):
                read()
        assert [finding.code for finding in hardware.inspect()] == ["no-answer"]
    finally:
        gate.set()
