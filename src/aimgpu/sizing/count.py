"""Parameter counts as people write them."""

import re
from decimal import Decimal

from aimgpu.errors import InvalidQuantity

_COUNT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*([bmt])", re.IGNORECASE | re.ASCII)
_UNITS = {"m": 10**6, "b": 10**9, "t": 10**12}
_MOST_DIGITS = 15
_LONGEST = 20


def parse_parameter_count(text: str) -> int:
    """Parameters of "7B", "1.5B", "135M" or "7000000000"."""
    text = text.strip()
    if text.isascii() and text.isdigit() and 0 < len(text) <= _MOST_DIGITS:
        count = int(text)
    else:
        match = _COUNT.fullmatch(text) if len(text) <= _LONGEST else None
        count = int(Decimal(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if count <= 0:
        raise InvalidQuantity(f"{text[:40]!r} is not a parameter count", hint="Write 7B, 1.5B or 135M.")
    return count
