"""Versions as engines write them ("0.6.x (V0)", "v0.19.0.post1", "b9272", "2026.10.11549"), compared by their numbers."""

import re

_NUMBERS = re.compile(r"\d+")
_LONGEST = 64
_LEAST_BUILD = 1000  # llama.cpp counts builds in thousands


def at_least(version: str, wanted: str) -> bool:
    """Whether `version` is `wanted` or later; a version without numbers counts as old."""
    return _numbers(version) >= _numbers(wanted)


def llamacpp_build(version: str | None) -> int:
    """The build number in "b9272", "9272" or a wheel's "2026.10.11549"; 0 where there is none (Ollama numbers otherwise)."""
    numbers = _numbers(version or "")
    return numbers[-1] if numbers and numbers[-1] >= _LEAST_BUILD else 0


def _numbers(version: str) -> tuple[int, ...]:
    head = version[:_LONGEST].split("(", maxsplit=1)[0].split("-", maxsplit=1)[0]
    return tuple(int(number) for number in _NUMBERS.findall(head)[:3])
