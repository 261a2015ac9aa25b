"""Whether a model keeps its promises: attainment, error budget and burn rates over sliding windows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aimgpu.domain import ServiceObjective
from aimgpu.qos.slo.objectives import Sample, Target, targets_of
from aimgpu.qos.slo.windows import SLICES, Buckets, Slice, SlidingWindow, bucket_of, percentile

FAST_SECONDS, SLOW_SECONDS, BUDGET_SECONDS = 300.0, 3600.0, 6 * 3600.0
LATEST_SECONDS = 10.0
SLICE_SECONDS = FAST_SECONDS / SLICES
_FAST, _SLOW = 0, 1
_WINDOWS = (FAST_SECONDS, SLOW_SECONDS, BUDGET_SECONDS)
_PARTS = (0.5, 0.9, 0.95, 0.99)
_ENOUGH = 10  # requests, or slices, before a rate is more than noise


@dataclass(slots=True, kw_only=True)
class TargetReport:
    """`burn` is how many times faster than allowed the budget goes: at 1 it lasts exactly the window. None: too few seen.

    Not frozen: one is made for every target at every scrape, and that would take three times as long.
    """

    name: str
    target_part: float
    target_seconds: float | None
    judged: int  # requests, or slices, that could keep it or not, over the budget window
    attainment: float | None  # the part of them that did; None: too few to say
    budget_left: float | None  # 1: untouched, 0: spent, below: overspent
    fast_burn: float | None
    slow_burn: float | None
    target_tokens_per_second: float | None = None
    promise: str = ""  # the target for people


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """What one window holds; percentiles are {0.5, 0.9, 0.95, 0.99} -> seconds, covered the time that the numbers speak for."""

    seconds: float
    covered_seconds: float
    requests: int
    failures: int
    requests_per_second: float | None
    output_tokens_per_second: float | None
    percentiles: Mapping[str, Mapping[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How targets are kept, and what the windows hold."""

    targets: tuple[TargetReport, ...]
    windows: tuple[WindowReport, ...]


@dataclass(slots=True)
class ObjectiveTracker:
    """Counts the requests of one class against its targets."""

    targets: tuple[Target, ...]
    first_seen: float | None = None
    _current: Slice = field(default_factory=lambda: Slice(began=float("-inf")))
    _current_ends: float = float("-inf")
    _windows: tuple[SlidingWindow, ...] = field(default_factory=lambda: tuple(map(SlidingWindow, _WINDOWS)))

    @classmethod
    def for_objective(cls, objective: ServiceObjective | None) -> "ObjectiveTracker":
        """With a target for each promise of the objective."""
        return cls(targets_of(objective))

    def record(self, sample: Sample, now: float) -> None:
        """One request that is over."""
        part = self._current if now < self._current_ends else self._begin_slice(now)
        part.requests += 1
        part.output_tokens += sample.output_tokens
        if sample.failed:
            part.failures += 1
        judged, met = part.judged, part.met
        for target in self.targets:
            kept = target.judge(sample)
            if kept is not None:
                name = target.name
                judged[name] = judged.get(name, 0) + 1
                if kept:
                    met[name] = met.get(name, 0) + 1
        if sample.ttft_seconds is not None:
            _count(part.ttft, sample.ttft_seconds)
        if sample.tpot_seconds is not None:
            _count(part.tpot, sample.tpot_seconds)
        if sample.latency_seconds is not None:
            _count(part.latency, sample.latency_seconds)

    def note(self, name: str, now: float, *, kept: bool) -> None:
        """A target that is judged elsewhere, and not by request."""
        part = self._current if now < self._current_ends else self._begin_slice(now)
        part.judged[name] = part.judged.get(name, 0) + 1
        if kept:
            part.met[name] = part.met.get(name, 0) + 1

    def total(self, window: int, now: float) -> Slice:
        """Everything in one of the windows, the running slice included."""
        total = self._windows[window].total(now)
        if self._current.began > now - _WINDOWS[window]:
            total.merge(self._current)
        return total

    def parts(self, window: int, now: float, seconds: float | None = None) -> list[Slice]:
        """What adds up to one of the windows, or to its last `seconds`, the running slice included."""
        found = [*self._windows[window].parts(now, seconds)]
        if self._current.began > now - (seconds or _WINDOWS[window]):
            found.append(self._current)
        return found

    def burning(self, now: float) -> float:
        """How fast the budget is spent now."""
        return burning((self,), now)

    def report(self, now: float) -> Report:
        """Targets and windows as of now."""
        return report_together((self,), now)

    def _begin_slice(self, now: float) -> Slice:
        if self.first_seen is None:
            self.first_seen = now
        else:
            for window in self._windows:
                window.add(self._current)
        width = SLICE_SECONDS
        self._current = Slice(began=math.floor(now / width) * width)
        self._current_ends = self._current.began + width
        return self._current


def _count(buckets: Buckets, seconds: float) -> None:
    bucket = bucket_of(seconds)
    buckets[bucket] = buckets.get(bucket, 0) + 1


def burning(trackers: Sequence[ObjectiveTracker], now: float) -> float:
    """How fast a budget goes now, for trackers taken as one: the worst target's burn.

    Of the fast window and the last ten seconds the lesser counts: one window says that it matters, the other that it is not
    already over. 0 while too few were seen.
    """
    targets = _targets(trackers)
    if not targets:
        return 0.0
    fast, latest = _parts(trackers, _FAST, now), _parts(trackers, _FAST, now, LATEST_SECONDS)
    return max(min(_burn(target, fast) or 0.0, _burn(target, latest, enough=1) or 0.0) for target in targets)


def worst_slow_burn(trackers: Sequence[ObjectiveTracker], now: float) -> float:
    """Over the slow window; 0 while too few were seen."""
    found = _parts(trackers, _SLOW, now)
    return max((_burn(target, found) or 0.0 for target in _targets(trackers)), default=0.0)


def report_together(
    trackers: Sequence[ObjectiveTracker],
    now: float,
    judged: Sequence[ObjectiveTracker] | None = None,
    *,
    windows: int = len(_WINDOWS),
) -> Report:
    """One report over several trackers: the classes of a model are its whole.

    The targets speak for `judged` (all, when not given): those where a name means the same promise. `windows`: how many are
    described, shortest first; percentiles are most of the cost.
    """
    totals = [_total(trackers, index, now) for index in range(windows)]
    first = min((tracker.first_seen for tracker in trackers if tracker.first_seen is not None), default=None)
    described = tuple(_report_window(seconds, total, first, now) for seconds, total in zip(_WINDOWS, totals, strict=False))
    targets = _targets(trackers if judged is None else judged)
    if targets and (judged is not None or windows < len(_WINDOWS)):
        parts = [_parts(trackers if judged is None else judged, index, now) for index in range(len(_WINDOWS))]
    else:
        parts = [[total] for total in totals]
    return Report(targets=tuple(_report_target(target, *parts) for target in targets), windows=described)


def _targets(trackers: Sequence[ObjectiveTracker]) -> tuple[Target, ...]:
    """Each once, in the order in which they were promised."""
    return tuple({target.name: target for tracker in trackers for target in tracker.targets}.values())


def _parts(trackers: Sequence[ObjectiveTracker], window: int, now: float, seconds: float | None = None) -> list[Slice]:
    """Counted without being merged: few targets are looked up in them, and merging costs more than that."""
    return [part for one in trackers if one.first_seen is not None for part in one.parts(window, now, seconds)]


def _total(trackers: Sequence[ObjectiveTracker], window: int, now: float) -> Slice:
    merged = Slice(began=now)
    for tracker in trackers:
        if tracker.first_seen is not None:
            merged.merge(tracker.total(window, now))
    return merged


def _judged(target: Target, parts: Sequence[Slice]) -> int:
    return sum(part.judged.get(target.name, 0) for part in parts)


def _attained(target: Target, parts: Sequence[Slice], enough: int = _ENOUGH) -> float | None:
    """The part of the requests that kept it; None where it was judged fewer times than `enough`."""
    judged = _judged(target, parts)
    return sum(part.met.get(target.name, 0) for part in parts) / judged if judged >= enough else None


def _burn(target: Target, parts: Sequence[Slice], enough: int = _ENOUGH) -> float | None:
    attained = _attained(target, parts, enough)
    return None if attained is None else (1 - attained) / target.allowed


def _report_target(target: Target, fast: Sequence[Slice], slow: Sequence[Slice], budget: Sequence[Slice]) -> TargetReport:
    spent = _burn(target, budget)
    return TargetReport(
        name=target.name,
        target_part=target.part,
        target_seconds=target.seconds,
        target_tokens_per_second=target.tokens_per_second,
        promise=target.promise,
        judged=_judged(target, budget),
        attainment=_attained(target, budget),
        budget_left=None if spent is None else 1 - spent,
        fast_burn=_burn(target, fast),
        slow_burn=_burn(target, slow),
    )


def _report_window(seconds: float, total: Slice, first_seen: float | None, now: float) -> WindowReport:
    covered = 0.0 if first_seen is None else min(seconds, max(now - first_seen, SLICE_SECONDS))
    percentiles = {
        name: {part: value for part in _PARTS if (value := percentile(buckets, part)) is not None}
        for name, buckets in (("ttft", total.ttft), ("tpot", total.tpot), ("latency", total.latency))
        if buckets
    }
    return WindowReport(
        seconds=seconds,
        covered_seconds=covered,
        requests=total.requests,
        failures=total.failures,
        requests_per_second=total.requests / covered if covered else None,
        output_tokens_per_second=total.output_tokens / covered if covered else None,
        percentiles=percentiles,
    )
