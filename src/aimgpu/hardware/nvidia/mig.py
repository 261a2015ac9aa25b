"""The MIG layouts that a GPU's profiles allow. Pure; what goes together is decided in `domain.slices`."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from aimgpu.domain.slices import EMPTY, Placed, SliceProfile, find_conflict, layout_name, parse_layout, place

__all__ = ["EMPTY", "WHOLE", "Placed", "find_layout", "full_layouts", "layout_name"]
WHOLE = "whole"


def find_layout(name: str, profiles: Sequence[SliceProfile]) -> tuple[Placed, ...]:
    """What "1g.18gb@0+3g.71gb@4" asks for, in order of start. Raises UnknownLayout with the first rule that is broken."""
    return place(parse_layout(name), profiles)


@lru_cache(maxsize=64)
def full_layouts(profiles: tuple[SliceProfile, ...]) -> tuple[tuple[Placed, ...], ...]:
    """Every layout of plain profiles to which nothing can be added, in a stable order."""
    plain = {profile.kind: profile for profile in profiles if profile.plain}
    options = sorted(Placed(kind=kind, start=start) for kind, profile in plain.items() for start in profile.starts)
    found: set[tuple[Placed, ...]] = set()
    _extend((), options, plain, found)
    return tuple(sorted(found, key=lambda placed: (len(placed), placed)))


def _extend(
    chosen: tuple[Placed, ...],
    options: Sequence[Placed],
    profiles: Mapping[str, SliceProfile],
    found: set[tuple[Placed, ...]],
) -> None:
    """Depth first, starts in order; what was passed over may still fit, so fullness is checked against all options."""
    last = chosen[-1] if chosen else None
    fitting = [one for one in options if one not in chosen and find_conflict((*chosen, one), profiles) is None]
    if not fitting:
        if chosen:
            found.add(chosen)
        return
    for one in fitting:
        if last is None or one > last:
            _extend((*chosen, one), options, profiles, found)
