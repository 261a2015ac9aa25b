"""Quantities at their edges: what is printed can be typed, more decimals than a unit has are refused, nothing is guessed."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.errors import InvalidQuantity
from aimgpu.units import (
    GIB,
    KIB,
    MIB,
    PPM,
    TIB,
    format_bytes,
    format_duration_ms,
    parse_bytes,
    parse_duration_ms,
    parse_ppm,
    parse_token_rate,
    parse_token_time_ms,
)

FACTORS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
PARSERS: list[Callable[[str], float]] = [parse_bytes, parse_duration_ms, parse_token_time_ms, parse_ppm, parse_token_rate]
decimals = st.builds(lambda whole, part: f"{whole}.{part}", st.integers(0, 10**6), st.from_regex(r"\A[0-9]{1,6}\Z"))
numbers = st.integers(0, 10**9).map(str) | decimals


@settings(max_examples=examples(50))
@given(numbers, st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " ", "  "]))
def test_a_size_is_its_number_times_its_unit_with_the_fraction_of_a_byte_dropped(number: str, unit: str, space: str) -> None:
    exact = Fraction(Decimal(number)) * FACTORS[unit]
    if unit == "B" and exact.denominator != 1:
        with pytest.raises(InvalidQuantity, match="not a whole number of bytes"):
            parse_bytes(f"{number}{space}{unit}")
    else:
        assert parse_bytes(f"{number}{space}{unit}") == int(exact)


@settings(max_examples=examples(50))
@given(st.sampled_from(sorted(FACTORS)), st.booleans())
def test_units_of_sizes_are_known_in_any_case(unit: str, upper: bool) -> None:  # noqa: FBT001 - drawn
    assert parse_bytes(f"3{unit.upper() if upper else unit.lower()}") == 3 * FACTORS[unit]


@settings(max_examples=examples(50))
@given(st.integers(1, 10**9))
def test_times_per_token_read_back_to_the_microsecond(microseconds: int) -> None:
    milliseconds = microseconds / 1000
    assert parse_token_time_ms(format_duration_ms(milliseconds)) == milliseconds


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (2.75, "2.75ms"),
        (1234.567, "1234.567ms"),
        (0.001, "0.001ms"),
        (1_234_567.5, "1234567.5ms"),
        (3.0, "3ms"),
        (60_000.0, "1m"),
    ],
)
def test_a_time_with_a_fraction_is_printed_in_full(milliseconds: float, text: str) -> None:
    assert format_duration_ms(milliseconds) == text


@settings(max_examples=examples(50))
@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_larger_sizes_are_never_printed_as_smaller_ones(one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert parse_bytes(format_bytes(small)) <= parse_bytes(format_bytes(large))
    assert parse_bytes(format_bytes(small, up=True)) <= parse_bytes(format_bytes(large, up=True))


@settings(max_examples=examples(50))
@given(st.integers(1, 2**50))
def test_a_missing_size_is_rounded_as_what_is_missing(count: int) -> None:
    assert format_bytes(-count) == "-" + format_bytes(count, up=True)
    assert format_bytes(-count, up=True) == "-" + format_bytes(count)


@settings(max_examples=examples(50))
@given(st.integers(0, 10**9), st.sampled_from(["tok/s", " tok/s", "tokens/s", " tokens/s ", ""]))
def test_a_rate_is_whole_tokens_with_or_without_its_unit(rate: int, unit: str) -> None:
    assert parse_token_rate(f"{rate}{unit}") == rate


@settings(max_examples=examples(50))
@given(st.integers(0, PPM))
def test_a_part_is_the_same_as_a_percentage_and_as_a_number(ppm: int) -> None:
    number = Decimal(ppm) / PPM
    assert parse_ppm(f"{number:f}") == parse_ppm(f"{number * 100:f}%") == ppm


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_duration_ms, "1.0005s", "not a whole number of milliseconds"),
        (parse_token_time_ms, "0.0001ms", "not a whole number of microseconds"),
        (parse_token_time_ms, "5", "not a time per token"),
        (parse_token_time_ms, "5us", "not a time per token"),
        (parse_ppm, "0.00001%", "not a whole number of millionths"),
        (parse_ppm, "100.0001%", "more than the whole"),
        (parse_ppm, "30 ppm", "not a part"),
        (parse_token_rate, "1.5tok/s", "not a whole number of tokens"),
        (parse_token_rate, "5 req/s", "not a rate of tokens"),
        (parse_token_rate, "tok/s", "not a rate of tokens"),
        (parse_token_rate, "5tok/s tok/s", "not a rate of tokens"),
        (parse_bytes, "24GiBB", "not a size"),
        (parse_bytes, "1,5GiB", "not a size"),
        (parse_bytes, ".5GiB", "not a size"),
        (parse_bytes, "5.GiB", "not a size"),
        (parse_bytes, "0x10GiB", "not a size"),
        (parse_duration_ms, "1m30s", "not a duration"),
    ],
)
def test_what_is_no_quantity_is_refused_with_one_that_is(parse: Callable[[str], float], text: str, message: str) -> None:
    with pytest.raises(InvalidQuantity, match=message) as caught:
        parse(text)
    assert caught.value.hint
    assert text in caught.value.message


def refusal_of(parse: Callable[[str], float], text: str) -> InvalidQuantity | None:
    try:
        assert parse(text) >= 0
    except InvalidQuantity as error:
        return error
    return None


@pytest.mark.parametrize("parse", PARSERS)
@settings(max_examples=examples(50))
@given(text=st.text(max_size=60))
def test_any_text_is_a_quantity_or_a_complaint_of_bounded_length(parse: Callable[[str], float], text: str) -> None:
    complaint = refusal_of(parse, text)
    if complaint is not None:
        assert len(complaint.message) < 400
        assert complaint.hint


@pytest.mark.parametrize("parse", PARSERS)
def test_a_text_without_end_is_not_repeated(parse: Callable[[str], float]) -> None:
    with pytest.raises(InvalidQuantity) as caught:
        parse("9" * 100_000 + "GiB")
    assert len(caught.value.message) < 200
