"""Parameter counts as people write them."""

import re
from decimal import Decimal

from aimgpu.errors import InvalidQuantity

_COUNT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*([bmt])", re.IGNORECASE | re.ASCII)
_NEAR_COUNT = re.compile(_COUNT.pattern + "[a-z]", re.IGNORECASE | re.ASCII)
_UNITS = {"m": 10**6, "b": 10**9, "t": 10**12}
_MOST_DIGITS = 15
_LONGEST = 20
_FEWEST = 100_000


def parse_parameter_count(text: str) -> int:
    """Parameters of "7B", "1.5B", "135M" or "7000000000"."""
    text = text.strip()
    if text.isascii() and text.isdigit() and 0 < len(text) <= _MOST_DIGITS:
        count = int(text)
        if 0 < count < _FEWEST:  # nobody means a model of seven parameters
            raise InvalidQuantity(f"a model of {text!r} parameters is too small to be one", hint=f"Did you mean '{count}B'?")
    else:
        match = _COUNT.fullmatch(text) if len(text) <= _LONGEST else None
        count = int(Decimal(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if count <= 0:
        near = _NEAR_COUNT.match(text)
        meant = f"Did you mean {near[1] + near[2].upper()!r}? " if near else ""
        raise InvalidQuantity(
            f"{text[:40]!r} is not a parameter count such as 1.5B or 7B", hint=f"{meant}Write 7B, 1.5B or 135M."
        )
    return count
