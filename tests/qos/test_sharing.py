"""The controller of `sharing: promise`, against simulated GPUs: it keeps the promise, uses what is free, and settles."""

import random
from collections.abc import Callable, Sequence
from statistics import mean

from hypothesis import given, settings
from hypothesis import strategies as st

from aimgpu.qos.slo.objectives import Target
from aimgpu.qos.slo.sharing import TICK_SECONDS, PromiseController

TWO_SECONDS = round(2 / TICK_SECONDS)
ALONE = 0.0025  # seconds per token
Plant = Callable[[float], float]  # share of the neighbour -> seconds per token


def promise(seconds: float, measure: str = "tpot") -> Target:
    return Target(name=f"{measure}_p95", measure=measure, part=0.95, seconds=seconds)


def linear(slowdown: float, alone: float = ALONE) -> Plant:
    return lambda share: alone * (1 + slowdown * share)


def drive(controller: PromiseController, plant: Plant, ticks: int, noise: float = 0.0, seed: int = 0) -> list[float]:
    """The times per token that the model had, tick by tick."""
    source = random.Random(seed)
    times = []
    for _ in range(ticks):
        taken = plant(controller.share) * (1 + source.gauss(0, noise))
        controller.step({"tpot": [taken]})
        times.append(taken)
    return times


def broken(times: Sequence[float], seconds: float) -> float:
    return sum(taken > seconds for taken in times) / len(times)


def test_without_measurements_the_gate_stays_strict() -> None:
    controller = PromiseController((promise(1.0),))
    for _ in range(100):
        assert controller.step({}) == 0
    assert controller.used is None


def test_a_promise_far_above_the_need_gives_everything_away() -> None:
    controller = PromiseController((promise(2 * ALONE),))
    drive(controller, linear(0.6), 80)
    assert controller.share == 1.0


def test_a_promise_that_cannot_be_kept_alone_gives_nothing_away() -> None:
    controller = PromiseController((promise(ALONE * 0.9),))
    drive(controller, linear(0.6), 80)
    assert controller.share == 0.0


@given(st.floats(0.1, 5.0), st.floats(1.05, 2.0), st.floats(0.0, 0.04), st.integers(0, 1000))
@settings(deadline=None)
def test_the_promise_is_kept(slowdown: float, factor: float, noise: float, seed: int) -> None:
    """Once it has had time to find its share, at most one in twenty is late, whatever the neighbour costs."""
    controller = PromiseController((promise(ALONE * factor),))
    drive(controller, linear(slowdown), 80, noise, seed)
    settled = drive(controller, linear(slowdown), 400, noise, seed + 1)
    alone = drive(PromiseController(()), linear(0.0), 400, noise, seed + 1)
    assert broken(settled, ALONE * factor) <= max(0.06, broken(alone, ALONE * factor) + 0.03)


@given(st.floats(0.1, 5.0), st.floats(1.1, 2.0), st.integers(0, 1000))
@settings(deadline=None)
def test_what_the_promise_leaves_free_is_used(slowdown: float, factor: float, seed: int) -> None:
    controller = PromiseController((promise(ALONE * factor),))
    drive(controller, linear(slowdown), 400, 0.01, seed)
    possible = min(1.0, (factor / 1.02 - 1) / slowdown)
    assert controller.share >= 0.55 * possible


@given(st.floats(0.2, 5.0), st.floats(1.1, 1.8), st.floats(0.0, 0.03), st.integers(0, 1000))
@settings(deadline=None)
def test_it_settles_and_does_not_swing(slowdown: float, factor: float, noise: float, seed: int) -> None:
    """After 20 seconds, within any ten: the share moves by a few hundredths of the device, or times by a few of theirs."""
    controller = PromiseController((promise(ALONE * factor),))
    drive(controller, linear(slowdown), 80, noise, seed)
    shares = []
    for tick in range(160):
        drive(controller, linear(slowdown), 1, noise, seed + tick)
        shares.append(controller.share)
    for start in range(0, 120, 40):
        window = shares[start : start + 40]
        assert max(window) - min(window) <= max(0.08, 0.06 / slowdown, 0.35 * mean(window))


@given(st.floats(0.2, 3.0), st.floats(1.2, 2.0), st.floats(1.02, 4.0), st.integers(0, 1000))
@settings(deadline=None)
def test_it_reacts_within_two_seconds(slowdown: float, factor: float, worse: float, seed: int) -> None:
    """The neighbour suddenly costs more: two seconds later the promise holds again, or nothing is given away."""
    controller = PromiseController((promise(ALONE * factor),))
    drive(controller, linear(slowdown), 200, 0.01, seed)
    changed = linear(slowdown * worse, ALONE * min(worse, factor * 0.97))
    drive(controller, changed, TWO_SECONDS, 0.0, seed)
    assert changed(controller.share) <= ALONE * factor * 1.01 or controller.share == 0.0


@given(st.lists(st.lists(st.floats(1e-5, 100.0), max_size=5), max_size=60))
def test_the_share_is_always_a_part(samples: list[list[float]]) -> None:
    controller = PromiseController((promise(0.05), promise(0.5, "ttft")))
    for values in samples:
        assert 0.0 <= controller.step({"tpot": values, "ttft": values}) <= 1.0


def test_the_promise_nearest_to_breaking_decides() -> None:
    controller = PromiseController((promise(ALONE * 10), promise(0.1, "ttft")))
    for _ in range(40):
        controller.step({"tpot": [ALONE], "ttft": [0.2]})
    assert controller.share == 0.0
    assert controller.nearest == "ttft_p95"


def test_one_models_promise_is_not_paid_by_another() -> None:
    """Two models, one of them late for reasons of its own: the other's share is its own affair."""
    late, easy = PromiseController((promise(ALONE),)), PromiseController((promise(2 * ALONE),))
    for _ in range(80):
        late.step({"tpot": [2 * ALONE]})
        easy.step({"tpot": [ALONE]})
    assert late.share == 0.0
    assert easy.share == 1.0
