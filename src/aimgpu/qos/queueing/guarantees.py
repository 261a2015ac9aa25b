"""Promises of a part of a partition that cannot all be kept are refused before anything runs."""

from collections.abc import Iterable
from dataclasses import dataclass

from aimgpu.units import PPM, format_ppm


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """At least `guaranteed_ppm` of a partition for a model, at most `limit_ppm` (None: no limit)."""

    model: str
    partition_id: str
    guaranteed_ppm: int
    limit_ppm: int | None = None


def check_guarantees(guarantees: Iterable[Guarantee]) -> tuple[str, ...]:
    """What is wrong, one sentence each; empty when all can be kept."""
    problems: list[str] = []
    held: dict[str, list[Guarantee]] = {}
    for guarantee in guarantees:
        problems.extend(_check_one(guarantee))
        held.setdefault(guarantee.partition_id, []).append(guarantee)
    for partition, on_it in sorted(held.items()):
        total = sum(guarantee.guaranteed_ppm for guarantee in on_it)
        if total > PPM:
            parts = " + ".join(f"{g.model} {format_ppm(g.guaranteed_ppm)}" for g in on_it)
            problems.append(f"guarantees on {partition} add up to {format_ppm(total)}: {parts}")
    return tuple(problems)


def _check_one(guarantee: Guarantee) -> list[str]:
    found = []
    guaranteed, limit = guarantee.guaranteed_ppm, guarantee.limit_ppm
    if not 0 <= guaranteed <= PPM:
        found.append(f"{guarantee.model}: a guarantee goes from 0% to 100%, not {format_ppm(guaranteed)}")
    if limit is not None and not 0 < limit <= PPM:
        found.append(f"{guarantee.model}: a limit goes up to 100%, not {format_ppm(limit)}")
    elif limit is not None and guaranteed > limit:
        found.append(f"{guarantee.model}: guarantee {format_ppm(guaranteed)} is above its limit {format_ppm(limit)}")
    return found
