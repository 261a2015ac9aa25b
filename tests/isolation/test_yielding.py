"""What a model yields reaches the region that its processes look at."""

from pathlib import Path

from aimgpu.domain import Priority
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.isolation.yielding import GateYield
from aimgpu.units import GIB


def test_a_share_is_written_where_the_instance_is_a_tenant(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "gpu.region", device_bytes=80 * GIB)
    region.admit(TenantLimits(name="chat-0", cap_bytes=10 * GIB, priority=Priority.HIGH))
    steer = GateYield(lambda: [region])
    assert steer.apply("chat-0", 0.35)
    (use,) = region.read_use()
    assert use.yield_ppm == 350_000
    assert steer.apply("chat-0", 7.0), "more than everything is everything"
    (use,) = region.read_use()
    assert use.yield_ppm == 1_000_000
    assert not steer.apply("other-0", 0.5)
    region.dismiss("chat-0")
    region.admit(TenantLimits(name="next-0", cap_bytes=10 * GIB))
    (use,) = region.read_use()
    assert use.yield_ppm == 0, "a new tenant begins strict"
    region.close()


def test_a_region_that_was_cut_steers_nothing_and_raises_nothing(tmp_path: Path) -> None:
    path = tmp_path / "gpu.region"
    region = Region.create(path, device_bytes=80 * GIB)
    with path.open("r+b") as file:
        file.truncate(100)
    assert not GateYield(lambda: [region]).apply("chat-0", 0.5)


def test_the_device_time_of_lower_tenants_is_read_beside_the_one_that_yields(tmp_path: Path) -> None:
    regions = [Region.create(tmp_path / f"{name}.region", device_bytes=80 * GIB) for name in ("shared", "other")]
    shared, other = regions
    for name, priority in (("chat-0", Priority.HIGH), ("peer-0", Priority.HIGH), ("night-0", Priority.LOW)):
        shared.admit(TenantLimits(name=name, cap_bytes=GIB, priority=priority))
    other.admit(TenantLimits(name="far-0", cap_bytes=GIB, priority=Priority.LOW))
    for region in regions:
        for tenant in region._layout.tenants:
            tenant.gpu_ns = 3_000_000_000
    steer = GateYield(lambda: regions)
    assert steer.read_lower("chat-0") == 3.0, "neither its own, nor a peer's, nor that of another GPU"
    assert steer.read_lower("night-0") is None
    assert steer.read_lower("nobody-0") is None
    for region in regions:
        region.close()
