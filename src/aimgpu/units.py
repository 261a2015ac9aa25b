"""Exact quantities: bytes, durations and parts, read from text once at the edge and printed for people.

Sizes are whole bytes, durations whole milliseconds, parts whole millionths (ppm). "1.5GiB" is exactly 1610612736 bytes; of
"17.7GiB" the fraction of a byte is dropped; "0.1B" is refused because there is no tenth of a byte.
"""

import re
from decimal import Decimal, InvalidOperation

from aimgpu.errors import InvalidQuantity

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
PPM = 1_000_000

_BYTE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_DURATION_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_RATE_UNITS = ("tok/s", "tokens/s")
_RATE = "a rate of tokens such as 200tok/s"
_TEXT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]*)", re.ASCII)
_LONGEST_TEXT = 40
_MOST_GIB = 1024  # of a bare number
_LEAST_MS = 50


def parse_bytes(text: str) -> int:
    """Bytes of "24GiB", "17.7GiB", "512 MiB" or "1000B", a fraction of a byte dropped. A bare number has no unit: refused."""
    number, unit = _split(text, "a size such as 24GiB, 24GB or 512MiB")
    factor = _BYTE_UNITS.get(unit.lower())
    if factor is None:
        raise _refused(
            text,
            "a size such as 24GiB, 24GB or 512MiB",
            known=("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"),
            meant=_meant_bytes(number, unit),
        )
    return _whole(number, text, "byte") if factor == 1 else int(number * factor)


def parse_duration_ms(text: str) -> int:
    """Milliseconds of "500ms", "2s", "10m" or "1h"."""
    number, unit = _split(text, "a duration such as 500ms, 2s or 10m")
    factor = _DURATION_UNITS_MS.get(unit)
    if factor is None:
        known = tuple(_DURATION_UNITS_MS)
        raise _refused(text, "a duration such as 500ms, 2s or 10m", known=known, meant=_meant_duration(number, unit))
    return _whole(number * factor, text, "millisecond")


def parse_token_time_ms(text: str) -> float:
    """Milliseconds of "50ms" or "2.75ms", to the microsecond: a time per token may be shorter than 3 ms."""
    number, unit = _split(text, "a time per token such as 50ms or 2.5ms")
    factor = _DURATION_UNITS_MS.get(unit)
    if factor is None:
        known = tuple(_DURATION_UNITS_MS)
        raise _refused(text, "a time per token such as 50ms or 2.5ms", known=known, meant=_meant_duration(number, unit))
    microseconds = _whole(number * factor * 1000, text, "microsecond")
    return microseconds // 1000 if microseconds % 1000 == 0 else microseconds / 1000


def parse_ppm(text: str) -> int:
    """Millionths of "30%" or "0.3"; more than a whole is refused."""
    number, unit = _split(text, "a part such as 30% or 0.3")
    if unit not in ("", "%"):
        raise _refused(text, "a part such as 30% or 0.3", known=("%",))
    ppm = _whole(number * (PPM // 100 if unit else PPM), text, "millionth")
    if ppm > PPM:
        meant = f"Did you mean '{number}%'? " if not unit and number <= 100 else ""  # noqa: PLR2004 -- per cent
        raise InvalidQuantity(f"{text!r} is more than the whole", hint=f"{meant}Parts go from 0% to 100%.")
    return ppm


def parse_token_rate(text: str) -> int:
    """Whole tokens a second of "200tok/s", "200 tokens/s" or "200"."""
    plain = next((text.strip().removesuffix(unit) for unit in _RATE_UNITS if text.strip().endswith(unit)), text)
    number, unit = _split(plain, _RATE, given=text)
    if unit:
        raise _refused(text, _RATE)
    return _whole(number, text, "token")


def format_bytes(count: int, *, up: bool = False) -> str:
    """A size that `parse_bytes` takes, with at most one decimal: "24GiB", "17.7GiB".

    Free sizes are rounded down, so that they exist when typed back. With `up`, for sizes that are needed, granted or in use,
    it rounds up, so that a grant that is typed back is not smaller.
    """
    if count < 0:
        return "-" + format_bytes(-count, up=not up)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            # Down is the most that reads back as no more: "17.7GiB" lost its fraction of a byte when it was read.
            whole, tenth = divmod(-(-count * 10 // factor) if up else (count * 10 + 9) // factor, 10)
            return f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}"
    return f"{count}B"


def format_duration_ms(milliseconds: float) -> str:
    """A duration that `parse_duration_ms` takes; `parse_token_time_ms` where it has a fraction, to the microsecond."""
    if milliseconds != int(milliseconds):
        return f"{milliseconds:.3f}".rstrip("0").rstrip(".") + "ms"
    milliseconds = int(milliseconds)
    for unit, factor in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds >= factor and milliseconds % factor == 0:
            return f"{milliseconds // factor}{unit}"
    return f"{milliseconds}ms"


def format_ppm(ppm: int) -> str:
    percent = Decimal(ppm) / (PPM // 100)
    return f"{percent.normalize():f}%"


def _split(text: str, expected: str, *, given: str | None = None) -> tuple[Decimal, str]:
    match = _TEXT.fullmatch(text.strip()) if len(text) <= _LONGEST_TEXT else None
    if match is None:
        raise _refused((given or text)[:_LONGEST_TEXT], expected)
    try:
        return Decimal(match[1]), match[2]
    except InvalidOperation as error:
        raise _refused(text, expected) from error


def _whole(value: Decimal, text: str, unit: str) -> int:
    if value != value.to_integral_value():
        raise InvalidQuantity(f"{text!r} is not a whole number of {unit}s", hint="Use fewer decimals.")
    return int(value)


def _meant_bytes(number: Decimal, unit: str) -> str | None:
    """Of `8`, `8G` or `8 gigs` 8GiB; of a bare number that no GPU has as much of in GiB, MiB."""
    if not number:
        return None
    if not unit:
        return f"{number}GiB" if number <= _MOST_GIB else f"{number}MiB"
    letter = unit[0].upper()
    return f"{number}{letter}iB" if letter in "KMGT" else None


def _meant_duration(number: Decimal, unit: str) -> str | None:
    """Of `500` 500ms, of `2` 2s, of `10 min` 10m."""
    if not number:
        return None
    if not unit:
        return f"{number}ms" if number >= _LEAST_MS else f"{number}s"
    return f"{number}{unit[0].lower()}" if unit[0].lower() in _DURATION_UNITS_MS else None


def _refused(text: str, expected: str, known: tuple[str, ...] = (), meant: str | None = None) -> InvalidQuantity:
    asked = f"Did you mean {meant!r}? " if meant else ""
    hint = f"{asked}Write {expected}." + (f" Known units: {', '.join(known)}." if known else "")
    return InvalidQuantity(f"{text!r} is not {expected}", hint=hint)
