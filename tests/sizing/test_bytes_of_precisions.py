"""Bytes of weights in each format, by what the format stores."""

from fractions import Fraction

import pytest

from aimgpu.sizing.precision import PRECISIONS

WEIGHTS = 128 * 128
GROUPS = WEIGHTS // 128
STORED = {  # values, then what scales and zeros take
    "fp32": WEIGHTS * 4,
    "fp16": WEIGHTS * 2,
    "bf16": WEIGHTS * 2,
    "fp8": WEIGHTS + 4,  # an fp32 scale for a block of 128 x 128
    "int8": WEIGHTS + GROUPS * (2 + 1),
    "int4": WEIGHTS // 2 + GROUPS * (2 + Fraction(1, 2)),
    "awq": WEIGHTS // 2 + GROUPS * (2 + Fraction(1, 2)),
    "nf4": WEIGHTS // 2 + WEIGHTS // 64 + WEIGHTS // 64 // 256 * 4,
    "mxfp4": WEIGHTS // 2 + WEIGHTS // 32,  # an 8-bit exponent for 32
    "nvfp4": WEIGHTS // 2 + WEIGHTS // 16,  # an fp8 scale for 16
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_format_takes_what_it_stores(name: str) -> None:
    assert PRECISIONS[name].weight_bytes * WEIGHTS == STORED[name]
