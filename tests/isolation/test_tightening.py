from collections.abc import Iterator
from pathlib import Path

import pytest

from aimgpu.domain import Grant, Level, Priority
from aimgpu.errors import RegionUnusable
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.isolation.throttle import GateThrottle
from aimgpu.units import GIB, PPM


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    region = Region.create(tmp_path / "gpu.region", device_bytes=100 * GIB)
    yield region
    region.close()


def grant(name: str, priority: Priority, compute_ppm: int | None = None, device: str = "gpu") -> Grant:
    return Grant(
        id=f"{name}/0",
        instance_id=name,
        deployment=name,
        node="here",
        device_id=device,
        partition_id=f"{device}/spx-0",
        memory_bytes=GIB,
        compute_ppm=compute_ppm,
        priority=priority,
        level=Level.RUNTIME,
    )


def compute(region: Region) -> dict[str, int]:
    return {use.name: use.compute_ppm for use in region.read_use()}


def test_low_tenants_of_the_device_get_less_and_then_back_what_they_were_granted(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    grants = [grant("critical", Priority.HIGH), grant("batch", Priority.LOW), grant("small", Priority.LOW, 400_000)]
    for one in grants:
        limits = TenantLimits(
            name=one.instance_id, cap_bytes=GIB, priority=one.priority, compute_ppm=one.compute_ppm or PPM, context_bytes=0
        )
        region.admit(limits)
    elsewhere = grant("batch", Priority.LOW, device="other")
    tightener = GateThrottle(lambda: [*grants, elsewhere], lambda: [region])
    assert tightener.apply("gpu", 0.25) == ("batch", "small")
    assert compute(region) == {"critical": PPM, "batch": 250_000, "small": 100_000}
    assert tightener.apply("gpu", 1.0) == ("batch", "small")
    assert compute(region) == {"critical": PPM, "batch": PPM, "small": 400_000}
    assert [record.message for record in caplog.records] == ["gate.tightened", "gate.released"]


def test_a_device_without_a_gate_or_with_a_broken_one_is_left_alone(region: Region) -> None:
    tightener = GateThrottle(lambda: [grant("batch", Priority.LOW)], lambda: [region])
    assert tightener.apply("gpu", 0.5) == ()

    def broken() -> list[Region]:
        raise RegionUnusable("it is damaged")

    assert GateThrottle(lambda: [grant("batch", Priority.LOW)], broken).apply("gpu", 0.5) == ()
