"""A compute limit is kept by a part of the units or by a part of the time, never by both: that would be a part of a part."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from aimgpu.domain import Device, Grant, Level, Priority, Vendor
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.cu_masks import CuMasks
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.mps_limits import MpsMechanism
from aimgpu.isolation.throttle import GateThrottle
from aimgpu.units import PPM

MakeDevice = Callable[..., Device]
MakeGrant = Callable[..., Grant]
LIMIT = 200_000


class Threads:
    """MPS that is there, and passes on what it is asked for."""

    def unavailable_reason(self) -> str | None:
        return None

    def start(self, uuid: str) -> None:
        """Nothing to start."""

    def tenant_environment(
        self, uuid: str, *, memory_bytes: int | None = None, compute_ppm: int | None = None, yields: bool = False
    ) -> Mapping[str, str]:
        return {"THREADS": str(compute_ppm)}


@pytest.fixture
def interposer(tmp_path: Path) -> Interposer:
    return Interposer(tmp_path / "regions", find_library=lambda: Path("/somewhere/libaimgpu.so"), why_not=lambda: None)


def ceiling(interposer: Interposer) -> int:
    """On the time, as the gate keeps it."""
    ((use,),) = [region.read_use() for region in interposer.regions()]
    return use.compute_ppm


def test_beside_mps_the_gate_keeps_no_ceiling_on_time(
    interposer: Interposer, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device, mps = make_device(), MpsMechanism(Threads())
    chooser = MechanismChooser([HardwareBoundary(), mps, interposer, EngineFlags()], partners={mps.name: interposer})
    got = chooser.enforce(make_grant(device, compute_ppm=LIMIT), device, device.layout.partitions[0])
    assert got.mechanisms == ("mps", "interposer")
    assert got.environment["THREADS"] == str(LIMIT)
    assert ceiling(interposer) == PPM


@pytest.mark.parametrize("compute_ppm", [LIMIT, None, PPM])
def test_beside_a_cu_mask_the_gate_keeps_no_ceiling_on_time(
    tmp_path: Path,
    interposer: Interposer,
    make_device: MakeDevice,
    make_grant: MakeGrant,
    compute_ppm: int | None,
) -> None:
    device = make_device(vendor=Vendor.AMD)
    chooser = MechanismChooser([HardwareBoundary(), interposer], companions=[CuMasks(tmp_path / "masks.json")])
    got = chooser.enforce(make_grant(device, compute_ppm=compute_ppm), device, device.layout.partitions[0])
    assert ("HSA_CU_MASK" in got.environment) is (compute_ppm == LIMIT)
    assert ceiling(interposer) == PPM


def test_where_masks_cannot_be_had_the_gate_keeps_the_ceiling(
    tmp_path: Path, interposer: Interposer, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = make_device(vendor=Vendor.NVIDIA)
    chooser = MechanismChooser([HardwareBoundary(), interposer], companions=[CuMasks(tmp_path / "masks.json")])
    chooser.enforce(make_grant(device, compute_ppm=LIMIT), device, device.layout.partitions[0])
    assert ceiling(interposer) == LIMIT


def test_held_back_low_tenants_get_back_all_of_the_time(
    interposer: Interposer, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    """What they have of the units stays as it is."""
    device, mps = make_device(), MpsMechanism(Threads())
    chooser = MechanismChooser([HardwareBoundary(), mps, interposer], partners={mps.name: interposer})
    wanted = {"compute_ppm": LIMIT, "priority": Priority.LOW}
    chooser.enforce(make_grant(device, **wanted), device, device.layout.partitions[0])
    held = make_grant(device, **wanted, level=Level.DRIVER, mechanisms=("mps", "interposer"))
    throttle = GateThrottle(lambda: [held], interposer.regions)
    throttle.apply(device.id, 0.5)
    assert ceiling(interposer) == PPM // 2
    throttle.apply(device.id, 1.0)
    assert ceiling(interposer) == PPM
