"""Kubernetes quantities ("96Gi", "500m", "1e3") as exact numbers."""

import re
from decimal import Decimal

from aimgpu.errors import InvalidQuantity

_LONGEST_TEXT = 64
_MOST_DIGITS = 30  # before the point: Kubernetes itself ends at 19

_FORM = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)([A-Za-z]*|[eE][+-]?[0-9]{1,3})", re.ASCII)
_FACTORS = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(1 << 10),
    "Mi": Decimal(1 << 20),
    "Gi": Decimal(1 << 30),
    "Ti": Decimal(1 << 40),
    "Pi": Decimal(1 << 50),
    "Ei": Decimal(1 << 60),
}


def parse_quantity(text: str | int) -> int:
    """The whole number of a quantity; one that is not whole is rounded up, as Kubernetes does."""
    return _rounded_up(_read(text))


def parse_millis(text: str | int) -> int:
    """Thousandths: of CPU."""
    return _rounded_up(_read(text) * 1000)


def _rounded_up(value: Decimal) -> int:
    whole = int(value)
    return whole if whole == value or value < 0 else whole + 1


def _read(text: str | int) -> Decimal:
    given = text.strip() if isinstance(text, str) else str(text) if abs(text) < 10**_MOST_DIGITS else "a number of many digits"
    match = _FORM.fullmatch(given) if len(given) <= _LONGEST_TEXT else None
    if match is None:
        shown = given[:_LONGEST_TEXT]
        raise InvalidQuantity(f"{shown!r} is not a Kubernetes quantity", hint="Write it as 96Gi, 500M or 1000000.")
    number, suffix = match.groups()
    if suffix in _FACTORS:
        value = Decimal(number) * _FACTORS[suffix]
    elif suffix[-1:].isdigit():
        value = Decimal(number + suffix)
    else:
        raise InvalidQuantity(f"{text!r} has the unknown unit {suffix!r}", hint="Units are Ki, Mi, Gi, Ti, k, M, G, T and m.")
    if value.adjusted() >= _MOST_DIGITS:
        raise InvalidQuantity(
            f"{text!r} has more than {_MOST_DIGITS} digits", hint="Kubernetes takes up to 9223372036854775807."
        )
    return value


def format_quantity(count: int) -> str:
    """The canonical form of a whole number of bytes: the largest binary unit that keeps it exact."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        factor = int(_FACTORS[unit])
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)
