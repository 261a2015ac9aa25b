"""A promised rate of tokens: judged while somebody asks, by time and not by request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.qos.slo.objectives import Sample, throughput_target
from aimgpu.qos.slo.scores import ModelScores
from aimgpu.qos.slo.throughput import Flow, ThroughputMeter


def meter(tokens_per_second: int = 100) -> ThroughputMeter:
    target = throughput_target(ServiceObjective(tokens_per_second=tokens_per_second))
    assert target is not None
    return ThroughputMeter(target)


def run(one: ThroughputMeter, start: float, seconds: float, tokens: int, *, failed: bool = False) -> None:
    flow = one.begin(start)
    one.count(flow, tokens, start, start + seconds)
    one.end(flow, start + seconds, failed=failed)


def verdict(one: ThroughputMeter, now: float) -> tuple[int, int]:
    """Slices judged, slices kept."""
    one.settle(now)
    total = one.tracker.total(2, now)
    return total.judged.get("throughput", 0), total.met.get("throughput", 0)


def test_a_model_that_nobody_asks_breaks_no_promise() -> None:
    one = meter()
    assert verdict(one, 3600.0) == (0, 0)
    run(one, 3600.0, 10.0, 2000)
    assert verdict(one, 7000.0) == (2, 2)


def test_a_rate_below_the_promise_breaks_each_slice_of_it() -> None:
    one = meter()
    run(one, 0.0, 20.0, 1900)
    assert verdict(one, 20.0) == (4, 0)


def test_callers_side_by_side_count_together() -> None:
    one = meter()
    flows = [one.begin(0.0) for _ in range(3)]
    for flow in flows:
        one.count(flow, 400, 0.0, 10.0)
        one.end(flow, 10.0)
    assert verdict(one, 10.0) == (2, 2)


def test_who_waits_is_demand_too() -> None:
    one = meter()
    waiting = one.begin(0.0)
    one.count(waiting, 500, 5.0, 10.0)  # five seconds in the queue, then at the promised rate
    one.end(waiting, 10.0)
    assert verdict(one, 10.0) == (2, 1)


def test_a_whole_answer_counts_over_the_time_it_took_and_not_at_its_end() -> None:
    one = meter()
    flow = one.begin(0.0)
    assert verdict(one, 20.0) == (0, 0)  # nobody knows yet
    one.count(flow, 2000, 0.0, 20.0)
    one.end(flow, 20.0)
    assert verdict(one, 20.0) == (4, 4)


def test_an_engine_that_hangs_is_judged_after_a_minute() -> None:
    one = meter()
    one.begin(0.0)
    assert verdict(one, 59.0) == (0, 0)
    assert verdict(one, 90.0) == (6, 0)


def test_a_long_stream_is_judged_by_what_it_made_so_far() -> None:
    one = meter()
    flow = one.begin(0.0)
    for second in range(1, 121):
        one.count(flow, 150 * second, 0.0, float(second))
        one.settle(float(second))
    judged, kept = verdict(one, 120.0)
    assert judged == kept == 12  # the last minute may still change
    one.end(flow, 120.0)
    assert verdict(one, 120.0) == (24, 24)


def test_short_requests_are_judged_together_and_by_their_own_time() -> None:
    one = meter()
    for index in range(20):
        run(one, 20.0 * index, 0.25, 30)
    assert verdict(one, 405.0) == (5, 5)  # after each second of demand


def test_failures_count_even_where_nobody_waited() -> None:
    one = meter()
    run(one, 0.0, 0.0, 0, failed=True)
    run(one, 6.0, 1.0, 0, failed=True)
    run(one, 11.0, 2.0, 500)
    assert verdict(one, 20.0) == (3, 1)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 90), st.integers(0, 5000)), max_size=40))
def test_whatever_comes_no_more_is_kept_than_judged_and_nothing_is_left_over(asked: list[tuple[float, float, int]]) -> None:
    one = meter()
    now = 0.0
    ends: list[tuple[float, Flow, int, float]] = []
    for gap, seconds, tokens in asked:
        now += gap
        for end, flow, made, began in sorted(ends, key=lambda each: each[0]):
            if end <= now:
                one.count(flow, made, began, end)
                one.end(flow, end)
                ends.remove((end, flow, made, began))
        ends.append((now + seconds, one.begin(now), tokens, now))
    for end, flow, made, began in sorted(ends, key=lambda each: each[0]):
        one.count(flow, made, began, end)
        one.end(flow, end)
        now = max(now, end)
    judged, kept = verdict(one, now + 120)
    assert 0 <= kept <= judged <= (now + 5) / 5 + 1
    assert len(one._pieces) <= 1  # at most what is too short to judge alone


def answered(ttft: float) -> Sample:
    return Sample(failed=False, ttft_seconds=ttft, latency_seconds=ttft + 1, output_tokens=10)


def test_a_class_with_promises_of_its_own_is_held_to_those_alone() -> None:
    scores = ModelScores(ServiceObjective(ttft_p95_ms=500, low=ServiceObjective(latency_p95_ms=60_000)))
    for second in range(20):
        scores.record(answered(0.1), Priority.HIGH, float(second))
        scores.record(answered(0.1), Priority.MEDIUM, float(second))
        scores.record(answered(30.0), Priority.LOW, float(second))
    report = scores.report(20.0)
    assert [(target.name, target.attainment) for target in report.targets] == [("ttft_p95", 1.0)]
    assert report.windows[0].requests == 60
    assert [(target.name, target.attainment) for target in scores.report_class(Priority.LOW, 20.0).targets] == [
        ("latency_p95", 1.0)
    ]
    assert not scores.is_overspending(20.0)
    for second in range(20, 60):
        scores.record(Sample(failed=True), Priority.LOW, float(second))
    assert scores.is_overspending(60.0)
    assert scores.burning_high(60.0) == 0.0


def test_several_percentiles_are_judged_at_once() -> None:
    scores = ModelScores(ServiceObjective(ttft_p50_ms=100, ttft_p99_ms=2000))
    for second in range(100):
        scores.record(answered(0.05 if second % 2 else 1.0), Priority.HIGH, float(second))
    found = {target.name: target for target in scores.report(100.0).targets}
    assert found["ttft_p50"].attainment == pytest.approx(0.5)
    assert found["ttft_p50"].fast_burn == pytest.approx(1.0)
    assert found["ttft_p99"].attainment == 1.0
    assert found["ttft_p99"].promise == "99% ttft <= 2s"


def test_a_rate_that_classes_share_is_counted_together_and_one_of_its_own_apart() -> None:
    scores = ModelScores(ServiceObjective(tokens_per_second=100, low=ServiceObjective(tokens_per_second=10)))
    high, medium, low = (scores.meter(priority) for priority in (Priority.HIGH, Priority.MEDIUM, Priority.LOW))
    assert high is not None
    assert high is medium is not low
    assert low is not None
    for began in (ten * 10.0 for ten in range(20)):
        flows = [(one.begin(began), tokens) for one, tokens in ((high, 600), (high, 600), (low, 150))]
        for flow, tokens in flows:
            flow.meter.count(flow, tokens, began, began + 10.0)
            flow.meter.end(flow, began + 10.0)
    assert [target.attainment for target in scores.report(200.0).targets] == [1.0]
    assert [target.attainment for target in scores.report_class(Priority.LOW, 200.0).targets] == [1.0]
    assert scores.report_class(Priority.HIGH, 200.0).targets == ()


def test_who_promised_that_nothing_fails_has_a_burn_to_read() -> None:
    scores = ModelScores(ServiceObjective(availability_ppm=1_000_000))
    for second in range(20):
        scores.record(Sample(failed=second == 0), Priority.HIGH, float(second))
    [target] = scores.report(20.0).targets
    assert target.fast_burn == pytest.approx(0.05 / 1e-6)
