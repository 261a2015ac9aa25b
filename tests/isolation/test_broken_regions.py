"""Regions that somebody cuts or removes while they are in use."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.isolation.test_region import attach

from aimgpu.domain import Device, Grant, Level
from aimgpu.errors import RegionUnusable
from aimgpu.isolation.critical_signal import CriticalSignal
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.request_signals import RegionRequestSignals
from aimgpu.units import GIB

MakeDevice = Callable[..., Device]
MakeGrant = Callable[..., Grant]


def test_a_region_that_is_cut_is_told_and_touched_no_more(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    """To read what is gone would end the daemon: this very process lives on."""
    device = make_device()
    grant = make_grant(device, level=Level.RUNTIME)
    interposer = Interposer(tmp_path, find_library=lambda: Path("/lib.so"), why_not=lambda: None)
    interposer.enforce(grant, device, device.layout.partitions[0])
    (region,) = interposer.regions()
    signal = CriticalSignal(region, grant.instance_id)
    os.truncate(region.path, 100)
    signal.begin()
    signal.end()
    for touch in (region.read_use, region.reap, region.wake, lambda: region.resize(grant.instance_id, GIB)):
        with pytest.raises(RegionUnusable, match="was cut"):
            touch()
    assert interposer.regions() == ()
    assert interposer.read_tenants(grant.partition_id) == {}
    assert interposer.read_used_bytes(grant) is None
    interposer.release(grant)
    later = replace(grant, id="code-0/0", instance_id="code-0")
    interposer.enforce(later, device, device.layout.partitions[0])
    assert list(interposer.read_tenants(grant.partition_id)) == ["code-0"], "the next one has a new region"


def test_a_region_whose_file_was_removed_holds_its_tenants_and_the_next_gets_a_new_one(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    """As systemd's RemoveIPC does to what lies in /dev/shm when a user logs out."""
    device = make_device()
    grant = make_grant(device, level=Level.RUNTIME)
    interposer = Interposer(tmp_path, find_library=lambda: Path("/lib.so"), why_not=lambda: None)
    interposer.enforce(grant, device, device.layout.partitions[0])
    (region,) = interposer.regions()
    region.path.unlink()
    assert [use.name for one in interposer.regions() for use in one.read_use()] == [grant.instance_id]
    later = replace(grant, id="code-0/0", instance_id="code-0")
    interposer.enforce(later, device, device.layout.partitions[0])
    assert region.path.exists()
    assert sorted(use.name for one in interposer.regions() for use in one.read_use()) == sorted([grant.instance_id, "code-0"])
    interposer.release(later)
    assert [use.name for one in interposer.regions() for use in one.read_use()] == [grant.instance_id]
    assert interposer.read_used_bytes(grant) == 0
    interposer.resize(grant, 3 * GIB)
    assert [use.cap_bytes for use in region.read_use()] == [3 * GIB]
    interposer.release(grant)
    assert [use for one in interposer.regions() for use in one.read_use()] == []


def test_requests_are_signalled_in_the_region_that_is_there_now(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = make_device()
    first = make_grant(device, level=Level.RUNTIME)
    second = replace(first, id="code-0/0", instance_id="code-0")
    interposer = Interposer(tmp_path, find_library=lambda: Path("/lib.so"), why_not=lambda: None)
    signals = RegionRequestSignals(tmp_path)
    for grant in (first, second):
        interposer.enforce(grant, device, device.layout.partitions[0])
        for signal in signals.find([grant.instance_id])[grant.instance_id]:
            signal.begin()
        (region,) = [one for one in interposer.regions() if any(use.name == grant.instance_id for use in one.read_use())]
        assert region._layout.tenants[0].writers[0].running == 1
        region.path.unlink()


def test_what_a_dead_process_had_is_not_used_any_more(tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device()
    grant = make_grant(device, level=Level.RUNTIME)
    interposer = Interposer(tmp_path, find_library=lambda: Path("/lib.so"), why_not=lambda: None)
    interposer.enforce(grant, device, device.layout.partitions[0])
    (region,) = interposer.regions()
    attach(region, grant.instance_id, GIB)
    attach(region, grant.instance_id, 2 * GIB).start_ticks += 1  # another process has its number by now
    assert interposer.read_used_bytes(grant) == GIB
