"""The daemon keeps an MPS daemon for as long as something is granted on its Partition, and no longer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.control.world import Machine, boot, deployment
from tests.hardware_nvidia.fake_nvml import FakeLibrary, nvml_over
from tests.hardware_nvidia.gpus import h200
from tests.hardware_nvidia.test_mps import daemons, root

from aimgpu.control.controller import Controller
from aimgpu.daemon.mps_reaper import end_unused_mps
from aimgpu.hardware.nvidia.hardware import NvidiaHardware
from aimgpu.hardware.nvidia.mps import MpsDaemons

__all__ = ["daemons", "root"]
GPU = h200()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    machine = Machine(root=tmp_path)
    machine.hardware = NvidiaHardware(nvml_over(FakeLibrary([GPU])), pci=tmp_path)  # type: ignore[assignment]
    found = boot(machine)
    yield found
    found.close()


def test_it_ends_after_the_last_tenant_and_what_a_crash_left_ends_too(controller: Controller, daemons: MpsDaemons) -> None:
    end_unused_mps(controller, daemons)
    daemons.start(GPU.uuid)
    daemons.start("GPU-of-another-time")
    controller.apply([deployment("chat", 10)])
    end_unused_mps(controller, daemons)
    assert daemons.running() == (GPU.uuid,)
    controller.release(["chat"])
    end_unused_mps(controller, daemons)
    assert daemons.running() == ()
