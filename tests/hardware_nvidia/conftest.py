from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hardware_nvidia.fake_nvml import FakeLibrary, nvml_over

from aimgpu.hardware.nvidia.hardware import NvidiaHardware

Connect = Callable[[FakeLibrary], NvidiaHardware]


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    """The real backend and the real nvidia-ml-py on a library that is not there."""
    pci = tmp_path / "pci"
    pci.mkdir()
    return lambda library: NvidiaHardware(nvml_over(library), pci=pci)
