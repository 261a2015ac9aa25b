"""How the isolation benchmark counts launches that are ahead of a request."""

from typing import Any

import pytest
from benchmarks.isolation_h200.ahead import describe, to_device

MS = 1_000_000
CLOCKS = [
    {"host_ns": 0, "device_ns": 1_000 * MS, "error_ns": 0},
    {"host_ns": 1_000 * MS, "device_ns": 2_001 * MS, "error_ns": 0},  # it gains a thousandth
]


def test_the_hosts_clock_is_converted_between_two_readings() -> None:
    assert to_device(0, CLOCKS) == 1_000 * MS
    assert to_device(500 * MS, CLOCKS) == 1_500 * MS + MS // 2


@pytest.mark.parametrize(
    ("launches", "ahead"),
    [
        ([(900, 1_000)], 0),  # it ended before
        ([(900, 1_010)], 1),  # it ran when the request arrived
        ([(1_005, 1_015)], 1),  # it was queued, and came first
        ([(900, 1_010), (1_010, 1_019)], 2),
        ([(900, 1_090)], 1),  # it was suspended, and went on later
        ([(1_025, 1_030)], 0),  # it came after the request's first kernel
    ],
)
def test_a_launch_is_ahead_that_delays_the_first_kernel(launches: list[tuple[int, int]], ahead: int) -> None:
    got = describe([(0, 1_020 * MS, 1_060 * MS)], [[(start * MS, stop * MS) for start, stop in launches]], CLOCKS)
    assert got["ahead"] == {str(ahead): 1}
    assert got["ahead_most"] == ahead
    assert got["first_kernel_later_ms"]["most"] == 20.0


def test_tenants_are_counted_each_and_together() -> None:
    launches: Any = [[(990 * MS, 1_010 * MS)], [(1_010 * MS, 1_019 * MS)]]
    got = describe([(0, 1_020 * MS, 1_060 * MS)], launches, CLOCKS)
    assert got["ahead"] == {"1": 2}
    assert got["ahead_most_of_all_tenants"] == 2
    assert got["started_within_a_request"] == {"1": 1}
