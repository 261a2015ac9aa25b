"""Room that plans under way still need, names that they hold, and layouts that they change, as other plans see them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.control.effects import REAL
from aimgpu.control.loop import Loop
from aimgpu.control.reservations import Reservations
from aimgpu.control.snapshots import Reading
from aimgpu.domain import Grant, Level, Priority
from aimgpu.errors import Conflict
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.fit import free_bytes
from aimgpu.units import GIB

DEVICES = SimulatedHardware([("MI300X", 2)]).read_devices()
PARTITIONS = [device.layout.partitions[0] for device in DEVICES]
sizes = st.integers(1, 90)


def made() -> Reservations:
    return Reservations(Loop(REAL, lambda: Reading(states=())))


def grant(owner: str, gib: int, gpu: int = 0, *, exclusive: bool = False) -> Grant:
    return Grant(
        id=f"{owner}/0",
        instance_id=owner,
        deployment=owner.partition("-")[0],
        node="here",
        device_id=DEVICES[gpu].id,
        partition_id=PARTITIONS[gpu].id,
        memory_bytes=gib * GIB,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.NONE,
        exclusive=exclusive,
    )


def snapshot(*grants: Grant) -> Snapshot:
    states = tuple(
        DeviceState(device=device, grants=tuple(one for one in grants if one.device_id == device.id)) for device in DEVICES
    )
    return Snapshot(nodes=(NodeState(name="here", devices=states),))


def free_gib(found: Snapshot, gpu: int = 0) -> int:
    (state,) = [state for _, state in found.devices() if state.device.id == DEVICES[gpu].id]
    return free_bytes(state, PARTITIONS[gpu]) // GIB


@settings(max_examples=examples(20))
@given(sizes, sizes)
def test_reserved_room_is_taken_until_it_is_dropped(held: int, wanted: int) -> None:
    reservations = made()
    now = snapshot(grant("chat-0", held))
    before = free_gib(now)
    reservations.reserve((1, 0), [grant("code-0", wanted)])
    assert free_gib(reservations.apply_to(now)) == before - wanted
    assert free_gib(reservations.apply_to(now), 1) == free_gib(now, 1)
    reservations.drop((1, 0))
    assert reservations.apply_to(now) == now


@settings(max_examples=examples(20))
@given(sizes, sizes)
def test_what_a_replaced_instance_still_holds_counts_once(held: int, wanted: int) -> None:
    """The larger of the two is needed, not their sum: the old one ends before the new one is charged."""
    reservations = made()
    now = snapshot(grant("chat-0", held))
    whole = free_gib(snapshot())
    reservations.reserve((1, 0), [grant("chat-1", wanted)], ["chat-0"])
    assert free_gib(reservations.apply_to(now)) == whole - max(held, wanted)
    assert free_gib(reservations.apply_to(snapshot())) == whole - wanted, "once it ended, all of it is needed"


@settings(max_examples=examples(20))
@given(st.lists(sizes, min_size=1, max_size=4), sizes)
def test_several_starts_share_what_one_end_frees(wanted: list[int], held: int) -> None:
    reservations = made()
    reservations.reserve((1, 0), [grant(f"new-{number}", gib) for number, gib in enumerate(wanted)], ["old-0"])
    left = free_gib(reservations.apply_to(snapshot(grant("old-0", held))))
    assert left == free_gib(snapshot()) - max(held, sum(wanted))


def test_a_partition_of_its_own_stays_reserved_although_its_holder_is_still_there() -> None:
    reservations = made()
    reservations.reserve((1, 0), [grant("new-0", 10, exclusive=True)], ["old-0"])
    shown = reservations.apply_to(snapshot(grant("old-0", 50)))
    assert [one.instance_id for _, state in shown.devices() for one in state.grants] == ["old-0/reserved", "new-0"]


def test_another_plan_that_ends_the_same_instance_does_not_get_its_room() -> None:
    reservations = made()
    reservations.reserve((1, 0), [grant("new-0", 40)], ["old-0"])
    shown = reservations.apply_to(snapshot(grant("old-0", 50)))
    assert free_gib(shown.without_instance("old-0")) == free_gib(snapshot()) - 50


def test_chains_of_one_operation_are_dropped_one_by_one() -> None:
    reservations = made()
    reservations.reserve((1, 0), [grant("a-0", 10)])
    reservations.reserve((1, 1), [grant("b-0", 20)])
    reservations.drop((1, 0))
    assert free_gib(reservations.apply_to(snapshot())) == free_gib(snapshot()) - 20
    reservations.drop((1, 0))
    reservations.drop((9, 9))
    assert reservations.holds([PARTITIONS[0].id])


def test_a_gpu_whose_layout_changes_is_not_there_for_others() -> None:
    reservations = made()
    assert not reservations.layouts_change
    reservations.block((1, 0), [PARTITIONS[0].id], [DEVICES[0].id])
    assert reservations.layouts_change
    assert reservations.holds([PARTITIONS[0].id])
    assert not reservations.holds([PARTITIONS[1].id])
    assert [state.device.id for _, state in reservations.apply_to(snapshot()).devices()] == [DEVICES[1].id]
    reservations.unblock((1, 0))
    reservations.unblock((1, 0))
    assert reservations.apply_to(snapshot()) == snapshot()


def test_a_name_is_claimed_once_until_its_claim_ends() -> None:
    reservations = made()
    first = reservations.claim("chat", "r1", 1)
    with pytest.raises(Conflict, match="chat is being changed by another operation") as caught:
        reservations.claim("chat", "r2", 2)
    assert caught.value.hint
    assert reservations.claims_on(["chat", "code", "chat"]) == [first]
    reservations.end_claim(first)
    reservations.end_claim(first)
    assert first.ended
    second = reservations.claim("chat", "r2", 2)
    reservations.end_claim(first)
    assert reservations.claims_on(["chat"]) == [second], "ending the first again leaves the second"


def test_claims_of_those_that_will_need_room_are_found_by_partition() -> None:
    reservations = made()
    claim = reservations.claim("chat", "r", 1)
    reservations.reserve((1, 0), [grant("chat-0", 10)])
    assert reservations.claims_for_room_on([PARTITIONS[0].id]) == [claim]
    assert reservations.claims_for_room_on([PARTITIONS[1].id]) == []


def test_instances_that_are_ending_are_not_counted_on() -> None:
    reservations = made()
    now = replace(snapshot(grant("chat-0", 10)), running={})
    reservations.begin_ending(["chat-0", "code-0"])
    assert reservations.is_ending("chat-0")
    assert "chat-0" not in reservations.apply_to(now).running
    reservations.stop_ending(["chat-0", "never-there"])
    assert not reservations.is_ending("chat-0")
    assert reservations.is_ending("code-0")
