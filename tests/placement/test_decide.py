from dataclasses import replace

import pytest
from tests.placement.worlds import MI300X_BYTES, ask, grant_on, mi300x, state_of, world

from aimgpu.domain import (
    Ask,
    Auto,
    Fraction,
    IsolationRequirement,
    Level,
    Memory,
    PartitionKind,
    Placement,
    Refusal,
    Spread,
    Whole,
)
from aimgpu.errors import InvalidInput, UnknownPartition
from aimgpu.placement import NodeState, Snapshot, snapshot_from_json, snapshot_to_json
from aimgpu.placement.decide import decide, decide_all
from aimgpu.placement.scoring.mix import Mix
from aimgpu.units import GIB, PPM, format_bytes


def placed(decision: object) -> Placement:
    assert isinstance(decision, Placement), decision
    return decision


def refused(decision: object) -> Refusal:
    assert isinstance(decision, Refusal), decision
    return decision


def test_the_tightest_partition_that_fits_is_taken() -> None:
    one, two = mi300x("g0"), mi300x("g1")
    snapshot = world(state_of(one), state_of(two, grant_on(two, 100 * GIB)))
    slot = placed(decide(snapshot, ask(gib=40))).slots[0]
    assert (slot.device_id, slot.memory_bytes, slot.exclusive) == ("g1", 40 * GIB, False)


def test_spread_takes_the_emptiest_device() -> None:
    one, two = mi300x("g0"), mi300x("g1")
    snapshot = world(state_of(one), state_of(two, grant_on(two, 100 * GIB)))
    assert placed(decide(snapshot, ask(spread=Spread.SPREAD))).slots[0].device_id == "g0"


def test_the_order_of_listing_does_not_matter() -> None:
    states = [state_of(mi300x(f"g{index}", "cpx")) for index in range(4)]
    assert decide(world(*states), ask()) == decide(world(*reversed(states)), ask())


def test_auto_takes_the_footprint() -> None:
    slot = placed(decide(world(state_of(mi300x("g0"))), ask(want=Auto(), footprint_bytes=7))).slots[0]
    assert slot.memory_bytes == 7


def test_auto_without_a_footprint_cannot_be_meant() -> None:
    with pytest.raises(InvalidInput, match="footprint"):
        decide(world(state_of(mi300x("g0"))), ask(want=Auto()))


def test_memory_below_the_footprint_is_refused_with_both_numbers() -> None:
    refusal = refused(decide(world(state_of(mi300x("g0"))), ask(gib=4, footprint_bytes=6 * GIB)))
    assert refusal.reasons[0].code == "memory"
    assert "6GiB" in refusal.reasons[0].text
    assert "4GiB" in refusal.reasons[0].text
    assert refusal.reasons[0].short_bytes == 2 * GIB


def test_a_fraction_is_of_the_whole_device_and_lies_in_one_partition() -> None:
    half = ask(want=Fraction(ppm=PPM // 2))
    assert placed(decide(world(state_of(mi300x("g0"))), half)).slots[0].memory_bytes == MI300X_BYTES // 2
    assert refused(decide(world(state_of(mi300x("g0", "cpx"))), half)).reasons[0].code == "memory"


def test_a_kind_takes_a_whole_partition_of_the_current_layout() -> None:
    slot = placed(decide(world(state_of(mi300x("g0", "cpx"))), ask(want=PartitionKind(kind="CPX")))).slots[0]
    assert slot.exclusive
    assert slot.memory_bytes == MI300X_BYTES // 8
    refusal = refused(decide(world(state_of(mi300x("g0", "spx"))), ask(want=PartitionKind(kind="cpx"))))
    assert refusal.reasons[0].code == "layout"
    assert refusal.would_fit[0] == "Repartition g0 as CPX/NPS1."


def test_whole_devices_come_from_one_node_or_not_at_all() -> None:
    nodes = tuple(NodeState(name=f"n{n}", devices=tuple(state_of(mi300x(f"n{n}-g{g}")) for g in range(2))) for n in range(2))
    decision = placed(decide(Snapshot(nodes=nodes), ask(want=Whole(count=2))))
    assert {slot.node for slot in decision.slots} == {"n0"}
    refusal = refused(decide(Snapshot(nodes=nodes), ask(want=Whole(count=3))))
    assert [reason.code for reason in refusal.reasons] == ["count"] * 4
    assert refusal.would_fit


def test_a_partitioned_device_is_not_whole() -> None:
    refusal = refused(decide(world(state_of(mi300x("g0", "cpx"))), ask(want=Whole())))
    assert refusal.reasons[0].code == "layout"
    assert "Repartition g0 as SPX/NPS1." in refusal.would_fit


def test_an_exclusive_grant_leaves_nothing() -> None:
    device = mi300x("g0")
    snapshot = world(state_of(device, grant_on(device, GIB, exclusive=True)))
    reason = refused(decide(snapshot, ask())).reasons[0]
    assert (reason.code, reason.short_bytes) == ("memory", 10 * GIB)


def test_what_foreign_processes_hold_is_taken() -> None:
    device = mi300x("g0")
    partition = device.layout.partitions[0].id
    snapshot = world(state_of(device, foreign={partition: MI300X_BYTES - GIB}))
    reason = refused(decide(snapshot, ask())).reasons[0]
    assert (reason.code, reason.short_bytes) == ("foreign", 9 * GIB)


def test_hardware_isolation_takes_the_partition_alone() -> None:
    device = mi300x("g0", "cpx")
    snapshot = world(state_of(device, grant_on(device, GIB)))
    slot = placed(decide(snapshot, ask(isolation=IsolationRequirement.HARDWARE))).slots[0]
    assert slot.exclusive
    assert slot.partition_id == "g0/cpx-1"


def test_a_level_that_cannot_be_had_is_refused() -> None:
    state = replace(state_of(mi300x("g0")), shared_levels={}, exclusive_levels={"g0/spx-0": frozenset({Level.NONE})})
    assert refused(decide(world(state), ask(isolation=IsolationRequirement.ENFORCED))).reasons[0].code == "isolation"
    assert placed(decide(world(state), ask(isolation=IsolationRequirement.NONE)))


def test_enforced_falls_back_to_a_partition_of_its_own() -> None:
    state = replace(state_of(mi300x("g0", "cpx")), shared_levels={})
    assert placed(decide(world(state), ask(isolation=IsolationRequirement.ENFORCED))).slots[0].exclusive


def test_compute_is_not_given_twice() -> None:
    device = mi300x("g0")
    snapshot = world(state_of(device, grant_on(device, GIB, ppm=700_000)))
    assert refused(decide(snapshot, ask(compute_ppm=400_000))).reasons[0].code == "compute"
    assert placed(decide(snapshot, ask(compute_ppm=300_000)))


def test_a_partition_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UnknownPartition):
        decide(world(state_of(mi300x("g0"))), ask(partition_id="g0/cpx-0"))


def test_nine_small_models_fit_one_device_and_each_sees_the_earlier() -> None:
    asks = [ask(f"m{index}", want=Memory(memory_bytes=12 * 10**9)) for index in range(18)]
    decisions = decide_all(world(state_of(mi300x("g0"))), asks)
    assert [isinstance(decision, Placement) for decision in decisions] == [True] * 17 + [False]


def test_cpu_and_host_memory_count_where_they_are_known() -> None:
    node = NodeState(name="n0", devices=(state_of(mi300x("g0")),), cpu_millis=4000, host_memory_bytes=GIB)
    snapshot = Snapshot(nodes=(node,))
    assert refused(decide(snapshot, ask(cpu_millis=4001))).reasons[0].code == "cpu"
    assert refused(decide(snapshot, ask(host_memory_bytes=2 * GIB))).reasons[0].code == "host_memory"
    first, second = decide_all(snapshot, [ask("a", cpu_millis=3000), ask("b", cpu_millis=3000)])
    assert isinstance(first, Placement)
    assert refused(second).reasons[0].code == "cpu"


def test_devices_keep_the_host_memory_that_goes_with_them() -> None:
    """Both nodes are equal but for their host memory; the first by name would be left with a GPU that nothing can use."""
    nodes = tuple(
        NodeState(name=name, devices=(state_of(mi300x(f"{name}0")), state_of(mi300x(f"{name}1"))), host_memory_bytes=memory)
        for name, memory in (("lean", 80 * GIB), ("rich", 400 * GIB))
    )
    wanted = Ask(name="a", want=Whole(count=1), host_memory_bytes=60 * GIB)
    assert placed(decide(Snapshot(nodes=nodes), wanted, mix=Mix.of([wanted]))).slots[0].node == "rich"
    modest = replace(wanted, host_memory_bytes=GIB)
    assert placed(decide(Snapshot(nodes=nodes), modest, mix=Mix.of([modest]))).slots[0].node == "lean"


def test_wanted_and_refused_parts_and_vendors() -> None:
    snapshot = world(state_of(mi300x("g0")), state_of(mi300x("g1", part="MI325X")))
    assert placed(decide(snapshot, ask(products=frozenset({"mi325x"})))).slots[0].device_id == "g1"
    assert placed(decide(snapshot, ask(refused_products=frozenset({"MI300X"})))).slots[0].device_id == "g1"
    assert {reason.code for reason in refused(decide(snapshot, ask(vendor="nvidia"))).reasons} == {"vendor"}


def test_with_and_not_with_another_deployment() -> None:
    one, two = mi300x("g0"), mi300x("g1")
    snapshot = world(state_of(one), state_of(two, grant_on(two, GIB, name="db")))
    assert placed(decide(snapshot, ask(with_deployments=frozenset({"db"})))).slots[0].device_id == "g1"
    assert placed(decide(snapshot, ask(not_with_deployments=frozenset({"db"})))).slots[0].device_id == "g0"


def test_a_refusal_names_every_device_and_what_would_make_it_fit() -> None:
    one, two = mi300x("g0"), mi300x("g1")
    states = (state_of(one, grant_on(one, 150 * GIB, name="a")), state_of(two, grant_on(two, 160 * GIB, name="b")))
    refusal = refused(decide(world(*states), ask(gib=100)))
    assert [reason.device_id for reason in refusal.reasons] == ["g0", "g1"]
    assert refusal.would_fit[0].startswith(f"Request at most {format_bytes(MI300X_BYTES - 150 * GIB)}:")
    assert "Stop a on g0: that frees 150GiB." in refusal.would_fit


def test_a_snapshot_goes_to_json_and_back_exactly() -> None:
    device = mi300x("g0", "cpx")
    snapshot = world(state_of(device, grant_on(device, 3), foreign={"g0/cpx-1": 5}))
    snapshot = replace(snapshot, running={"old": ask("old", want=Fraction(ppm=3), products=frozenset({"b", "a"}))})
    assert snapshot_from_json(snapshot_to_json(snapshot)) == snapshot


def test_a_snapshot_that_is_none_is_refused_with_the_place() -> None:
    value = snapshot_to_json(world(state_of(mi300x("g0"))))
    value["nodes"][0]["devices"][0]["device"]["memory_bytes"] = "many"
    with pytest.raises(InvalidInput, match=r"snapshot.nodes\[0\].devices\[0\].device.memory_bytes"):
        snapshot_from_json(value)
    with pytest.raises(InvalidInput, match="version"):
        snapshot_from_json({"nodes": []})


def test_a_running_ask_that_was_sized_elsewhere_counts_with_what_it_was_given() -> None:
    device = mi300x("g0")
    snapshot = world(state_of(device, grant_on(device, 30 * GIB)))
    snapshot = replace(snapshot, running={"old": ask("old", want=Auto()), "unknown": ask("unknown", want=Auto())})
    assert [shape.footprint_bytes for shape, _ in Mix.given(snapshot).counts] == [30 * GIB]
    assert placed(decide(snapshot, ask()))


def test_a_snapshot_of_machines_that_cannot_exist_is_refused() -> None:
    good = snapshot_to_json(Snapshot(nodes=(NodeState(name="here", devices=(state_of(mi300x("g0")), state_of(mi300x("g1")))),)))
    node = good["nodes"][0]
    first, second = node["devices"]
    elsewhere = {**first, "device": {**first["device"], "id": "g9"}}
    negative = {**first, "foreign_bytes": {"g0/spx-0": -1}}
    cases = {
        "two nodes are called here": {**good, "nodes": [node, node]},
        "here has two devices g1": {**good, "nodes": [{**node, "devices": [second, second]}]},
        "is not a partition of g9": {**good, "nodes": [{**node, "devices": [elsewhere]}]},
        "negative": {**good, "nodes": [{**node, "devices": [negative]}]},
    }
    for said, value in cases.items():
        with pytest.raises(InvalidInput, match=said):
            snapshot_from_json(value)
