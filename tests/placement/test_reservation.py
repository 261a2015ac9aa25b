"""Nodes held for large Asks."""

from dataclasses import replace
from fractions import Fraction as Ratio

from benchmarks.placement.reservation import reserve_nodes
from tests.placement.worlds import grant_on, mi300x, state_of

from aimgpu.domain import Ask, Fraction, Memory, Placement, Refusal, Whole
from aimgpu.placement import NodeState, Snapshot
from aimgpu.placement.decide import decide
from aimgpu.placement.scoring.mix import Mix
from aimgpu.units import GIB


def cluster(nodes: int, *, busy: int = 0) -> Snapshot:
    made = []
    for number in range(nodes):
        devices = [mi300x(f"n{number}-g{gpu}") for gpu in range(8)]
        states = [state_of(device, grant_on(device, GIB)) if number < busy else state_of(device) for device in devices]
        made.append(NodeState(name=f"n{number}", devices=tuple(states), cpu_millis=96_000))
    return Snapshot(nodes=tuple(made))


def test_asks_for_several_devices_get_their_part_in_whole_nodes() -> None:
    mix = Mix(counts=((Ask(name="", want=Whole(count=8)), 4), (Ask(name="", want=Whole()), 32)))
    held = reserve_nodes(cluster(8), mix, several=Ratio(3, 4))
    assert set(held.values()) == {8}
    assert len(held) == 3  # half of the demand, times three quarters, of 64 Devices


def test_the_emptiest_nodes_are_held() -> None:
    mix = Mix(counts=((Ask(name="", want=Whole(count=8)), 1), (Ask(name="", want=Whole()), 8)))
    assert sorted(reserve_nodes(cluster(8, busy=4), mix, several=Ratio(3, 4))) == ["n4", "n5", "n6"]


def test_nothing_is_held_where_nobody_asks_for_whole_devices() -> None:
    mix = Mix(counts=((Ask(name="", want=Memory(memory_bytes=GIB)), 10),))
    assert reserve_nodes(cluster(4), mix) == {}
    assert reserve_nodes(cluster(4), Mix()) == {}


def test_single_devices_are_held_against_shares_alone() -> None:
    whole, share = Ask(name="", want=Whole()), Ask(name="", want=Fraction(ppm=500_000))
    assert reserve_nodes(cluster(8), Mix(counts=((whole, 32),))) == {}
    held = reserve_nodes(cluster(8), Mix(counts=((whole, 32), (share, 64))), one=Ratio(1, 2))
    assert list(held.values()) == [1, 1]  # half of the demand, times a half, of 8 nodes


def test_a_node_held_for_whole_devices_takes_no_share_and_says_why() -> None:
    world = cluster(1)
    share = Ask(name="share", want=Memory(memory_bytes=GIB))
    assert isinstance(decide(world, Ask(name="whole", want=Whole()), reserved={"n0": 1}), Placement)
    refusal = decide(world, share, reserved={"n0": 1})
    assert isinstance(refusal, Refusal)
    assert {reason.text for reason in refusal.reasons} == {"its node is reserved for requests of whole GPUs"}
    assert isinstance(decide(world, share), Placement)


def test_nodes_for_the_ask_with_the_most_cpu_are_held_first() -> None:
    nodes = tuple(replace(node, cpu_millis=128_000 if node.name > "n5" else 96_000) for node in cluster(8).nodes)
    asks = (
        (Ask(name="", want=Whole(count=8), cpu_millis=120_000), 1),
        (Ask(name="", want=Whole(count=8), cpu_millis=64_000), 1),
    )
    assert sorted(reserve_nodes(Snapshot(nodes=nodes), Mix(counts=asks), several=Ratio(3, 8))) == ["n0", "n6", "n7"]


def test_a_node_without_the_cpu_for_them_is_not_held() -> None:
    mix = Mix(counts=((Ask(name="", want=Whole(count=8), cpu_millis=100_000), 1),))
    assert reserve_nodes(cluster(4), mix) == {}
