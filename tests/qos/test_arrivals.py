"""What is learned from arrivals: rates, bursts, and the time of day."""

import random

from hypothesis import given
from hypothesis import strategies as st

from aimgpu.qos.arrivals import ArrivalHistory

DAY = 86_400.0


def history_of(moments: list[float]) -> ArrivalHistory:
    history = ArrivalHistory()
    for moment in moments:
        history.note(moment)
    return history


def test_a_steady_rate_is_expected_to_go_on() -> None:
    source = random.Random(1)
    moments = [0.0]
    for _ in range(400):
        moments.append(moments[-1] + source.expovariate(1 / 20))
    assert 14 < history_of(moments).expected_seconds(moments[-1]) < 28


def test_after_a_burst_the_next_one_is_expected_no_sooner_than_bursts_come() -> None:
    moments = [burst * 600.0 + turn for burst in range(10) for turn in range(10)]
    history = history_of(moments)
    within, after = history.expected_seconds(moments[-1] + 0.5), history.expected_seconds(moments[-1] + 30)
    assert within < 20
    assert 200 < after < 700


def test_what_was_never_asked_is_expected_late_rather_than_soon() -> None:
    history = ArrivalHistory()
    assert history.expected_seconds(5.0) >= 300


def test_a_pause_longer_than_all_before_is_expected_to_last_as_long_again() -> None:
    history = history_of([0.0, 10.0, 20.0, 30.0])
    assert 900 < history.expected_seconds(1030.0) < 1100


def test_the_hour_at_which_work_begins_is_known_on_the_third_day() -> None:
    moments = [day * DAY + 9 * 3600 + minute * 60 for day in range(3) for minute in range(240)]
    history = history_of(moments)
    night, morning = 3 * DAY + 3 * 3600, 3 * DAY + 8.95 * 3600
    assert history.expected_seconds(night) > 3600
    assert history.expected_seconds(morning) < 600


@given(st.lists(st.floats(0, 1e6, allow_nan=False), max_size=60), st.floats(0, 2e6, allow_nan=False))
def test_the_answer_is_positive_and_asking_changes_nothing(moments: list[float], now: float) -> None:
    history = history_of(sorted(moments))
    now = max([now, *moments])
    first = history.expected_seconds(now)
    assert first > 0
    assert history.expected_seconds(now) == first
