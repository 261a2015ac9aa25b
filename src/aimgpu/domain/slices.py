"""MIG geometry: which profiles of a device go together, and where. Pure.

A profile takes memory slices from one of its starts, and some of the compute slices that the device has. Nothing here knows a
GPU model: profiles and placements are what the device reports.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aimgpu.errors import UnknownLayout

EMPTY = "mig-empty"  # MIG is on, no instance is made
_PART = re.compile(r"([0-9][^@]*?)(?:@([0-9]+))?")
_HOW = "Write kind@start, joined by plus: 1g.18gb@0+3g.71gb@4; without @start a free place is taken."


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceProfile:
    """One kind of partition that a device can cut."""

    kind: str  # "1g.18gb", "1g.18gb+me"
    compute_slices: int
    memory_slices: int
    starts: tuple[int, ...]  # memory slices where it may begin
    at_most: int  # at once
    memory_bytes: int
    compute_units: int

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


def parse_layout(name: str) -> tuple[tuple[str, int | None], ...]:
    """Kinds and starts of "1g.18gb+me@0+3g.71gb": a kind may carry its own plus, and need not have a start."""
    if name == EMPTY:
        return ()
    words: list[str] = []
    for word in name.strip().lower().split("+"):
        if words and word[:1].isalpha() and "@" not in words[-1]:  # kinds begin with a number, what varies them does not
            words[-1] += f"+{word}"
        else:
            words.append(word)
    found = [_PART.fullmatch(word) for word in words]
    if not all(found):
        raise UnknownLayout(f"{name!r} is not a MIG layout", hint=_HOW)
    return tuple((match[1], None if match[2] is None else int(match[2])) for match in found if match)


def place(
    wanted: Sequence[tuple[str, int | None]], profiles: Sequence[SliceProfile], there: Collection[Placed] = ()
) -> tuple[Placed, ...]:
    """In order of start; what has none is given one, of those that are `there` already where that goes.

    Raises UnknownLayout with the first rule that is broken.
    """
    by_kind = {profile.kind: profile for profile in profiles}
    for kind, start in wanted:
        _check_kind(kind, start, by_kind)
    fixed = tuple(Placed(kind=kind, start=start) for kind, start in wanted if start is not None)
    free = sorted((kind for kind, start in wanted if start is None), key=lambda kind: (-by_kind[kind].memory_slices, kind))
    reason = find_conflict(fixed, by_kind) or _count_conflict([kind for kind, _ in wanted], by_kind)
    found = None if reason else _fill(fixed, free, by_kind, there)
    if found is None:
        name = "+".join(kind if start is None else f"{kind}@{start}" for kind, start in wanted)
        raise UnknownLayout(
            f"{name} is not possible: {reason or 'there is no place for all of them'}",
            hint="`aimgpu partition list --all` shows what is.",
            page_hint="Choose one of the layouts that are shown, or other profiles.",
        )
    return tuple(sorted(found))


def find_conflict(placed: Sequence[Placed], profiles: Mapping[str, SliceProfile]) -> str | None:
    """Why these cannot be at once; None: they can."""
    taken: dict[int, Placed] = {}
    for one in placed:
        for memory_slice in range(one.start, one.start + profiles[one.kind].memory_slices):
            if memory_slice in taken:
                return f"{taken[memory_slice]} and {one} overlap"
            taken[memory_slice] = one
    return _count_conflict([one.kind for one in placed], profiles)


def _check_kind(kind: str, start: int | None, profiles: Mapping[str, SliceProfile]) -> None:
    profile = profiles.get(kind)
    if profile is None:
        known = ", ".join(sorted(profiles)) or "none"
        raise UnknownLayout(f"this device has no profile {kind}", hint=f"It has: {known}.")
    if start is not None and start not in profile.starts:
        starts = ", ".join(str(start) for start in profile.starts)
        raise UnknownLayout(f"{kind} cannot start at slice {start}", hint=f"It can start at: {starts}.")


def _count_conflict(kinds: Sequence[str], profiles: Mapping[str, SliceProfile]) -> str | None:
    for kind in dict.fromkeys(kinds):
        count, most = kinds.count(kind), profiles[kind].at_most
        if count > most:
            return f"{count} of {kind}, at most {most} fit"
    slices = sum(profiles[kind].compute_slices for kind in kinds)
    available = max((profile.compute_slices for profile in profiles.values()), default=0)
    return f"{slices} compute slices, the device has {available}" if slices > available else None


def _fill(
    placed: tuple[Placed, ...], free: Sequence[str], profiles: Mapping[str, SliceProfile], there: Collection[Placed]
) -> tuple[Placed, ...] | None:
    """Place each profile at the first start that leaves room for the others."""
    if not free:
        return placed
    options = [Placed(kind=free[0], start=start) for start in profiles[free[0]].starts]
    for one in sorted(options, key=lambda one: (one not in there, one.start)):
        more = (*placed, one)
        if find_conflict(more, profiles) is None and (found := _fill(more, free[1:], profiles, there)) is not None:
            return found
    return None
