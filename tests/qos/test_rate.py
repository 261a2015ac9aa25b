"""Counts of the last while, in memory that does not grow with them."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from aimgpu.qos.queueing.rate import RecentCount

HOUR = 3600.0


@given(st.lists(st.floats(0, 4 * HOUR), max_size=50))
def test_it_counts_what_came_within_the_time_give_or_take_one_part(moments: list[float]) -> None:
    counter = RecentCount(HOUR)
    moments.sort()
    for moment in moments:
        counter.add(moment)
    now = moments[-1] if moments else 0.0
    surely = sum(moment > now - HOUR * 59 / 60 for moment in moments)
    possibly = sum(moment >= now - HOUR * 61 / 60 for moment in moments)
    assert surely <= counter.read(now) <= possibly
    assert counter.last == (now if moments else None)


def test_nothing_is_left_when_the_time_is_over() -> None:
    counter = RecentCount(HOUR)
    counter.add(10.0)
    assert counter.read(11.0) == 1
    assert counter.read(10.0 + 2 * HOUR) == 0


def test_many_take_no_more_memory_than_few() -> None:
    counter = RecentCount(HOUR)
    for index in range(100_000):
        counter.add(index * HOUR / 100_000)
    assert counter.read(HOUR * 0.999) == 100_000
    assert sys.getsizeof(counter._parts) < 4096
