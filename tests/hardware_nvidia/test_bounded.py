"""A driver that hangs costs a bounded time, and is named."""

import threading

import pytest
from tests.hardware_nvidia.fake_nvml import FakeLibrary, nvml_over
from tests.hardware_nvidia.gpus import h200

from aimgpu.errors import HardwareUnavailable, InvalidInput
from aimgpu.hardware.nvidia.bounded import BoundedCalls
from aimgpu.hardware.nvidia.hardware import NvidiaHardware


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
    hardware = NvidiaHardware(nvml, read_seconds=0.05)
    assert len(hardware.read_devices()) == 1
    nvml._invoke = lambda *_args, **_kwargs: gate.wait()  # type: ignore[method-assign]
    try:
        with pytest.raises(HardwareUnavailable, match="gave no answer within"):
            hardware.read_devices()
        (finding,) = hardware.inspect()
        assert finding.code == "no-answer"
        assert "dmesg" in (finding.hint or "")
    finally:
        gate.set()
