"""Promises counted by windows beside the plain list of all requests: attainment, budgets, burn rates, percentiles, rates."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.qos.slo.objectives import Sample, Target, targets_of, throughput_target
from aimgpu.qos.slo.pressure import NO_PRESSURE, Pressure, adjust_pressure
from aimgpu.qos.slo.scores import ModelScores
from aimgpu.qos.slo.tracker import FAST_SECONDS, SLICE_SECONDS, SLOW_SECONDS, ObjectiveTracker, report_together
from aimgpu.qos.slo.windows import bucket_of, percentile

OBJECTIVE = ServiceObjective(ttft_p95_ms=500, tpot_p95_ms=50, latency_p95_ms=2000, availability_ppm=990_000)
SECONDS = st.none() | st.floats(0.0001, 10)
SAMPLES = st.builds(
    Sample, st.booleans(), ttft_seconds=SECONDS, tpot_seconds=SECONDS, latency_seconds=SECONDS, output_tokens=st.integers(0, 50)
)
HISTORY = st.lists(st.tuples(st.floats(0, 40), SAMPLES), min_size=1, max_size=60)


def at_moments(history: list[tuple[float, Sample]]) -> list[tuple[float, Sample]]:
    now, found = 0.0, []
    for gap, sample in history:
        now += gap
        found.append((now, sample))
    return found


def kept(target: Target, sample: Sample) -> bool | None:
    """As the documentation has it: a failure breaks every promise; what was not measured is not judged."""
    if sample.failed:
        return False
    if target.measure == "availability":
        return True
    value = {"ttft": sample.ttft_seconds, "tpot": sample.tpot_seconds, "latency": sample.latency_seconds}[target.measure]
    return None if value is None else value <= (target.seconds or 0)


def attained(target: Target, samples: Sequence[Sample]) -> tuple[int, int]:
    judged = [verdict for sample in samples if (verdict := kept(target, sample)) is not None]
    return sum(judged), len(judged)


@settings(max_examples=examples(35))
@given(HISTORY)
def test_attainment_and_burn_are_exact_while_nothing_is_old(history: list[tuple[float, Sample]]) -> None:
    """All within the fast window: every window says the same, and what it says is what a list of all would."""
    moments = [(moment * FAST_SECONDS / 2500, sample) for moment, sample in at_moments(history)]
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    for moment, sample in moments:
        tracker.record(sample, moment)
    report = tracker.report(moments[-1][0])
    for target, found in zip(targets_of(OBJECTIVE), report.targets, strict=True):
        met, judged = attained(target, [sample for _, sample in moments])
        assert found.name == target.name
        assert (found.judged, found.attainment) == (judged, met / judged if judged >= 10 else None)
        burn = (1 - met / judged) / (1 - target.part) if judged >= 10 else None
        for shown in (found.fast_burn, found.slow_burn):
            assert shown == (None if burn is None else pytest.approx(burn))
        assert found.budget_left == (None if burn is None else pytest.approx(1 - burn))
    for window in report.windows:
        assert window.requests == len(moments)
        assert window.failures == sum(sample.failed for _, sample in moments)


@settings(max_examples=examples(35))
@given(HISTORY)
def test_a_window_counts_what_came_within_it_give_or_take_one_slice(history: list[tuple[float, Sample]]) -> None:
    moments = at_moments(history)
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    for moment, sample in moments:
        tracker.record(sample, moment)
    now = moments[-1][0]
    for window, seconds in ((0, FAST_SECONDS), (1, SLOW_SECONDS)):
        slack = seconds / 60 + SLICE_SECONDS
        counted = tracker.total(window, now).requests
        surely = sum(moment > now - seconds + slack for moment, _ in moments)
        possibly = sum(moment > now - seconds - slack for moment, _ in moments)
        assert surely <= counted <= possibly


@settings(max_examples=examples(35))
@given(HISTORY)
def test_parts_of_a_window_add_up_to_all_of_it(history: list[tuple[float, Sample]]) -> None:
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    now = 0.0
    for moment, sample in at_moments(history):
        now = moment
        tracker.record(sample, moment)
    for window in (0, 1, 2):
        total, parts = tracker.total(window, now), tracker.parts(window, now)
        assert sum(part.requests for part in parts) == total.requests
        assert sum(part.failures for part in parts) == total.failures
        assert sum(part.output_tokens for part in parts) == total.output_tokens
        for target in targets_of(OBJECTIVE):
            assert sum(part.judged.get(target.name, 0) for part in parts) == total.judged.get(target.name, 0)


@settings(max_examples=examples(35))
@given(st.lists(st.floats(0.0002, 500), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_percentile_is_the_nearest_rank_of_the_list_and_at_most_a_twentieth_above(values: list[float], part: float) -> None:
    tracker = ObjectiveTracker.for_objective(None)
    for value in values:
        tracker.record(Sample(failed=False, latency_seconds=value), 1.0)
    exact = sorted(values)[math.ceil(part * len(values)) - 1]
    found = tracker.report(1.0).windows[0].percentiles["latency"][part]
    assert exact * 0.999999 <= found <= exact * 1.050001


@settings(max_examples=examples(35))
@given(st.floats(1e-9, 1e6))
def test_a_bucket_holds_its_value_and_none_above_its_edge(seconds: float) -> None:
    edge = percentile({bucket_of(seconds): 1}, 1.0)
    assert edge is not None
    assert seconds <= edge * 1.000001
    assert edge <= max(seconds * 1.050001, 1e-4 * 1.000001)


def test_of_nothing_there_is_no_percentile() -> None:
    assert percentile({}, 0.5) is None
    report = ObjectiveTracker.for_objective(OBJECTIVE).report(10.0)
    assert [window.requests for window in report.windows] == [0, 0, 0]
    assert [window.requests_per_second for window in report.windows] == [None, None, None]
    assert {target.attainment for target in report.targets} == {None}


CLASSED = st.lists(st.tuples(st.sampled_from(list(Priority)), st.floats(0, 4), SAMPLES), min_size=1, max_size=60)


@settings(max_examples=examples(35))
@given(CLASSED)
def test_classes_that_share_a_promise_are_judged_together_and_others_apart(
    history: list[tuple[Priority, float, Sample]],
) -> None:
    own = ServiceObjective(latency_p95_ms=9000)
    scores = ModelScores(ServiceObjective(ttft_p95_ms=500, low=own))
    now = 0.0
    for priority, gap, sample in history:
        now += gap
        scores.record(sample, priority, now)
    [shared] = targets_of(ServiceObjective(ttft_p95_ms=500))
    [apart] = targets_of(own)
    met, judged = attained(shared, [sample for priority, _, sample in history if priority is not Priority.LOW])
    [found] = scores.report(now).targets
    assert (found.judged, found.attainment) == (judged, met / judged if judged >= 10 else None)
    met, judged = attained(apart, [sample for priority, _, sample in history if priority is Priority.LOW])
    [found] = scores.report_class(Priority.LOW, now).targets
    assert (found.judged, found.attainment) == (judged, met / judged if judged >= 10 else None)
    assert scores.report(now).windows[0].requests == len(history)


@settings(max_examples=examples(35))
@given(CLASSED, st.integers(1, 3))
def test_fewer_windows_say_the_same_about_promises(history: list[tuple[Priority, float, Sample]], windows: int) -> None:
    scores = ModelScores(OBJECTIVE)
    now = 0.0
    for priority, gap, sample in history:
        now += gap
        scores.record(sample, priority, now)
    complete, short = scores.report(now), scores.report(now, windows=windows)
    assert short.targets == complete.targets
    assert short.windows == complete.windows[:windows]


@settings(max_examples=examples(35))
@given(st.lists(st.floats(0, 30), max_size=60))
def test_pressure_stays_within_its_bounds_and_goes_when_all_is_calm(burns: list[float]) -> None:
    pressure = NO_PRESSURE
    for burn in burns:
        before, pressure = pressure, adjust_pressure(pressure, "chat", burn)
        assert 0.25 <= pressure.low_share <= 1
        assert (pressure.reason is None) == (pressure == NO_PRESSURE)
        if burn > 1:
            assert pressure.low_share <= before.low_share
        if burn < 0.5:
            assert pressure.low_share >= before.low_share
        assert not pressure.shed or pressure.low_share == 0.25
    for _ in range(8):
        pressure = adjust_pressure(pressure, None, 0.0)
    assert pressure == NO_PRESSURE


def test_a_burn_between_calm_and_burning_changes_nothing_but_ends_the_shedding() -> None:
    pressed = Pressure(low_share=0.25, shed=True, reason="x")
    held = adjust_pressure(pressed, "chat", 0.8)
    assert (held.low_share, held.shed) == (0.25, False)
    assert adjust_pressure(held, "chat", 0.8).low_share == 0.25


@pytest.mark.parametrize(
    ("objective", "promises"),
    [
        (None, []),
        (ServiceObjective(), []),
        (ServiceObjective(ttft_p50_ms=250), ["50% ttft <= 250ms"]),
        (ServiceObjective(latency_p99_ms=1500), ["99% latency <= 1.5s"]),
        (ServiceObjective(availability_ppm=999_500), ["99.95% availability"]),
        (ServiceObjective(ttft_p95_ms=100, availability_ppm=990_000), ["95% ttft <= 100ms", "99% availability"]),
    ],
)
def test_promises_are_written_for_people(objective: ServiceObjective | None, promises: list[str]) -> None:
    assert [target.promise for target in targets_of(objective)] == promises


def test_a_rate_is_a_promise_of_its_own_kind() -> None:
    assert throughput_target(None) is None
    assert throughput_target(ServiceObjective(ttft_p95_ms=1)) is None
    rate = throughput_target(ServiceObjective(tokens_per_second=1500))
    assert rate is not None
    assert (rate.promise, rate.part) == ("95% throughput >= 1500 tok/s", 0.95)


def test_a_report_over_nothing_is_empty() -> None:
    report = report_together((), 5.0)
    assert report.targets == ()
    assert [window.requests for window in report.windows] == [0, 0, 0]
