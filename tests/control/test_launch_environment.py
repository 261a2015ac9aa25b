"""What an instance on several GPUs is started in."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.test_resizing import RealDevices
from tests.control.world import Machine, boot, deployment

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.instance.launch_environment import make_launch_environment
from aimgpu.domain import Grant, Instance, Level, Priority
from aimgpu.isolation.boundaries import EngineFlags
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.cu_masks import CuMasks
from aimgpu.isolation.interposer import Interposer, region_path
from aimgpu.units import GIB, PPM


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[Dependencies, Instance]]:
    """Half of each of two GPUs."""
    machine = Machine(root=tmp_path, gpus=2)
    controller = boot(machine)
    controller.apply([deployment("chat")])
    parts = replace(controller._dependencies, hardware=RealDevices(machine.hardware))
    grants = tuple(
        Grant(
            id=f"chat/{index}",
            instance_id="chat",
            deployment="chat",
            node="here",
            device_id=device.id,
            partition_id=device.layout.partitions[0].id,
            memory_bytes=GIB,
            compute_ppm=PPM // 2,
            priority=Priority.LOW,
            level=Level.ADVISORY,
        )
        for index, device in enumerate(parts.hardware.read_devices())
    )
    yield parts, replace(controller.instances()[0], grants=grants)
    controller.close()


def test_there_is_a_mask_for_each_gpu(scene: tuple[Dependencies, Instance], tmp_path: Path) -> None:
    """They name the Devices in the order in which it sees them."""
    parts, instance = scene
    chooser = MechanismChooser([EngineFlags()], companions=[CuMasks(tmp_path / "masks.json")])
    found = make_launch_environment(replace(parts, isolator=chooser), instance, parts.hardware.read_devices())
    assert found.environment["HSA_CU_MASK"] == "0:0-151;1:0-151"
    assert {grant.mechanism for grant in found.grants} == {"engine flag + CU mask"}


def test_there_is_a_region_for_each_gpu_and_none_twice(scene: tuple[Dependencies, Instance], tmp_path: Path) -> None:
    """The library takes them by position: one too many, and the second GPU would be counted in the first one's region."""
    parts, instance = scene
    regions = tmp_path / "regions"
    interposer = Interposer(regions, find_library=lambda: Path("/lib.so"), why_not=lambda: None)
    held = replace(parts, isolator=MechanismChooser((interposer, EngineFlags())))
    for _ in range(2):  # and again when it is started again
        found = make_launch_environment(held, instance, held.hardware.read_devices())
        paths = [str(region_path(regions, grant.partition_id)) for grant in instance.grants]
        assert found.environment["AIMGPU_REGION"].split(":") == paths
    assert {grant.mechanism for grant in found.grants} == {"interposer"}
