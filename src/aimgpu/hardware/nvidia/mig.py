"""MIG geometry: what NVML says can be placed where, and the Layouts that this allows. Pure.

A profile takes `size` memory slices from one of its starts and `slices` of the compute slices. Nothing here knows a GPU
model: profiles and starts are read from the device.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from aimgpu.errors import UnknownLayout

EMPTY = "mig-empty"  # MIG is on, no instance is made
WHOLE = "whole"
_PART = re.compile(r"([^@+]+(?:\+[a-z][^@+]*)?)@([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A GPU-instance profile, as the device tells it."""

    id: int
    kind: str  # "1g.18gb"
    slices: int  # compute slices
    most: int  # instances of it at once
    multiprocessors: int
    memory_bytes: int
    starts: tuple[int, ...]
    size: int  # memory slices

    @property
    def plain(self) -> bool:
        """No media or graphics variant ("1g.18gb+me"): those are made when asked for by name, and not proposed."""
        return "+" not in self.kind and "-" not in self.kind


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Placed:
    """A profile at a start."""

    start: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}@{self.start}"


def layout_name(placed: Iterable[Placed]) -> str:
    return "+".join(str(one) for one in sorted(placed)) or EMPTY


def parse_layout(name: str) -> tuple[Placed, ...]:
    """What "1g.18gb@0+3g.71gb@4" asks for, in order of start. A kind may carry its own plus: "1g.18gb+me@0"."""
    if name == EMPTY:
        return ()
    placed: list[Placed] = []
    at = 0
    while at < len(name):
        match = _PART.match(name.lower(), at)
        if match is None or (match.end() < len(name) and name[match.end()] != "+"):
            raise UnknownLayout(f"{name!r} is not a MIG layout", hint="Write kind@start, joined by plus: 1g.18gb@0+3g.71gb@4.")
        placed.append(Placed(kind=match[1], start=int(match[2])))
        at = match.end() + 1
    if not placed or name.endswith("+"):
        raise UnknownLayout(f"{name!r} is not a MIG layout", hint="Write kind@start, joined by plus: 1g.18gb@0+3g.71gb@4.")
    return tuple(sorted(placed))


def check_layout(placed: Sequence[Placed], profiles: Sequence[Profile]) -> None:
    """Raises UnknownLayout with the first rule that is broken."""
    by_kind = {profile.kind: profile for profile in profiles}
    for one in placed:
        profile = by_kind.get(one.kind)
        if profile is None:
            known = ", ".join(sorted(by_kind)) or "none"
            raise UnknownLayout(f"this device has no profile {one.kind}", hint=f"It has: {known}.")
        if one.start not in profile.starts:
            starts = ", ".join(str(start) for start in profile.starts)
            raise UnknownLayout(f"{one.kind} cannot start at slice {one.start}", hint=f"It can start at: {starts}.")
    reason = _conflict(placed, by_kind)
    if reason is not None:
        raise UnknownLayout(f"{layout_name(placed)} is not possible: {reason}", hint="`aimgpu partition list` shows what is.")


@lru_cache(maxsize=64)
def full_layouts(profiles: tuple[Profile, ...]) -> tuple[tuple[Placed, ...], ...]:
    """Every Layout of plain profiles to which nothing can be added, in a stable order."""
    plain = {profile.kind: profile for profile in profiles if profile.plain}
    options = sorted(Placed(kind=kind, start=start) for kind, profile in plain.items() for start in profile.starts)
    found: set[tuple[Placed, ...]] = set()
    _extend((), options, plain, found)
    return tuple(sorted(found, key=lambda placed: (len(placed), placed)))


def _extend(
    chosen: tuple[Placed, ...], options: Sequence[Placed], profiles: dict[str, Profile], found: set[tuple[Placed, ...]]
) -> None:
    """Depth first, starts in order; what was passed over may still fit, so fullness is checked against all options."""
    last = chosen[-1] if chosen else None
    fitting = [one for one in options if one not in chosen and _conflict((*chosen, one), profiles) is None]
    if not fitting:
        if chosen:
            found.add(chosen)
        return
    for one in fitting:
        if last is None or one > last:
            _extend((*chosen, one), options, profiles, found)


def _conflict(placed: Sequence[Placed], profiles: dict[str, Profile]) -> str | None:
    taken: dict[int, Placed] = {}
    for one in placed:
        for memory_slice in range(one.start, one.start + profiles[one.kind].size):
            if memory_slice in taken:
                return f"{taken[memory_slice]} and {one} overlap"
            taken[memory_slice] = one
    for kind in {one.kind for one in placed}:
        count, most = sum(one.kind == kind for one in placed), profiles[kind].most
        if count > most:
            return f"{count} of {kind}, at most {most} fit"
    slices, available = sum(profiles[one.kind].slices for one in placed), max((p.slices for p in profiles.values()), default=0)
    return f"{slices} compute slices, the device has {available}" if slices > available else None
