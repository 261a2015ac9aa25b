"""Promises: which of them a class has, and which cannot all be meant."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import ByClass, Priority, ServiceObjective
from aimgpu.domain.codec import decode, encode
from aimgpu.domain.objective import MEASURES, PERCENTS

TIMES = st.none() | st.integers(1, 5000)
plain = st.builds(ServiceObjective, **{f"{measure}_p{percent}_ms": TIMES for measure in MEASURES for percent in PERCENTS})
objectives = st.builds(
    ServiceObjective, ttft_p95_ms=TIMES, high=st.none() | plain, medium=st.none() | plain, low=st.none() | plain
)


def contradicting(objective: ServiceObjective, measure: str) -> bool:
    """Whether the times of one measure fall anywhere as the percentage grows."""
    times = list(objective.percentiles_ms(measure).values())
    return times != sorted(times)


@settings(max_examples=examples(40))
@given(plain)
def test_a_contradiction_is_found_exactly_where_times_fall_as_the_percentage_grows(objective: ServiceObjective) -> None:
    found = dict(objective.contradictions())
    assert {name.partition("_")[0] for name in found} == {one for one in MEASURES if contradicting(objective, one)}
    for name, text in found.items():
        assert name in text
        assert getattr(objective, f"{name}_ms") is not None, "the complaint names a promise that was made"


@settings(max_examples=examples(40))
@given(plain, st.sampled_from(MEASURES))
def test_sorting_the_times_removes_every_contradiction_of_a_measure(objective: ServiceObjective, measure: str) -> None:
    times = objective.percentiles_ms(measure)
    rising = dict(zip(times, sorted(times.values()), strict=True))
    repaired = ServiceObjective(**{f"{measure}_p{percent}_ms": value for percent, value in rising.items()})  # type: ignore[arg-type]
    assert list(repaired.contradictions()) == []


@settings(max_examples=examples(40))
@given(objectives)
def test_a_class_is_held_to_its_own_promises_alone(objective: ServiceObjective) -> None:
    for priority in Priority:
        own = getattr(objective, priority.value)
        assert objective.own_of(priority) == own
        assert objective.of_class(priority) == (own if own is not None else objective)


@settings(max_examples=examples(40))
@given(objectives)
def test_times_are_promised_where_any_class_was_promised_one(objective: ServiceObjective) -> None:
    own = [objective, *(one for one in (objective.high, objective.medium, objective.low) if one is not None)]
    assert objective.has_times == any(one.percentiles_ms(measure) for one in own for measure in MEASURES)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("percent", PERCENTS)
def test_every_percentile_of_every_measure_is_a_promise_of_time(measure: str, percent: int) -> None:
    promised = ServiceObjective(**{f"{measure}_p{percent}_ms": 7})  # type: ignore[arg-type]
    assert promised.percentiles_ms(measure) == {percent: 7}
    assert promised.has_times
    assert ServiceObjective(low=promised).has_times


@pytest.mark.parametrize("other", [{"tokens_per_second": 5}, {"availability_ppm": 990_000}, {}])
def test_a_rate_and_an_availability_are_no_times(other: dict[str, int]) -> None:
    assert not ServiceObjective(**other).has_times  # type: ignore[arg-type]
    assert not ServiceObjective(high=ServiceObjective(**other)).has_times  # type: ignore[arg-type]


def test_the_sentence_of_a_contradiction_has_both_times() -> None:
    objective = ServiceObjective(tpot_p50_ms=2.75, tpot_p99_ms=2.5)
    assert list(objective.contradictions()) == [("tpot_p99", "tpot_p99 (2.5ms) is shorter than tpot_p50 (2.75ms)")]


def test_equal_times_contradict_nothing() -> None:
    assert list(ServiceObjective(ttft_p50_ms=100, ttft_p90_ms=100, ttft_p99_ms=100).contradictions()) == []


@settings(max_examples=examples(40))
@given(objectives)
def test_promises_with_classes_read_back_as_they_were_written(objective: ServiceObjective) -> None:
    assert decode(ServiceObjective, encode(objective), "slo") == objective


def test_every_field_of_an_objective_is_a_promise_or_a_class() -> None:
    """A field that is added and that neither the parser nor the scorer looks at would be a promise nobody keeps."""
    times = {f"{measure}_p{percent}_ms" for measure in MEASURES for percent in PERCENTS}
    classes = {priority.value for priority in Priority}
    assert {field.name for field in fields(ServiceObjective)} == times | classes | {"tokens_per_second", "availability_ppm"}


@settings(max_examples=examples(40))
@given(st.builds(ByClass, high=TIMES, medium=TIMES, low=TIMES))
def test_a_bound_is_looked_up_by_class(bounds: ByClass) -> None:
    assert [bounds.of(priority) for priority in Priority] == [bounds.high, bounds.medium, bounds.low]


def test_priorities_are_ranked_low_to_high() -> None:
    assert sorted(Priority, key=lambda priority: priority.rank) == [Priority.LOW, Priority.MEDIUM, Priority.HIGH]
