"""Who stays loaded: what has been idle too long, and what to unload when something else must wake. Pure; time is passed in."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf

from aimgpu.domain import Priority
from aimgpu.placement.residency import WEIGHT, expected_loss, format_seconds
from aimgpu.qos.arrivals import UNKNOWN_GAP_SECONDS

_AT_RISK_WEIGHT = 4.0  # its objective is being missed already
_STAY_WAKES = 10.0  # so often the seconds of its wake: swapping takes a small part of the time, also where nothing is idle
_AHEAD_SECONDS = 30.0
_AHEAD_WAKES = 3.0
_SURE_PART = 0.5  # of the present pause: without evidence the next request is expected after as long again
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
    expected_seconds: float  # until its next request
    freed_bytes: int = 1  # of GPU memory, by unloading it
    first_token_seconds: float = 2.0  # what callers were promised
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


def is_due_to_wake(activity_seconds: float, expected_seconds: float, wake_seconds: float) -> bool:
    """Whether a sleeper's next request is near enough to wake it for it, where the room is free.

    `activity_seconds`: since its last request. What is expected only because nothing is known is never that near.
    """
    return expected_seconds <= min(activity_seconds * _SURE_PART, max(_AHEAD_SECONDS, _AHEAD_WAKES * wake_seconds))


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
    settled = resident.resident_seconds >= min(least_residency_seconds, _STAY_WAKES * resident.wake_seconds)
    return settled and (resident.in_flight == 0 or waited_seconds >= PATIENCE_SECONDS)


def eviction_cost(resident: Resident) -> float:
    """Requests per second and byte that are expected to be late if it is unloaded now, weighed by who sends them."""
    loss = expected_loss(
        resident.wake_seconds, expected_seconds=resident.expected_seconds, first_token_seconds=resident.first_token_seconds
    )
    risk = _AT_RISK_WEIGHT if resident.at_risk else 1.0
    return loss * WEIGHT[resident.priority] * risk / resident.freed_bytes


def explain_residents(residents: Sequence[Resident], least_residency_seconds: float) -> dict[str, str]:
    """Why each is awake, and how soon it would make room for another; by name."""
    free = sorted((one for one in residents if one.keep_seconds is not None and not one.in_flight), key=eviction_cost)
    found = {}
    for one in residents:
        if one.keep_seconds is None:
            found[one.name] = "awake: it is kept always"
        elif one.in_flight:
            found[one.name] = f"awake: {one.in_flight} in flight"
        else:
            found[one.name] = (
                f"awake: idle for {format_seconds(one.idle_seconds)}, {describe_next(one.expected_seconds)},"
                f" awake again in {format_seconds(one.wake_seconds)}; number {free.index(one) + 1} of {len(free)} to make room"
            )
            if not may_be_evicted(one, least_residency_seconds):
                found[one.name] += ", but it was loaded just now"
    return found


def describe_next(expected_seconds: float) -> str:
    """The next request, for people."""
    if expected_seconds in (UNKNOWN_GAP_SECONDS, inf):
        return "no pattern of requests known yet"
    return f"next request expected in {format_seconds(expected_seconds)}"


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
