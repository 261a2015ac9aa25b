"""Versions as engines write them ("0.6.x (V0)", "v0.19.0.post1", "b9272", "2026.10.11549"), compared by their numbers."""

import re

_NUMBERS = re.compile(r"\d+")
_LONGEST = 64
_LEAST_BUILD = 1000  # llama.cpp counts builds in thousands
_DATE = re.compile(r"20\d\d(?:-\d\d){0,2}")
# Days from which on llama.cpp had at least this build.
_BUILDS = (
    ("2026-07-10", 9952),
    ("2026-06-03", 9489),
    ("2026-05-29", 9410),
    ("2025-11-07", 6975),
    ("2025-08-30", 6325),
    ("2025-05-20", 5429),
    ("2024-01", _LEAST_BUILD),
)


def at_least(version: str, wanted: str) -> bool:
    """Whether `version` is `wanted` or later; a version without numbers counts as old."""
    return _numbers(version) >= _numbers(wanted)


def llamacpp_build(version: str | None) -> int:
    """The build number in "b9272", "9272" or a wheel's "2026.10.11549", or one of the time of a date such as "2026-10".

    0 where there is none: Ollama numbers otherwise, and a year alone says too little.
    """
    text = (version or "")[:_LONGEST].strip()
    if _DATE.fullmatch(text):
        return next((build for since, build in _BUILDS if "-" in text and text >= since), 0)
    numbers = _numbers(text)
    return numbers[-1] if numbers and numbers[-1] >= _LEAST_BUILD else 0


def _numbers(version: str) -> tuple[int, ...]:
    head = version[:_LONGEST].split("(", maxsplit=1)[0].split("-", maxsplit=1)[0]
    return tuple(int(number) for number in _NUMBERS.findall(head)[:3])
