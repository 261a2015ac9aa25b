from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import ServiceObjective
from aimgpu.qos.slo.objectives import Sample
from aimgpu.qos.slo.pressure import NO_PRESSURE, adjust_pressure
from aimgpu.qos.slo.tracker import BUDGET_SECONDS, ObjectiveTracker, burning, report_together
from aimgpu.qos.slo.windows import Slice, SlidingWindow, bucket_of, percentile

OBJECTIVE = ServiceObjective(ttft_p95_ms=500, tpot_p95_ms=50, latency_p95_ms=2000, availability_ppm=990_000)


def good(ttft: float = 0.1) -> Sample:
    return Sample(failed=False, ttft_seconds=ttft, tpot_seconds=0.01, latency_seconds=1.0, output_tokens=20)


def test_all_kept_leaves_the_budget_untouched() -> None:
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    for second in range(100):
        tracker.record(good(), float(second))
    report = tracker.report(100.0)
    assert [target.name for target in report.targets] == ["ttft_p95", "tpot_p95", "latency_p95", "availability"]
    for target in report.targets:
        assert (target.attainment, target.budget_left, target.fast_burn, target.slow_burn) == (1.0, 1.0, 0.0, 0.0)


def test_a_one_percent_tail_is_visible() -> None:
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    for index in range(1000):
        tracker.record(good(3.0 if index % 100 == 0 else 0.1), index * 0.1)
    report = tracker.report(100.0)
    ttft = report.targets[0]
    assert ttft.attainment == pytest.approx(0.99)
    assert ttft.fast_burn == pytest.approx(0.2)
    percentiles = report.windows[0].percentiles["ttft"]
    assert percentiles[0.95] < 0.11
    assert 0.1 < percentiles[0.99] < 3.2


def test_failures_break_every_promise_even_without_a_latency() -> None:
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    for index in range(100):
        tracker.record(good() if index % 10 else Sample(failed=True), float(index))
    for target in tracker.report(100.0).targets:
        assert target.attainment == pytest.approx(0.9)
    availability = tracker.report(100.0).targets[-1]
    assert availability.fast_burn == pytest.approx(10.0)
    assert availability.budget_left == pytest.approx(-9.0)


def test_what_is_old_is_forgotten_and_the_fast_window_first() -> None:
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    for index in range(20):
        tracker.record(Sample(failed=True), index * 1.0)
    for index in range(20):
        tracker.record(good(), 400.0 + index)
    ttft = tracker.report(420.0).targets[0]
    assert ttft.fast_burn == 0.0
    assert ttft.slow_burn == pytest.approx(10.0)
    later = tracker.report(420.0 + BUDGET_SECONDS).targets[0]
    assert later.attainment is None


def test_too_few_requests_say_nothing_about_keeping_or_burning() -> None:
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    tracker.record(Sample(failed=True), 0.0)
    target = tracker.report(1.0).targets[0]
    assert (target.judged, target.attainment, target.fast_burn, target.budget_left) == (1, None, None, None)
    assert tracker.burning(1.0) == 0.0


def test_throughput_is_by_time_and_not_by_count() -> None:
    tracker = ObjectiveTracker.for_objective(None)
    for index in range(60):
        tracker.record(good(), index * 2.0)
    window = tracker.report(120.0).windows[0]
    assert window.requests_per_second == pytest.approx(0.5)
    assert window.output_tokens_per_second == pytest.approx(10.0)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=300), st.sampled_from([0.5, 0.95, 0.99]))
def test_percentiles_are_within_five_percent_above(values: list[float], part: float) -> None:
    buckets = Counter(map(bucket_of, values))
    rank = max(1, -(-int(part * 100) * len(values) // 100))
    exact = sorted(values)[rank - 1]
    found = percentile(buckets, part)
    assert found is not None
    assert exact * 0.9999 <= found <= exact * 1.0501


@given(st.lists(st.floats(0, 10_000), max_size=200))
def test_a_window_holds_what_came_in_its_time_and_bounded_memory(moments: list[float]) -> None:
    window = SlidingWindow(600.0)
    moments.sort()
    for moment in moments:
        window.add(Slice(began=moment, requests=1))
    now = moments[-1] if moments else 0.0
    held = window.total(now).requests
    assert sum(moment > now - 590 for moment in moments) <= held <= sum(moment > now - 610 for moment in moments)
    assert len(window._slices) <= 61


def test_pressure_rises_fast_says_why_and_falls_slowly() -> None:
    pressure = adjust_pressure(NO_PRESSURE, "chat", 3.0)
    assert pressure.low_share == 0.5
    assert pressure.reason is not None
    assert "chat burns its error budget 3.0x" in pressure.reason
    for _ in range(5):
        pressure = adjust_pressure(pressure, "chat", 15.0)
    assert pressure.shed
    assert pressure.low_share == 0.25
    assert pressure.reason is not None
    assert "held to 25% of the slots, what finds none free is refused" in pressure.reason
    held = adjust_pressure(pressure, "chat", 0.7)
    assert not held.shed
    assert held.reason is not None
    assert "burns" not in held.reason  # it does no longer
    assert held.low_share == 0.25
    steps = 0
    while pressure != NO_PRESSURE:
        pressure = adjust_pressure(pressure, "chat", 0.1)
        steps += 1
    assert steps == 8


def test_classes_taken_together_are_the_model() -> None:
    high, low = ObjectiveTracker.for_objective(OBJECTIVE), ObjectiveTracker.for_objective(OBJECTIVE)
    for second in range(30):
        high.record(good(), float(second))
        low.record(Sample(failed=True), float(second))
    report = report_together((high, low), 30.0)
    assert report.targets[0].attainment == pytest.approx(0.5)
    assert report.windows[0].requests == 60
    assert burning((high, low), 30.0) == pytest.approx(50.0)


def test_what_is_over_does_not_press_on() -> None:
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    for second in range(20):
        tracker.record(Sample(failed=True), float(second))
    assert tracker.burning(20.0) > 1
    assert tracker.burning(60.0) == 0.0  # nothing was late in the last ten seconds
    assert tracker.report(60.0).targets[0].fast_burn is not None  # and the record still says so


@given(st.lists(st.tuples(st.floats(0, 200), st.integers(0, 5), st.integers(0, 9)), max_size=150))
def test_what_a_window_sums_up_is_what_its_slices_hold(steps: list[tuple[float, int, int]]) -> None:
    window, now = SlidingWindow(600.0), 0.0
    for passed, bucket, tokens in steps:
        now += passed
        part = Slice(began=now, requests=1, output_tokens=tokens, judged={"a": 1}, met={"a": tokens % 2}, ttft={bucket: 1})
        window.add(part)
        found = window.total(now)
        expected = Slice(began=now)
        for held in window._slices:
            expected.merge(held)
        assert found == expected
        assert sum(part.judged["a"] for part in window.parts(now) if part.judged) == expected.judged.get("a", 0)
    assert window.total(now + 601) == Slice(began=now + 601)


def test_a_rush_of_a_few_seconds_holds_low_work_for_seconds_not_for_minutes() -> None:
    tracker = ObjectiveTracker.for_objective(OBJECTIVE)
    late = Sample(failed=True)
    pressure, pressed = NO_PRESSURE, []
    for second in range(60):
        for _ in range(2):
            tracker.record(late if second < 6 else good(), float(second))
        pressure = adjust_pressure(pressure, "chat", tracker.burning(float(second)))
        pressed.append(pressure != NO_PRESSURE)
    assert pressed[6]
    assert not any(pressed[30:])
    assert tracker.report(60.0).targets[0].fast_burn > 1  # type: ignore[operator]  # it was seen; the budget is spent all the same
