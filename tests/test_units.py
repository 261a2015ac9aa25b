import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.errors import InvalidQuantity
from aimgpu.units import (
    GIB,
    PPM,
    format_bytes,
    format_duration_ms,
    format_ppm,
    parse_bytes,
    parse_duration_ms,
    parse_ppm,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("24 gib", 24 * GIB),
        ("1.5GiB", 1610612736),
        ("0.5KiB", 512),
        ("0B", 0),
        ("206141652992B", 206141652992),
    ],
)
def test_a_size_is_read_to_the_byte(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "24",
        "GiB",
        "-1GiB",
        "1e3GiB",
        "24GiB!",
        "24 G iB",
        "0.1B",
        "nanGiB",
        "infGiB",
        "24Gib2",
        "٣GiB",
        "9" * 100 + "GiB",
        "24GiBs",
    ],
)
def test_nonsense_is_no_size_and_the_hint_says_what_is(text: str) -> None:
    with pytest.raises(InvalidQuantity) as caught:
        parse_bytes(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "expected"), [("500ms", 500), ("2s", 2000), ("1.5s", 1500), ("10m", 600_000), ("1h", 3_600_000)]
)
def test_a_duration_is_read_to_the_millisecond(text: str, expected: int) -> None:
    assert parse_duration_ms(text) == expected


@pytest.mark.parametrize("text", ["5", "5 minutes", "0.0001s", "-1s", "5S"])
def test_nonsense_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidQuantity):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("30%", 300_000), ("0.3", 300_000), ("99.5%", 995_000), ("1", PPM), ("100%", PPM)]
)
def test_a_part_is_read_to_the_millionth(text: str, expected: int) -> None:
    assert parse_ppm(text) == expected


@pytest.mark.parametrize("text", ["101%", "1.1", "30 percent", "0.0000001", "%", "-5%"])
def test_nonsense_or_more_than_the_whole_is_no_part(text: str) -> None:
    with pytest.raises(InvalidQuantity):
        parse_ppm(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_what_is_printed_reads_back_within_a_tenth_on_the_safe_side(count: int) -> None:
    down, up = format_bytes(count), format_bytes(count, up=True)
    tenth = parse_bytes(f"0.1{down[-3:]}") + 1 if count >= 1024 else 0
    assert count - tenth <= parse_bytes(down) <= count
    assert count - 1 <= parse_bytes(up) <= count + tenth


@pytest.mark.parametrize("text", ["17.7GiB", "1023.9GiB", "3.3MiB", "24GiB", "1.1TiB", "1.1KiB"])
def test_a_size_that_was_typed_is_printed_as_it_was_typed(text: str) -> None:
    """The fraction of a byte that is dropped when it is read does not make it a tenth less."""
    assert format_bytes(parse_bytes(text)) == text


def test_a_size_with_a_decimal_is_accepted() -> None:
    assert parse_bytes("17.7GiB") == 19005230284


@given(st.integers(min_value=0, max_value=10**10))
def test_durations_read_back_the_same(milliseconds: int) -> None:
    assert parse_duration_ms(format_duration_ms(milliseconds)) == milliseconds


@given(st.integers(min_value=0, max_value=PPM))
def test_parts_read_back_the_same(ppm: int) -> None:
    assert parse_ppm(format_ppm(ppm)) == ppm
