"""A tenant that starves because of long launches is reported, with the length that causes it and what to do."""

import logging
from pathlib import Path

import pytest

from aimgpu.domain import Priority
from aimgpu.errors import InvalidInput
from aimgpu.isolation.interposer import Interposer, read_gate_bounds
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.isolation.starvation import StarvationReporter
from aimgpu.units import GIB


def test_a_tenant_that_is_held_most_of_the_time_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    region = Region.create(tmp_path / "gpu.region", device_bytes=GIB)
    region.admit(TenantLimits(name="chat", cap_bytes=GIB, priority=Priority.HIGH))
    region.admit(TenantLimits(name="batch", cap_bytes=GIB, priority=Priority.LOW))
    chat, batch = region.tenant_of("chat"), region.tenant_of("batch")
    chat.writers[0].begun, batch.longest_launch_ns = 7, 190_000_000
    times = iter((0.0, 0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0))
    reporter = StarvationReporter(lambda: next(times))
    with caplog.at_level(logging.WARNING):
        assert reporter.look([region]) == ()
        batch.held_ns += 1_900_000_000
        (found,) = reporter.look([region])
        batch.held_ns += 1_900_000_000
        assert reporter.look([region])
        assert reporter.look([region]) == ()
    assert (found.tenant, found.launch_milliseconds, found.higher) == ("batch", 190.0, ("chat",))
    assert "up to 190 ms" in found.text
    assert "sharing: promise" in found.text
    assert len([record for record in caplog.records if "gate.starving" in record.message]) == 1


def test_the_allowance_is_set_by_a_variable() -> None:
    assert read_gate_bounds({}).allowance_ppm == 50_000
    assert read_gate_bounds({"AIMGPU_GATE_ALLOWANCE": "12.5%"}).allowance_ppm == 125_000
    for text in ("many", "0", "101"):
        with pytest.raises(InvalidInput, match="AIMGPU_GATE_ALLOWANCE"):
            read_gate_bounds({"AIMGPU_GATE_ALLOWANCE": text})


def test_the_allowance_reaches_regions_that_are_older(tmp_path: Path) -> None:
    Region.create(tmp_path / "0.region", device_bytes=GIB).close()
    interposer = Interposer(tmp_path, bounds=read_gate_bounds({"AIMGPU_GATE_ALLOWANCE": "20"}))
    assert interposer.region("0", memory_bytes=GIB).header.allowance_ppm == 200_000


def test_regions_are_open_to_containers_only_below_a_private_folder(tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir(mode=0o755)
    shared = Interposer(outer / "regions").region("0", memory_bytes=GIB)
    assert shared.path.stat().st_mode & 0o777 == 0o600
    private = Interposer(tmp_path / "private" / "regions").region("0", memory_bytes=GIB)
    modes = [path.stat().st_mode & 0o777 for path in (private.path, private.path.parent, private.path.parent.parent)]
    assert modes == [0o666, 0o711, 0o700]
