"""Pools, captured memory, limits of contexts, and streams of other devices: what the driver holds is what is charged."""

from typing import Any

import pytest
from tests.native.conftest import Puppet

from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB, MIB


@pytest.fixture
def tenant(rig: Any) -> Puppet:
    rig.admit(cap_bytes=1 * GIB)
    return Puppet(rig, "tenant")


def test_a_destroyed_pool_stays_charged_until_its_last_allocation_is_freed(rig: Any, tenant: Puppet) -> None:
    codes = []
    for _ in range(6):
        assert tenant.do("pool") == 0
        codes.append(tenant.do("allocate_from 300"))
        assert tenant.do("destroy_pool") == 0
    assert codes == [0, 0, 0, 2, 2, 2]
    assert rig.driver.used == 900 * MIB <= rig.used() <= GIB
    for _ in range(3):
        assert tenant.do("free_on 0") == 0
    tenant.do("sync")
    assert rig.driver.used == rig.used() == 0


def test_a_new_pool_with_the_handle_of_a_destroyed_one_is_another_pool(rig: Any, tenant: Puppet) -> None:
    tenant.do("pool")
    tenant.do("allocate_from 100")
    tenant.do("destroy_pool")
    tenant.do("pool")
    tenant.do("allocate_from 200")
    assert rig.driver.used == 300 * MIB <= rig.used()
    tenant.do("free_on 0 1")
    tenant.do("destroy_pool")
    tenant.do("sync")
    assert rig.driver.used == 100 * MIB <= rig.used() <= 128 * MIB
    tenant.do("free_on 0")
    tenant.do("sync")
    assert rig.driver.used == rig.used() == 0


def test_pools_of_host_memory_are_not_charged(rig: Any, tenant: Puppet) -> None:
    tenant.do("pool 2")
    for _ in range(4):
        assert tenant.do("allocate_from 600") == 0
    assert rig.used() == rig.driver.used == 0
    for _ in range(4):
        assert tenant.do("free_on 0") == 0
    assert tenant.do("destroy_pool") == 0


def test_captured_pairs_are_charged_by_the_most_that_lives_at_once(rig: Any, tenant: Puppet) -> None:
    stream = tenant.do("stream")
    tenant.do(f"begin {stream}")
    for _ in range(100):
        assert tenant.do(f"allocate_on 100 {stream}") == 0
        assert tenant.do(f"free_on {stream}") == 0
    assert rig.used() == 100 * MIB
    for _ in range(10):
        assert tenant.do(f"allocate_on 100 {stream}") == 0
    assert tenant.do(f"allocate_on 100 {stream}") == 2, "eleven at once do not fit"
    tenant.do(f"finish {stream}")
    assert rig.used() == 1000 * MIB
    tenant.do("destroy_graph")
    assert rig.used() == 0


def test_what_one_captured_stream_freed_another_does_not_get(rig: Any, tenant: Puppet) -> None:
    """Branches of a graph may run side by side."""
    first, second = tenant.do("stream"), tenant.do("stream")
    tenant.do(f"begin {first}")
    tenant.do(f"allocate_on 100 {first}")
    tenant.do(f"free_on {first}")
    tenant.do(f"begin {second}")
    tenant.do(f"allocate_on 100 {second}")
    assert rig.used() == 200 * MIB


def test_the_heap_of_device_code_is_charged(rig: Any, tenant: Puppet) -> None:
    assert tenant.do(f"limit 2 {600 * 1024}") == 0
    assert rig.used() == rig.driver.used == 592 * MIB
    assert tenant.do("allocate 500") == 2
    assert tenant.do(f"limit 2 {2000 * 1024}") == 2
    assert rig.used() == rig.driver.used == 592 * MIB
    assert tenant.do(f"limit 2 {8 * 1024}") == 0
    assert rig.used() == rig.driver.used == 0


def test_stacks_are_charged_for_every_resident_thread(rig: Any, tenant: Puppet) -> None:
    """100 processors with 1024 threads each: 5 KiB of stack are 400 MiB more than the first one."""
    assert tenant.do("limit 0 5") == 0
    assert rig.used() == rig.driver.used == 400 * MIB
    assert tenant.do("limit 0 64") == 2


def test_a_green_context_is_admitted_before_it_is_made(rig: Any) -> None:
    rig.admit("small", cap_bytes=64 * MIB, context_bytes=100 * MIB)
    rig.driver.context_bytes = 100 * MIB
    assert Puppet(rig, "small").do("green") == 2
    assert rig.driver.used == 0


def two_devices(rig: Any) -> Region:
    rig.driver.devices = 2
    second: Region = Region.create(rig.folder / "second.region", device_bytes=80 * GIB, device="GPU-" + "a1" * 16)
    second.admit(TenantLimits(name="tenant", cap_bytes=1 * GIB, rounding_bytes=1))
    return second


def test_a_stream_ordered_allocation_is_charged_to_the_streams_device(rig: Any) -> None:
    rig.admit(cap_bytes=1 * GIB)
    second = two_devices(rig)
    tenant = Puppet(rig, "tenant", AIMGPU_REGION=f"{rig.region.path}:{second.path}")
    tenant.do("primary 1")
    stream = tenant.do("stream")
    tenant.do("primary 0")
    assert tenant.do(f"allocate_on 100 {stream}") == 0
    assert list(rig.driver.used_on)[:2] == [0, 100 * MIB]
    assert (rig.used(), second.read_use()[0].used_bytes) == (0, 100 * MIB)
    second.close()


@pytest.mark.parametrize("place", [0, 2, 3])
def test_pools_of_managed_memory_are_charged_wherever_they_prefer_to_be(rig: Any, tenant: Puppet, place: int) -> None:
    """No place, the host, a node of the host: a kernel that touches the memory brings it to the device."""
    assert tenant.do(f"pool {place} 0 2") == 0
    assert [tenant.do("allocate_from 300") for _ in range(4)] == [0, 0, 0, 2]
    assert rig.driver.used == 900 * MIB <= rig.used() <= GIB


def test_what_was_shared_stays_charged_without_its_handle(rig: Any, tenant: Puppet) -> None:
    """It can be imported again, by this very process."""
    codes = []
    for _ in range(4):
        codes.append(tenant.do("create 300"))
        if codes[-1] == 0:
            tenant.do("export")
            tenant.do("release")
    assert codes == [0, 0, 0, 2]
    assert rig.used() == rig.driver.used == 900 * MIB


def test_a_free_behind_a_kernel_gives_back_when_the_kernel_has_ended(rig: Any, tenant: Puppet) -> None:
    """cuMemFreeAsync of ordinary memory: the driver frees it when the stream comes to it."""
    stream = tenant.do("stream")
    assert tenant.do("allocate 600") == 0
    tenant.do(f"launch 1 1500000 {stream}")
    assert tenant.do(f"free_on {stream}") == 0
    assert tenant.do("allocate 600") == 2
    assert rig.used() == 600 * MIB
    tenant.do(f"sync {stream}")
    assert rig.used() == 0
    assert tenant.do("allocate 600") == 0
    assert tenant.do("free_on 0") == 0
    assert tenant.do("allocate 600") == 0, "an idle stream frees at once"
    assert rig.driver.events == 0


@pytest.mark.parametrize(("limit", "count"), [(3, 64), (4, 1 << 20)])
def test_limits_of_the_device_runtime_are_charged(rig: Any, tenant: Puppet, limit: int, count: int) -> None:
    """How deep device code may synchronise, and how many launches it may have pending."""
    assert tenant.do(f"limit_count {limit} 2") == 0
    assert rig.used() == 0
    assert tenant.do(f"limit_count {limit} {count}") == 2
    assert tenant.do(f"limit_count {limit} {count // 16}") == 0
    assert 0 < rig.used() < GIB


def test_a_context_that_the_driver_does_not_destroy_keeps_its_memory(rig: Any, tenant: Puppet) -> None:
    """A primary context is released instead: what is freed in it afterwards is given back."""
    tenant.do("primary 0")
    assert tenant.do("allocate 600") == 0
    assert tenant.do("destroy_primary") != 0
    assert rig.used() == 600 * MIB
    assert tenant.do("free") == 0
    assert rig.used() == rig.driver.used == 0


def test_only_refusals_are_counted_as_denied(rig: Any, tenant: Puppet) -> None:
    """An allocation that fits once a pool gave back what it holds was not refused."""
    assert tenant.do("pool") == 0
    assert tenant.do("allocate_from 800") == 0
    assert tenant.do("free_on 0") == 0
    assert tenant.do("allocate 600") == 0
    assert rig.region.read_use()[0].denied == 0
    assert tenant.do("allocate 600") == 2
    assert rig.region.read_use()[0].denied == 1
