"""Nodes held for large Asks."""

from tests.placement.worlds import grant_on, mi300x, state_of

from aimgpu.domain import Ask, Memory, Whole
from aimgpu.placement import NodeState, Snapshot
from aimgpu.placement.capacity.reservation import reserve_nodes
from aimgpu.placement.scoring.mix import Mix
from aimgpu.units import GIB


def cluster(nodes: int, *, busy: int = 0) -> Snapshot:
    made = []
    for number in range(nodes):
        devices = [mi300x(f"n{number}-g{gpu}") for gpu in range(8)]
        states = [state_of(device, grant_on(device, GIB)) if number < busy else state_of(device) for device in devices]
        made.append(NodeState(name=f"n{number}", devices=tuple(states), cpu_millis=96_000))
    return Snapshot(nodes=tuple(made))


def test_large_asks_get_three_quarters_of_their_part_in_whole_nodes() -> None:
    mix = Mix(counts=((Ask(name="", want=Whole(count=8)), 4), (Ask(name="", want=Whole()), 32)))
    held = reserve_nodes(cluster(8), mix)
    assert set(held.values()) == {8}
    assert len(held) == 3  # half of the demand, times three quarters, of 64 Devices


def test_the_emptiest_nodes_are_held() -> None:
    mix = Mix(counts=((Ask(name="", want=Whole(count=8)), 1), (Ask(name="", want=Whole()), 8)))
    assert sorted(reserve_nodes(cluster(8, busy=4), mix)) == ["n4", "n5", "n6"]


def test_nothing_is_held_where_nobody_asks_for_several_devices() -> None:
    mix = Mix(counts=((Ask(name="", want=Memory(memory_bytes=GIB)), 10),))
    assert reserve_nodes(cluster(4), mix) == {}
    assert reserve_nodes(cluster(4), Mix()) == {}


def test_a_node_without_the_cpu_for_them_is_not_held() -> None:
    mix = Mix(counts=((Ask(name="", want=Whole(count=8), cpu_millis=100_000), 1),))
    assert reserve_nodes(cluster(4), mix) == {}
