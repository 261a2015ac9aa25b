"""How many Devices are needed, and proof of how close that is to the best."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from benchmarks.placement.rates import RatedService, fewest_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.placement.worlds import mi300x, state_of

from aimgpu.domain import Ask, IsolationRequirement, Memory, PartitionKind, Refusal, Whole
from aimgpu.errors import InvalidInput
from aimgpu.placement import DeviceState
from aimgpu.placement.capacity.capacity import Capacity, plan_capacity
from aimgpu.placement.scoring.lp import maximise
from aimgpu.placement.scoring.prices import STEPS, share_prices, worth_table
from aimgpu.units import GIB


def template() -> DeviceState:
    return state_of(mi300x("g0"))


def model(name: str, gigabytes: int, demand: IsolationRequirement = IsolationRequirement.NONE) -> Ask:
    return Ask(name=name, want=Memory(memory_bytes=gigabytes * 10**9), isolation=demand)


def counted(found: Capacity | Refusal) -> Capacity:
    assert isinstance(found, Capacity), found
    return found


def test_nine_small_models_need_one_device() -> None:
    found = counted(plan_capacity(template(), [model(f"m{n}", 12) for n in range(9)]))
    assert (found.devices, found.bound, found.proven_best) == (1, 1, True)


def test_three_large_models_need_three() -> None:
    found = counted(plan_capacity(template(), [model(f"m{n}", 165) for n in range(3)]))
    assert (found.devices, found.bound) == (3, 3)


def test_hardware_isolation_chooses_layouts() -> None:
    found = counted(plan_capacity(template(), [model(f"m{n}", 12, IsolationRequirement.HARDWARE) for n in range(9)]))
    assert (found.devices, found.bound) == (2, 2)
    assert "CPX/NPS1" in found.layouts


def test_a_mixed_set_reaches_its_bound() -> None:
    sizes, demands = (20, 45, 100, 13, 70), (IsolationRequirement.HARDWARE, IsolationRequirement.NONE)
    asks = [model(f"m{n:02d}", sizes[n % 5], demands[n % 2]) for n in range(30)]
    found = counted(plan_capacity(template(), asks))
    assert found.proven_best
    assert len(found.plan.placements) == 30


def test_whole_devices_count_together() -> None:
    found = counted(plan_capacity(template(), [Ask(name="big", want=Whole(count=4)), model("small", 20)]))
    assert (found.devices, found.bound) == (5, 5)


def test_what_fits_on_no_device_is_refused_with_the_numbers() -> None:
    refusal = plan_capacity(template(), [model("huge", 300)])
    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].short_bytes == 300 * 10**9 - 206141652992


@settings(max_examples=examples(25))
@given(st.lists(st.tuples(st.integers(5, 190), st.sampled_from(IsolationRequirement)), min_size=1, max_size=7))
def test_the_bound_never_exceeds_the_plan_and_the_plan_holds_everyone(wanted: list[tuple[int, IsolationRequirement]]) -> None:
    asks = [Ask(name=f"m{n}", want=Memory(memory_bytes=gib * GIB), isolation=demand) for n, (gib, demand) in enumerate(wanted)]
    found = counted(plan_capacity(template(), asks))
    assert found.bound <= found.devices <= len(asks)
    assert {placement.ask for placement in found.plan.placements} == {ask.name for ask in asks}
    assert sum(ask.want.memory_bytes for ask in asks if isinstance(ask.want, Memory)) <= found.devices * 206141652992


def test_rates_are_met_with_the_fewest_devices() -> None:
    layouts = [{"whole": 1}, {"half": 2}, {"half": 1, "quarter": 2}, {"quarter": 4}]
    services = [
        RatedService(name="chat", rate=100, throughput={"whole": 90, "half": 50, "quarter": 20}),
        RatedService(name="embed", rate=30, throughput={"half": 40, "quarter": 30}),
        RatedService(name="rank", rate=10, throughput={"quarter": 12}),
    ]
    plan = fewest_devices(layouts, services)
    assert plan.devices == 2
    assert plan.proven_best
    for service in services:
        served = sum(service.throughput[kind] * count for kind, count in plan.partitions[service.name].items())
        assert served >= service.rate
    for kind in ("whole", "half", "quarter"):
        used = sum(parts.get(kind, 0) for parts in plan.partitions.values())
        assert used <= sum(layout.get(kind, 0) for layout in plan.layouts)


def test_a_service_that_no_partition_serves_is_named() -> None:
    with pytest.raises(InvalidInput, match="chat"):
        fewest_devices([{"whole": 1}], [RatedService(name="chat", rate=1, throughput={})])


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(21, 60)), min_size=1, max_size=3))
def test_the_rate_bound_holds_against_brute_force(wanted: list[tuple[int, int, int]]) -> None:
    services = [
        RatedService(name=f"s{n}", rate=rate, throughput={"half": half, "whole": whole})
        for n, (rate, half, whole) in enumerate(wanted)
    ]
    plan = fewest_devices([{"whole": 1}, {"half": 2}], services)
    best = min(
        sum(wholes) + -(-sum(_halves(service, number) for service, number in zip(services, wholes, strict=True)) // 2)
        for wholes in product(range(3), repeat=len(services))
    )
    assert plan.bound <= best + 1e-6
    assert plan.devices == best


def _halves(service: RatedService, wholes: int) -> int:
    left = max(service.rate - wholes * service.throughput["whole"], 0)
    return -(-left // service.throughput["half"])


def test_the_small_linear_program_finds_the_known_optimum() -> None:
    solution, prices = maximise(
        np.array([3.0, 5.0]), np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 2.0]]), np.array([4.0, 12.0, 18.0])
    )
    assert solution.tolist() == pytest.approx([2.0, 6.0])
    assert prices.tolist() == pytest.approx([0.0, 1.5, 1.0])


@given(st.dictionaries(st.integers(1, STEPS).map(lambda size: size * 5 // 5), st.integers(1, 50), max_size=8))
@settings(max_examples=examples(40))
def test_no_set_of_sizes_that_fits_costs_more_than_a_whole_partition(counts: dict[int, int]) -> None:
    rounded = {max(size // 5 * 5, 5): count for size, count in counts.items()}
    worth = worth_table(share_prices(rounded))
    assert worth[0] == 0
    assert (np.diff(worth) >= 0).all()
    assert worth[STEPS] <= 1 + 1e-4


def test_an_empty_set_needs_no_device() -> None:
    found = counted(plan_capacity(replace(template()), []))
    assert (found.devices, found.bound, found.layouts) == (0, 0, ())


def test_a_kind_of_partition_that_the_device_does_not_have_yet_is_laid_out() -> None:
    found = counted(plan_capacity(template(), [Ask(name=f"m{n}", want=PartitionKind(kind="cpx")) for n in range(9)]))
    assert (found.devices, found.bound) == (2, 2)
