"""Who stays loaded: what has been idle too long, and what to unload when something else must wake. Pure; time is passed in."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from aimgpu.domain import Priority

# Unloading a model that callers of high priority wait for costs more than its wake time says.
_WEIGHT = {Priority.HIGH: 4.0, Priority.MEDIUM: 2.0, Priority.LOW: 1.0}
_AT_RISK_WEIGHT = 4.0  # its objective is being missed already
_SECONDS_AN_HOUR = 3600.0
# That callers wait before a busy model of the same priority is drained for theirs: less than the longest wait of any class.
PATIENCE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A loaded deployment, as it is used."""

    name: str
    priority: Priority
    keep_seconds: int | None  # None: always
    idle_seconds: float
    resident_seconds: float  # since it was ready
    in_flight: int
    wake_seconds: float  # what loading it again is expected to take
    requests_per_hour: float
    at_risk: bool = False


def due_to_sleep(residents: Sequence[Resident], least_residency_seconds: float) -> tuple[str, ...]:
    """Those that were idle for as long as they are to be kept, and not loaded just now."""
    return tuple(
        resident.name
        for resident in residents
        if resident.keep_seconds is not None
        and resident.in_flight == 0
        and resident.idle_seconds >= resident.keep_seconds
        and resident.resident_seconds >= least_residency_seconds
    )


def may_be_evicted(
    resident: Resident, least_residency_seconds: float, *, rank: int | None = None, waited_seconds: float = 0.0
) -> bool:
    """Never one that is kept loaded. One that is busy or was just loaded makes way for a higher priority only.

    `rank`: of the priority that needs the room. Callers that waited for long take it from busy equals too: none starves.
    """
    if resident.keep_seconds is None:
        return False
    if rank is not None and resident.priority.rank < rank:
        return True
    settled = resident.resident_seconds >= least_residency_seconds
    return settled and (resident.in_flight == 0 or waited_seconds >= PATIENCE_SECONDS)


def eviction_cost(resident: Resident) -> float:
    """Seconds that callers are expected to wait in the next hour if it is unloaded now, weighed by who they are.

    Traffic fades as a model lies idle: one request an hour that came just now is worth more than one an hour ago.
    """
    expected = 1.0 + resident.requests_per_hour / (1.0 + resident.idle_seconds * 10 / _SECONDS_AN_HOUR)
    risk = _AT_RISK_WEIGHT if resident.at_risk else 1.0
    return resident.wake_seconds * expected * _WEIGHT[resident.priority] * risk


def choose_evictions(
    residents: Sequence[Resident],
    fits: Callable[[Collection[str]], bool],
    least_residency_seconds: float,
    *,
    rank: int | None = None,
    waited_seconds: float = 0.0,
) -> tuple[str, ...] | None:
    """The cheapest found set without which the waking model fits, idle ones first; None where no set does."""
    candidates = sorted(
        (one for one in residents if may_be_evicted(one, least_residency_seconds, rank=rank, waited_seconds=waited_seconds)),
        key=lambda resident: (resident.in_flight > 0, eviction_cost(resident), resident.name),
    )
    chosen: list[str] = []
    for resident in candidates:
        if fits(chosen):
            break
        chosen.append(resident.name)
    if not fits(chosen):
        return None
    for name in reversed(chosen.copy()):  # the dearest first: was it needed, or only tried on the way?
        without = [other for other in chosen if other != name]
        if fits(without):
            chosen = without
    return tuple(chosen)
