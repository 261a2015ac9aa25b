"""Who waits, for how long, and who is ahead of whom: retries with growing pauses, wakes without room, turns, divergence."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from aimgpu.control.dependencies import Timing
from aimgpu.control.effects import REAL, Effects
from aimgpu.control.plan.prepared import Prepared, revision_of
from aimgpu.control.plan.stack import COMES_AFTER
from aimgpu.domain import Deployment, Instance, InstanceState
from aimgpu.ledger import Retry

_FORGOTTEN_AFTER_MS = 600_000  # a failure that long after the last one counts as the first


class Ends(StrEnum):
    """What ends a wait."""

    TIME = "time"  # the pause after a failure
    ROOM = "room"  # tried again every few seconds while it is wanted
    OPERATION = "operation"  # one that is under way comes to it, or it is being tried now
    LOOK = "look"  # the next look at all deployments, a few seconds from now
    UP = "up"  # not before it is applied again


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Replicas of one deployment that are wanted, are neither ready nor asleep, and have no engine that starts or ends."""

    deployment: Deployment
    replicas: tuple[int, ...]
    ends_on: Ends
    reason: str
    retry: Retry | None = None


def find_waiting(
    deployments: Iterable[Deployment], instances: Iterable[Instance], retries: Mapping[str, Retry], under_way: Collection[str]
) -> tuple[Wait, ...]:
    """Every wanted replica is ready, asleep, starting, ending, or in one of these.

    `under_way`: names in the hands of operations.
    """
    taken = {
        (one.deployment, one.replica) for one in instances if one.state not in (InstanceState.FAILED, InstanceState.ABSENT)
    }
    found = []
    for item in deployments:
        missing = tuple(number for number in range(item.replicas) if (item.name, number) not in taken)
        if missing:
            found.append(_wait_of(item, missing, retries.get(item.name), under_way))
    return tuple(found)


def _wait_of(item: Deployment, missing: tuple[int, ...], retry: Retry | None, under_way: Collection[str]) -> Wait:
    if item.name in under_way:
        ends, reason = Ends.OPERATION, "an operation that is under way starts it"
    elif retry is None:
        ends, reason = Ends.LOOK, "it is started at the next look at all models"
    else:
        ends, reason = ends_of(retry), retry.reason
    return Wait(deployment=item, replicas=missing, ends_on=ends, reason=reason, retry=retry)


def ends_of(retry: Retry) -> Ends:
    """What ends the wait that it stands for."""
    if retry.exhausted:
        return Ends.UP
    return Ends.TIME if retry.failures else Ends.ROOM


def after_failure(known: Retry | None, failed: Retry, timing: Timing, jitter: float) -> Retry:
    """`failed` has the reason and the time; `jitter` is between 0 and 1. Beyond the bound nothing is tried any more."""
    now_ms = failed.last_failure_ms
    if known is not None and known.retry_at_ms is not None and now_ms < known.retry_at_ms and known.failures:
        return replace(known, reason=failed.reason)  # another replica, of the same trouble: it is tried with the first
    recent = known is not None and now_ms - known.last_failure_ms <= _FORGOTTEN_AFTER_MS
    failures = known.failures + 1 if recent and known is not None else 1
    if failures > timing.restart_limit:
        return replace(failed, failures=failures, retry_at_ms=None, exhausted=True)
    pause = min(timing.restart_delay_seconds * 2 ** (failures - 1), timing.restart_longest_seconds)
    pause *= 1 + timing.restart_jitter * (2 * jitter - 1)
    return replace(failed, failures=failures, retry_at_ms=now_ms + round(pause * 1000))


def note_failed(known: Retry | None, failed: Retry, timing: Timing, jitter: float, *, gives_up: bool = False) -> Retry:
    """What is recorded with an instance that failed. One that had a try to come is tried again in any case.

    `gives_up`: it was asked for just now, and its caller hears that it does not start; that counts as no failure.
    """
    if gives_up and (known is None or known.retry_at_ms is None):
        return replace(failed, exhausted=True)
    return after_failure(known, failed, timing, jitter)


def after_refusal(known: Retry | None, refused: Retry, pause_seconds: float) -> Retry:
    """A lack of room is not a failure: the replica is tried again while it is wanted."""
    failures = known.failures if known is not None else 0
    last_ms = known.last_failure_ms if known is not None else 0
    retry_at_ms = refused.last_failure_ms + round(pause_seconds * 1000)
    return replace(refused, failures=failures, last_failure_ms=last_ms, retry_at_ms=retry_at_ms)


def is_due(retry: Retry, now_ms: int, timing: Timing) -> bool:
    """Also where the clock was set back so that its time seems further away than any pause is."""
    if retry.retry_at_ms is None:
        return False
    longest = max(timing.restart_longest_seconds, timing.error_retry_seconds) * 2000
    return now_ms >= retry.retry_at_ms or retry.retry_at_ms - now_ms > longest


def is_stale(retry: Retry, now_ms: int) -> bool:
    """Whether it only counts failures that are long past."""
    return retry.retry_at_ms is None and not retry.exhausted and now_ms - retry.last_failure_ms > _FORGOTTEN_AFTER_MS


def describe_retry(retry: Retry, now_ms: int) -> str:
    """For people: "failed 3 times, next try in 40 s: REASON"."""
    if retry.exhausted and not retry.failures:
        return f"gave up: {retry.reason}"
    times = f"failed {retry.failures} time{'' if retry.failures == 1 else 's'}" if retry.failures else _what_it_waits_for(retry)
    if retry.exhausted:
        return f"{times} and is not tried again until it is applied again: {retry.reason}"
    if retry.retry_at_ms is None:
        return f"{times}: {retry.reason}"
    return f"{times}, next try in {max(0, round((retry.retry_at_ms - now_ms) / 1000))} s: {retry.reason}"


def _what_it_waits_for(retry: Retry) -> str:
    return "waits" if retry.reason.startswith(COMES_AFTER) else "waits for room"


_GIVEN_UP_SECONDS = 30.0  # after the last try: its callers are gone


@dataclass(slots=True, kw_only=True)
class _Waiting:
    item: Prepared
    since: float
    last: float

    @property
    def order(self) -> tuple[int, float]:
        return (-self.item.deployment.ask.priority.rank, self.since)


class WaitingWakes:
    """Higher priority first, then in the order in which they first asked. Of the thread of the loop."""

    def __init__(self, effects: Effects = REAL) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._now = effects.now

    def refused(self, item: Prepared) -> None:
        """It keeps the place that it first had."""
        now = self._now()
        known = self._waiting.get(item.name)
        since = known.since if known is not None and now - known.last < _GIVEN_UP_SECONDS else now
        self._waiting[item.name] = _Waiting(item=item, since=since, last=now)

    def woken(self, name: str) -> None:
        """It has its room."""
        self._waiting.pop(name, None)

    def waited_seconds(self, name: str) -> float:
        """Since it was first refused."""
        known = self._waiting.get(name)
        return self._now() - known.since if known is not None else 0.0

    def ahead_of(self, item: Prepared) -> tuple[Prepared, ...]:
        """Those whose room this one must leave to them."""
        now = self._now()
        self._waiting = {name: one for name, one in self._waiting.items() if now - one.last < _GIVEN_UP_SECONDS}
        known = self._waiting.get(item.name)
        mine = known.order if known is not None else (-item.deployment.ask.priority.rank, now)
        ahead = sorted((one for one in self._waiting.values() if one.order < mine), key=lambda one: one.order)
        return tuple(one.item for one in ahead if one.item.name != item.name)


_TURN_SECONDS = 5.0  # for which a less urgent one waits: preparing may mean a download


class PlanningTurn:
    """Ends once its holder is planned; `end` is what to pass as `planned`."""

    def __init__(self, rank: int, effects: Effects = REAL) -> None:
        self.rank = rank
        self._ended = effects.flag()

    def wait(self) -> None:
        """For its end, or for a while."""
        self._ended.wait(_TURN_SECONDS)

    def end(self) -> None:
        """Safe to call twice."""
        self._ended.set()


_SETTLED = frozenset({InstanceState.READY, InstanceState.SLEEPING, InstanceState.FAILED})
_UNDER_WAY = frozenset({InstanceState.QUEUED, InstanceState.LOADING, InstanceState.DRAINING})


def find_diverged(
    deployments: Iterable[Deployment], instances: Iterable[Instance], recorded: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """By name, the instances that it has; a deployment of which something is being started or ended is left out.

    A replica is missing, stands twice, is of an earlier revision, or failed without a record of it: `recorded` are those that
    are tried again by themselves, or not any more.
    """
    by_name: dict[str, list[Instance]] = {}
    for instance in instances:
        by_name.setdefault(instance.deployment, []).append(instance)
    return {
        deployment.name: tuple(one.id for one in by_name.get(deployment.name, ()))
        for deployment in deployments
        if _is_diverged(deployment, by_name.get(deployment.name, []), recorded)
    }


def find_abandoned(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Those that are being started or ended; where no operation is under way, nothing waits for them."""
    return tuple(one for one in instances if one.state in _UNDER_WAY)


def still_diverged(before: Mapping[str, tuple[str, ...]], now: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Those that were so at the last look, with the same instances: nothing works on them."""
    return [name for name, instances in now.items() if before.get(name) == instances]


def _is_diverged(deployment: Deployment, instances: Sequence[Instance], recorded: Collection[str]) -> bool:
    if any(one.state not in _SETTLED for one in instances):
        return False
    if deployment.name not in recorded and any(one.state is InstanceState.FAILED for one in instances):
        return True
    replicas = Counter(one.replica for one in instances)
    if set(replicas) != set(range(deployment.replicas)) or max(replicas.values(), default=1) > 1:
        return True
    ready = [one.revision for one in instances if one.state is InstanceState.READY and one.revision is not None]
    return bool(ready) and any(revision != revision_of(deployment) for revision in ready)
