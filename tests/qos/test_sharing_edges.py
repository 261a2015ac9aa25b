"""The controller of `sharing: promise` at its edges: nothing measured, nothing to give, samples that make no sense."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.qos.slo.objectives import Target
from aimgpu.qos.slo.sharing import PromiseController

ALONE = 0.0025
TPOT = Target(name="tpot_p95", measure="tpot", part=0.95, seconds=ALONE * 1.3)
TTFT = Target(name="ttft_p95", measure="ttft", part=0.95, seconds=0.5)
AVAILABILITY = Target(name="availability", measure="availability", part=0.99)


def feed(controller: PromiseController, seconds: float, ticks: int, measure: str = "tpot") -> list[float]:
    return [controller.step({measure: [seconds]}) for _ in range(ticks)]


def settled(factor: float = 1.3) -> PromiseController:
    """Beside a neighbour that costs 60 % of the device's time."""
    controller = PromiseController((Target(name="tpot_p95", measure="tpot", part=0.95, seconds=ALONE * factor),))
    for _ in range(200):
        controller.step({"tpot": [ALONE * (1 + 0.6 * controller.share)]})
    return controller


@pytest.mark.parametrize("targets", [(), (AVAILABILITY,)])
def test_where_no_time_is_promised_nothing_is_given_away(targets: tuple[Target, ...]) -> None:
    controller = PromiseController(targets)
    assert set(feed(controller, ALONE, 40)) == {0.0}
    assert controller.used is None
    assert not controller.is_exhausted


def test_what_was_not_promised_is_not_looked_at() -> None:
    controller = PromiseController((TPOT,))
    assert set(feed(controller, 100.0, 40, "latency")) == {0.0}
    assert controller.nearest is None


def test_nothing_is_given_away_before_the_models_own_times_are_known() -> None:
    controller = PromiseController((TPOT,))
    assert controller.step({"tpot": [ALONE]}) == 0.0
    assert controller.step({"tpot": [ALONE]}) > 0.0


def test_a_tick_without_samples_changes_nothing() -> None:
    controller = settled()
    before = (controller.share, controller.used)
    nothing: tuple[dict[str, list[float]], ...] = ({}, {"tpot": []}, {"ttft": [9.0]})
    for samples in nothing:
        controller.step(samples)
    assert (controller.share, controller.used) == before


def test_a_far_breach_shuts_the_gate_at_once_and_a_slight_one_does_not() -> None:
    far, slight = settled(), settled()
    share = far.share
    far.step({"tpot": [ALONE * 4]})
    slight.step({"tpot": [ALONE * 1.32]})
    assert far.share <= 0.35 * share
    assert slight.share >= 0.5 * share


def test_while_promises_break_the_share_only_falls_until_it_is_nothing() -> None:
    controller = settled()
    shares = feed(controller, ALONE * 1.8, 40)
    assert all(later <= sooner for sooner, later in pairwise(shares))
    assert shares[-1] == 0.0


def test_where_nothing_is_left_to_take_away_it_says_so_until_the_promise_holds() -> None:
    controller = PromiseController((TPOT,))
    feed(controller, ALONE * 2, 6)
    assert not controller.is_exhausted, "a moment is no proof"
    feed(controller, ALONE * 2, 6)
    assert controller.is_exhausted
    feed(controller, ALONE, 30)
    assert not controller.is_exhausted
    assert controller.share > 0


def test_after_a_breach_the_share_comes_back_slowly_near_where_it_broke() -> None:
    controller = settled()
    broke_at = controller.share
    feed(controller, ALONE * 1.45, 4)
    assert controller.share < broke_at
    steps = []
    for _ in range(300):
        before = controller.share
        controller.step({"tpot": [ALONE * (1 + 0.3 * controller.share)]})
        if before >= 0.9 * broke_at:
            steps.append(controller.share - before)
    assert steps
    assert max(steps) <= 0.01


def test_of_two_promises_the_one_that_breaks_takes_the_share() -> None:
    controller = PromiseController((TPOT, TTFT))
    for _ in range(100):
        controller.step({"tpot": [ALONE], "ttft": [0.1]})
    assert controller.share > 0.3
    for _ in range(20):
        controller.step({"tpot": [ALONE], "ttft": [2.0]})
    assert controller.nearest == "ttft_p95"
    assert controller.share == 0.0


def test_a_tighter_part_leaves_less_to_the_neighbour() -> None:
    """With the same noise: p99 allows fewer to be late than p50."""
    shares = {}
    for part in (0.5, 0.95, 0.99):
        controller = PromiseController((Target(name="t", measure="tpot", part=part, seconds=ALONE * 1.3),))
        for tick in range(600):
            noise = 1 + 0.05 * math.sin(tick * 2.399)
            controller.step({"tpot": [ALONE * (1 + 0.6 * controller.share) * noise]})
        shares[part] = controller.share
    assert shares[0.99] <= shares[0.95] <= shares[0.5]
    assert shares[0.99] > 0


@given(st.lists(st.floats(0.0, 1e9) | st.just(0.0), min_size=1, max_size=8), st.integers(0, 60))
def test_any_times_leave_a_share_and_a_number_to_read(values: list[float], after: int) -> None:
    """Also 0 seconds, which a clock that stood still gives."""
    controller = PromiseController((TPOT, TTFT, AVAILABILITY))
    feed(controller, ALONE, after)
    for _ in range(4):
        share = controller.step({"tpot": values, "ttft": values})
        assert 0.0 <= share <= 1.0
        assert controller.used is None or math.isfinite(controller.used)
