"""What the driver holds beside what was asked for is charged: blocks of small allocations, pools in pieces, streams."""

from typing import Any

import pytest
from tests.native.conftest import Puppet

from aimgpu.units import GIB, MIB

CONTEXT = 64 * MIB


@pytest.fixture
def tenant(rig: Any) -> Puppet:
    """With a context that takes what is charged for it."""
    rig.admit(cap_bytes=1 * GIB, rounding_bytes=2 * MIB, context_bytes=CONTEXT)
    rig.driver.context_bytes = CONTEXT
    rig.driver.block_bytes = 2 * MIB
    rig.driver.pool_grain = 32 * MIB
    made = Puppet(rig, "tenant")
    made.do("primary 0")
    return made


def fill(tenant: Puppet, mib: int = 16) -> None:
    while tenant.do(f"allocate {mib}") == 0:
        pass


def test_a_block_is_charged_until_its_last_allocation_is_freed(rig: Any, tenant: Puppet) -> None:
    for _ in range(8):
        assert tenant.do("allocate_small 512") == 0  # KiB: four in a block
    assert rig.used() == rig.driver.used == CONTEXT + 4 * MIB
    for number in (6, 5, 4, 2, 1, 0):  # all but the fourth and the last
        assert tenant.do(f"free {number}") == 0
    assert rig.used() == rig.driver.used == CONTEXT + 4 * MIB
    tenant.do("free")
    assert rig.used() == rig.driver.used == CONTEXT + 2 * MIB
    tenant.do("free")
    assert rig.used() == rig.driver.used == CONTEXT


def test_blocks_end_with_their_context(rig: Any, tenant: Puppet) -> None:
    number = tenant.do("context")
    tenant.do(f"enter {number}")
    for _ in range(5):
        assert tenant.do("allocate_small 700") == 0
    assert rig.used() == CONTEXT + 6 * MIB
    tenant.do(f"destroy_context {number}")
    assert rig.used() == CONTEXT


def test_blocks_kept_by_one_allocation_each_leave_no_room(rig: Any, tenant: Puppet) -> None:
    taken = 0
    while tenant.do("allocate_small 512") == 0:
        taken += 1
    for number in range(taken - 1, -1, -1):
        if number % 4:
            tenant.do(f"free {number}")
    fill(tenant)
    assert rig.driver.peak <= GIB


def test_a_pool_that_grows_for_a_request_it_has_room_for_does_not_pass_the_cap(rig: Any, tenant: Puppet) -> None:
    rig.driver.pool_scatters = 1
    assert [tenant.do("allocate_on 128 0") for _ in range(7)] == [0] * 7
    assert tenant.do("free_on 0") == 0
    assert tenant.do("allocate_on 128 0") == 0, "after the pool was trimmed"
    assert tenant.do("allocate_on 128 0") == 2
    assert rig.driver.peak <= GIB


def test_streams_are_charged_by_the_drivers_own_figure(rig: Any, tenant: Puppet) -> None:
    rig.driver.stream_bytes = 8 * MIB
    for _ in range(20):
        tenant.do("stream")
    fill(tenant)
    assert rig.driver.counts > 0
    assert GIB - 32 * MIB < rig.driver.peak <= GIB
    assert rig.used() >= rig.driver.used


def test_what_the_driver_gave_back_is_no_longer_charged(rig: Any, tenant: Puppet) -> None:
    rig.driver.stream_bytes = 8 * MIB
    streams = [tenant.do("stream") for _ in range(20)]
    fill(tenant)
    for stream in streams:
        tenant.do(f"destroy {stream}")
    for _ in range(100):  # it does not ask at every allocation
        fill(tenant)
        if rig.driver.used > GIB - 32 * MIB:
            break
        tenant.do("rest 50")
    assert rig.driver.used > GIB - 32 * MIB
    assert rig.driver.peak <= GIB


def test_where_nvml_lists_pids_of_another_namespace_the_constant_remains(rig: Any, tenant: Puppet) -> None:
    rig.driver.pid_offset = 1 << 20
    fill(tenant)
    assert rig.used() == rig.driver.used == GIB
    assert rig.driver.counts > 0


def test_far_from_the_cap_the_driver_is_not_asked(rig: Any, tenant: Puppet) -> None:
    rig.region.resize("tenant", 4 * GIB)
    for _ in range(50):
        assert tenant.do("allocate 16") == 0
        assert tenant.do("free") == 0
    assert rig.driver.counts == 0


def test_a_child_asks_for_itself(rig: Any, tenant: Puppet) -> None:
    fill(tenant)
    assert tenant.do("fork_while_allocating 3") == 3, "no child gets a context beside a parent that has taken everything"
    assert rig.driver.peak <= GIB
