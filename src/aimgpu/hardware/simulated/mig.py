"""NVIDIA's Multi-Instance GPU rules: profiles, where each may start, and which sets of placements go together.

A GPU has eight memory slices and seven compute slices. Source: NVIDIA MIG user guide and `nvidia-smi mig -lgip -lgipp`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from aimgpu.domain import Layout, Partition
from aimgpu.units import GIB

COMPUTE_SLICES = 7
_PLACEMENT = re.compile(r"([0-9]g\.[0-9]+gb(?:\+me)?)@([0-7])")


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    name: str  # "1g.18gb"
    compute_slices: int
    memory_slices: int
    starts: tuple[int, ...]  # memory slices where it may begin
    at_most: int
    memory_bytes: int
    compute_units: int


Placements = tuple[tuple[MigProfile, int], ...]


def seven_slice_profiles(
    *, names: tuple[int, int, int, int], gib: tuple[float, float, float, float], units: tuple[int, int, int, int, int, int]
) -> tuple[MigProfile, ...]:
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
        MigProfile(
            name=name,
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
def full_placements(profiles: tuple[MigProfile, ...]) -> tuple[Placements, ...]:
    """Every legal set to which nothing can be added, without the media-engine variants; shared by all GPUs of a part."""
    plain = tuple(profile for profile in profiles if not profile.name.endswith("+me"))
    choices = tuple(sorted(((p, s) for p in plain for s in p.starts), key=lambda c: (c[1], -c[0].memory_slices, c[0].name)))
    return tuple(found for found in _legal_sets(choices, 0, ()) if found and not _can_grow(found, choices))


def is_legal(placements: Placements) -> bool:
    """No slice twice, no profile more often than the GPU has it, no start that the profile does not have."""
    taken = 0
    for index, (profile, start) in enumerate(placements):
        if start not in profile.starts or not _fits(placements[:index], taken, profile, start):
            return False
        taken |= _slices(profile, start)
    return True


def parse_placements(text: str, profiles: tuple[MigProfile, ...]) -> Placements | None:
    """Placements of "1g.18gb@0+3g.71gb@4", in order of their starts; None if that is not a legal set of this GPU."""
    by_name = {profile.name: profile for profile in profiles}
    found = _PLACEMENT.findall(text)
    if "+".join(f"{name}@{start}" for name, start in found) != text or any(name not in by_name for name, _ in found):
        return None
    placements = tuple(sorted(((by_name[name], int(start)) for name, start in found), key=lambda choice: choice[1]))
    return placements if placements and is_legal(placements) else None


def mig_layout(device_id: str, placements: Placements, made: dict[tuple[str, int], Partition]) -> Layout:
    """The Layout of these placements; Partitions that `made` holds already are used again."""
    return Layout(
        name="+".join(f"{profile.name}@{start}" for profile, start in placements),
        compute_mode=None,
        memory_mode=None,
        partitions=tuple(_partition(device_id, profile, start, made) for profile, start in placements),
    )


def _partition(device_id: str, profile: MigProfile, start: int, made: dict[tuple[str, int], Partition]) -> Partition:
    key = (profile.name, start)
    if key not in made:
        # The index is the start: a Partition keeps its id when its neighbours change.
        made[key] = Partition(
            id=f"{device_id}/{profile.name}-{start}",
            device_id=device_id,
            index=start,
            kind=profile.name,
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


def _fits(chosen: Placements, taken: int, profile: MigProfile, start: int) -> bool:
    return (
        not taken & _slices(profile, start)
        and sum(other.compute_slices for other, _ in chosen) + profile.compute_slices <= COMPUTE_SLICES
        and sum(other.name == profile.name for other, _ in chosen) < profile.at_most
    )


def _taken(chosen: Placements) -> int:
    return sum(_slices(profile, start) for profile, start in chosen)


def _slices(profile: MigProfile, start: int) -> int:
    """Memory slices as bits."""
    return ((1 << profile.memory_slices) - 1) << start
