"""NVIDIA's Multi-instance GPU rules: profiles, where each may start, and which sets of placements go together.

A GPU has eight memory slices and seven compute slices. Source: NVIDIA MIG user guide and `nvidia-smi mig -lgip -lgipp`.
"""

from collections.abc import Iterator
from functools import cache

from aimgpu.domain import Layout, Partition, SliceProfile
from aimgpu.domain.slices import parse_layout, place
from aimgpu.errors import UnknownLayout
from aimgpu.units import GIB

COMPUTE_SLICES = 7


Placements = tuple[tuple[SliceProfile, int], ...]


def seven_slice_profiles(
    *, names: tuple[int, int, int, int], gib: tuple[float, float, float, float], units: tuple[int, int, int, int, int, int]
) -> tuple[SliceProfile, ...]:
    """The profiles of A100, H100 and H200: sizes of 1, 2, 4, 8 memory slices; units of 1g, 1g (two slices), 2g, 3g, 4g, 7g."""
    eighth, quarter, half, whole = names
    sizes = [round(size * GIB) for size in gib]
    rows = (
        (f"1g.{eighth}gb", 1, 1, (0, 1, 2, 3, 4, 5, 6), 7, sizes[0], units[0]),
        (f"1g.{eighth}gb+me", 1, 1, (0, 1, 2, 3, 4, 5, 6), 1, sizes[0], units[0]),
        (f"1g.{quarter}gb", 1, 2, (0, 2, 4, 6), 4, sizes[1], units[1]),
        (f"2g.{quarter}gb", 2, 2, (0, 2, 4), 3, sizes[1], units[2]),
        (f"3g.{half}gb", 3, 4, (0, 4), 2, sizes[2], units[3]),
        (f"4g.{half}gb", 4, 4, (0,), 1, sizes[2], units[4]),
        (f"7g.{whole}gb", 7, 8, (0,), 1, sizes[3], units[5]),
    )
    return tuple(
        SliceProfile(
            kind=name,
            compute_slices=compute,
            memory_slices=memory,
            starts=starts,
            at_most=at_most,
            memory_bytes=size,
            compute_units=unit,
        )
        for name, compute, memory, starts, at_most, size, unit in rows
    )


@cache
def full_placements(profiles: tuple[SliceProfile, ...]) -> tuple[Placements, ...]:
    """Every legal set to which nothing can be added, without the media-engine variants; shared by all GPUs of a product."""
    plain = tuple(profile for profile in profiles if not profile.kind.endswith("+me"))
    choices = tuple(sorted(((p, s) for p in plain for s in p.starts), key=lambda c: (c[1], -c[0].memory_slices, c[0].kind)))
    return tuple(found for found in _legal_sets(choices, 0, ()) if found and not _can_grow(found, choices))


def parse_placements(text: str, profiles: tuple[SliceProfile, ...]) -> Placements | None:
    """Placements of "1g.18gb@0+3g.71gb@4", in order of their starts; None if that is not a legal set of this GPU."""
    by_kind = {profile.kind: profile for profile in profiles}
    try:
        placed = place(parse_layout(text), profiles)
    except UnknownLayout:
        return None
    return tuple((by_kind[one.kind], one.start) for one in placed) or None


def mig_layout(device_id: str, placements: Placements, made: dict[tuple[str, int], Partition]) -> Layout:
    """The layout of these placements; partitions that `made` holds already are used again."""
    return Layout(
        name="+".join(f"{profile.kind}@{start}" for profile, start in placements),
        compute_mode=None,
        memory_mode=None,
        partitions=tuple(_partition(device_id, profile, start, made) for profile, start in placements),
    )


def _partition(device_id: str, profile: SliceProfile, start: int, made: dict[tuple[str, int], Partition]) -> Partition:
    key = (profile.kind, start)
    if key not in made:
        # The index is the start: a partition keeps its id when its neighbours change.
        made[key] = Partition(
            id=f"{device_id}/{profile.kind}-{start}",
            device_id=device_id,
            index=start,
            kind=profile.kind,
            memory_bytes=profile.memory_bytes,
            compute_units=profile.compute_units,
            start=start,
        )
    return made[key]


def _legal_sets(choices: Placements, first: int, chosen: Placements) -> Iterator[Placements]:
    yield chosen
    taken = _taken(chosen)
    for index in range(first, len(choices)):
        profile, start = choices[index]
        if _fits(chosen, taken, profile, start):
            yield from _legal_sets(choices, index + 1, (*chosen, choices[index]))


def _can_grow(chosen: Placements, choices: Placements) -> bool:
    taken = _taken(chosen)
    return any(_fits(chosen, taken, profile, start) for profile, start in choices)


def _fits(chosen: Placements, taken: int, profile: SliceProfile, start: int) -> bool:
    return (
        not taken & _slices(profile, start)
        and sum(other.compute_slices for other, _ in chosen) + profile.compute_slices <= COMPUTE_SLICES
        and sum(other.kind == profile.kind for other, _ in chosen) < profile.at_most
    )


def _taken(chosen: Placements) -> int:
    return sum(_slices(profile, start) for profile, start in chosen)


def _slices(profile: SliceProfile, start: int) -> int:
    """Memory slices as bits."""
    return ((1 << profile.memory_slices) - 1) << start
