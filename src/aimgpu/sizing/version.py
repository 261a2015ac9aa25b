"""Versions as engines write them ("0.6.x (V0)", "v0.19.0.post1"), compared by their leading numbers."""

import re

_NUMBERS = re.compile(r"\d+")
_LONGEST = 64


def at_least(version: str, wanted: str) -> bool:
    """Whether `version` is `wanted` or later; a version without numbers counts as old."""
    return _numbers(version) >= _numbers(wanted)


def _numbers(version: str) -> tuple[int, ...]:
    head = version[:_LONGEST].split("(", maxsplit=1)[0].split("-", maxsplit=1)[0]
    return tuple(int(number) for number in _NUMBERS.findall(head)[:3])
