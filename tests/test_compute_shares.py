"""Compute of a whole GPU and of its partitions, converted exactly."""

from dataclasses import replace
from fractions import Fraction as Ratio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import granted_compute
from aimgpu.domain.compute import partition_part, partition_ppm, whole_units
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.units import PPM


@given(st.lists(st.integers(1, PPM), min_size=1, max_size=8), st.sampled_from([1, 2, 3, 4, 7, 8]))
def test_shares_that_fit_into_the_part_of_a_gpu_fit_into_its_partition(shares: list[int], count: int) -> None:
    part = Ratio(1, count)
    here = [partition_ppm(share, part) for share in shares]
    for share, ppm in zip(shares, here, strict=True):
        assert (ppm is None) == (share > part * PPM)
        assert ppm is None or abs(ppm - share / part) < 1
    if sum(shares) <= part * PPM:
        assert sum(ppm or 0 for ppm in here) <= PPM


@given(st.integers(1, PPM), st.integers(1, 400))
def test_whole_units_are_less_than_one_below_the_share(ppm: int, total: int) -> None:
    assert ppm * total / PPM - 1 < whole_units(ppm, total) <= max(ppm * total / PPM + 0.001, 1)


@pytest.mark.parametrize(
    ("layout", "share", "text"), [(0, 300_000, "91 of 304 CUs (30%)"), (-1, 800_000, "30 of 304 CUs (10%)")]
)
def test_what_was_granted_is_reported_of_the_whole_gpu(layout: int, share: int, text: str) -> None:
    device = SimulatedHardware([("MI300X", 1)]).read_devices()[0]
    partition = sorted(device.layouts, key=lambda each: len(each.partitions))[layout].partitions[0]
    found = granted_compute(share, device, partition)
    assert found is not None
    assert found.text == text


def test_a_gpu_that_reports_no_units_is_divided_equally() -> None:
    device = SimulatedHardware([("MI300X", 1)]).read_devices()[0]
    eight = replace(max(device.layouts, key=lambda each: len(each.partitions)), name="CPX")
    unknown = replace(device, compute_units=None, layout=eight)
    assert partition_part(unknown, eight.partitions[0]) == Ratio(1, 8)
