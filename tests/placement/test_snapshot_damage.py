"""Snapshots and logs that people edit, cut or write with another program: refused with the place, or the very world."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.placement.rates import RatedService, fewest_devices
from benchmarks.placement.reservation import reserve_nodes
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.placement.decision_log import record_decisions, replay_decisions
from tests.placement.strategies import asks, snapshots
from tests.placement.worlds import ask, grant_on, mi300x, state_of, world

from aimgpu.domain import Ask, Fraction
from aimgpu.errors import InvalidInput
from aimgpu.placement import NodeState, Snapshot, ask_from_json, ask_to_json, snapshot_from_json, snapshot_to_json
from aimgpu.placement.capacity.capacity import Capacity, plan_capacity
from aimgpu.placement.scoring.mix import Mix
from aimgpu.units import GIB


def small() -> Snapshot:
    device = mi300x("g0", "dpx")
    device = replace(device, layouts=(device.layout,))
    snapshot = world(state_of(device, grant_on(device, GIB), foreign={"g0/dpx-1": 5}))
    return Snapshot(nodes=snapshot.nodes, running={"old": ask("old", want=Fraction(ppm=3), products=frozenset({"b", "a"}))})


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*before, key)
        yield from paths(item, (*before, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    found = copy.deepcopy(value)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return found


VALUE = snapshot_to_json(small())
PLACES = [path for path in paths(VALUE) if path != ("version",)]
WRONG: list[Any] = [None, "text", -1, True, [], {}]


def test_there_are_many_places() -> None:
    assert len(PLACES) > 80


@pytest.mark.parametrize("new", WRONG, ids=repr)
def test_a_snapshot_with_any_one_value_replaced_is_refused_with_a_hint_or_read_back_the_same(new: Any) -> None:
    for path in PLACES:
        value = changed(VALUE, path, new)
        try:
            found = snapshot_from_json(value)
        except InvalidInput as error:
            hint, message = error.hint, error.message
        else:
            assert snapshot_from_json(snapshot_to_json(found)) == found
            continue
        assert "aimgpu snapshot" in str(hint), path
        assert message.startswith("snapshot"), path


def test_a_snapshot_that_lost_any_one_value_is_refused_or_read_with_its_default() -> None:
    required = 0
    for path in PLACES:
        value = copy.deepcopy(VALUE)
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        try:
            snapshot_from_json(value)
        except InvalidInput as error:
            required += bool(error.hint)
    assert required > 20


@pytest.mark.parametrize(
    "value", [None, [], "x", 3, {}, {"version": 0}, {"version": 2}, {"version": "1"}, {"version": 1, "x": 1}]
)
def test_what_is_no_snapshot_of_this_version_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        snapshot_from_json(value)
    assert caught.value.hint


@settings(max_examples=examples(60))
@given(asks())
def test_an_ask_goes_through_json_the_same(wanted: Ask) -> None:
    assert ask_from_json(json.loads(json.dumps(ask_to_json(wanted)))) == wanted


@pytest.mark.parametrize(
    "want", [None, {}, {"auto": {}, "whole": {}}, {"half": {}}, {"memory": 3}, {"whole": {"count": "2"}}], ids=repr
)
def test_a_want_that_is_none_is_refused_with_its_place(want: Any) -> None:
    with pytest.raises(InvalidInput, match=r"ask\.want"):
        ask_from_json(ask_to_json(ask()) | {"want": want})


@settings(max_examples=examples(25))
@given(snapshots(), st.lists(asks(), max_size=4))
def test_a_log_of_decisions_replays_without_a_difference(snapshot: Snapshot, found: list[Ask]) -> None:
    events: list[Ask | str] = []
    for number, wanted in enumerate(found):
        named = ask_from_json(ask_to_json(wanted) | {"name": f"new{number}"})
        events += [named, f"new{number - 1}"] if number % 2 else [named]
    log = [json.loads(json.dumps(entry)) for entry in record_decisions(snapshot, events)]
    assert replay_decisions(log) == []


# --- how many GPUs ---

MIXES = st.lists(st.tuples(st.integers(1, 190), st.integers(1, 3)), min_size=1, max_size=5)


@settings(max_examples=examples(4))
@given(MIXES, st.integers(1, 100))
def test_one_more_model_never_needs_fewer_gpus_and_never_fewer_than_the_bound(sizes: list[tuple[int, int]], extra: int) -> None:
    asked = [ask(f"m{number}-{copy_number}", gib) for number, (gib, count) in enumerate(sizes) for copy_number in range(count)]
    template = state_of(mi300x("g0"))
    less, more = plan_capacity(template, asked), plan_capacity(template, [*asked, ask("extra", extra)])
    assert isinstance(less, Capacity)
    assert isinstance(more, Capacity)
    assert less.bound <= less.devices
    assert more.bound >= less.bound
    assert more.devices >= less.bound
    assert len(less.layouts) == less.devices


@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=3),
    st.integers(1, 20),
)
def test_a_higher_rate_never_needs_fewer_gpus_and_every_rate_is_served(wanted: list[tuple[int, int, int]], more: int) -> None:
    layouts = [{"whole": 1}, {"half": 2}]
    services = [
        RatedService(name=f"s{number}", rate=rate, throughput={"half": half, "whole": half + extra})
        for number, (rate, half, extra) in enumerate(wanted)
    ]
    plan = fewest_devices(layouts, services)
    for service in services:
        assert sum(service.throughput[kind] * count for kind, count in plan.partitions[service.name].items()) >= service.rate
    first = services[0]
    faster = RatedService(name=first.name, rate=first.rate + more, throughput=first.throughput)
    assert fewest_devices(layouts, [faster, *services[1:]]).bound >= plan.bound - 1e-6
    assert plan.devices >= plan.bound - 1e-6
    assert len(plan.layouts) == plan.devices


@settings(max_examples=examples(30))
@given(st.integers(1, 6), st.integers(1, 4), st.lists(asks(), max_size=6))
def test_no_more_is_held_than_there_is_and_only_for_those_who_ask(nodes: int, gpus: int, found: list[Ask]) -> None:
    made = tuple(
        NodeState(name=f"n{node}", devices=tuple(state_of(mi300x(f"n{node}-g{gpu}")) for gpu in range(gpus)))
        for node in range(nodes)
    )
    mix = Mix.of(found)
    held = reserve_nodes(Snapshot(nodes=made), mix)
    assert set(held) <= {node.name for node in made}
    assert all(0 < size <= gpus for size in held.values())
    assert reserve_nodes(Snapshot(nodes=tuple(reversed(made))), mix) == held
