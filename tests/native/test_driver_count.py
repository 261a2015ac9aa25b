"""What the driver holds beside what was asked for is charged: blocks of small allocations, pools in pieces, streams."""

from typing import Any

import pytest
from tests.native.conftest import Puppet

from aimgpu.units import GIB, KIB, MIB

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
    assert rig.used() == 2 * CONTEXT + 6 * MIB
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


def test_streams_are_charged_before_they_are_made(rig: Any, tenant: Puppet) -> None:
    """What they had stays with the driver, for the next ones."""
    rig.driver.stream_bytes = 600 * KIB
    assert tenant.do("streams 20") == 20
    assert rig.used() == CONTEXT + 20 * MIB >= rig.driver.used > CONTEXT
    for number in range(1, 21):
        tenant.do(f"destroy {number}")
    assert tenant.do("streams 20") == 20
    assert rig.used() == CONTEXT + 20 * MIB
    assert tenant.do("streams 1") == 1
    assert rig.used() == CONTEXT + 22 * MIB


@pytest.mark.parametrize("pid_offset", [0, 1 << 20])
def test_streams_made_while_the_cap_is_reached_do_not_pass_it(rig: Any, tenant: Puppet, pid_offset: int) -> None:
    """Also where NVML does not list this process."""
    rig.driver.pid_offset = pid_offset
    rig.driver.stream_bytes = 600 * KIB
    fill(tenant, 2)
    assert tenant.do("streams 50") == 0
    tenant.do("free")
    assert tenant.do("streams 50") == 2
    assert GIB - 2 * MIB <= rig.driver.peak <= GIB


def test_streams_that_take_more_than_is_charged_are_charged_by_the_drivers_own_figure(rig: Any, tenant: Puppet) -> None:
    rig.driver.stream_bytes = 8 * MIB
    assert tenant.do("streams 20") == 20
    fill(tenant)
    assert rig.driver.counts > 0
    assert GIB - 32 * MIB < rig.driver.peak <= GIB
    assert rig.used() >= rig.driver.used


def test_what_the_driver_gave_back_is_no_longer_charged(rig: Any, tenant: Puppet) -> None:
    """Here the constant for a context is less than it takes."""
    rig.driver.context_bytes = 3 * CONTEXT
    number = tenant.do("context")
    tenant.do(f"enter {number}")
    fill(tenant)
    assert rig.used() >= rig.driver.used
    tenant.do(f"destroy_context {number}")
    tenant.do("primary 0")
    for _ in range(100):  # it does not ask at every allocation
        fill(tenant)
        if rig.driver.used > GIB - 32 * MIB:
            break
        tenant.do("rest 50")
    assert rig.driver.used > GIB - 32 * MIB
    assert rig.driver.peak <= GIB


def test_every_context_is_charged_before_it_is_made(rig: Any, tenant: Puppet) -> None:
    assert tenant.do("contexts 100") == GIB // CONTEXT - 1
    assert rig.used() == rig.driver.used == rig.driver.peak == GIB
    for number in range(3):
        tenant.do(f"destroy_context {number}")
    assert rig.used() == rig.driver.used == GIB - 3 * CONTEXT
    assert tenant.do("contexts 100") == 3
    assert rig.driver.peak == GIB


def test_a_context_that_the_driver_does_not_destroy_stays_charged(rig: Any, tenant: Puppet) -> None:
    tenant.do("allocate 500")
    assert tenant.do("destroy_primary") != 0
    assert rig.used() == rig.driver.used == CONTEXT + 500 * MIB
    fill(tenant)
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
