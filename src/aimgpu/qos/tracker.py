"""Whether a model keeps its promises: attainment, error budget and burn rates over sliding windows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aimgpu.domain import ServiceObjective
from aimgpu.qos.objectives import Sample, Target, targets_of
from aimgpu.qos.windows import Slice, SlidingWindow

FAST_SECONDS, SLOW_SECONDS, BUDGET_SECONDS = 300.0, 3600.0, 6 * 3600.0
_WINDOWS = (FAST_SECONDS, SLOW_SECONDS, BUDGET_SECONDS)
_ENOUGH = 10  # requests before a rate is more than noise


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """`burn` is how many times faster than allowed the budget goes: at 1 it lasts exactly the window. None: too few seen."""

    name: str
    target_part: float
    target_seconds: float | None
    attainment: float | None  # over the budget window
    budget_left: float | None  # 1: untouched, 0: spent, below: overspent
    fast_burn: float | None
    slow_burn: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """What one window holds; percentiles are {0.5, 0.95, 0.99} -> seconds."""

    seconds: float
    covered_seconds: float
    requests: int
    failures: int
    requests_per_second: float | None
    output_tokens_per_second: float | None
    percentiles: Mapping[str, Mapping[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    targets: tuple[TargetReport, ...]
    windows: tuple[WindowReport, ...]

    @property
    def worst_fast_burn(self) -> float:
        return max((target.fast_burn for target in self.targets if target.fast_burn is not None), default=0.0)


@dataclass(slots=True)
class ObjectiveTracker:
    targets: tuple[Target, ...]
    _windows: tuple[SlidingWindow, ...] = field(default_factory=lambda: tuple(map(SlidingWindow, _WINDOWS)))

    @classmethod
    def for_objective(cls, objective: ServiceObjective | None) -> "ObjectiveTracker":
        return cls(targets_of(objective))

    def record(self, sample: Sample, now: float) -> None:
        verdicts = [(target.name, target.judge(sample)) for target in self.targets]
        for window in self._windows:
            part = window.slice_at(now)
            _count(part, sample)
            for name, kept in verdicts:
                if kept is not None:
                    part.judged[name] = part.judged.get(name, 0) + 1
                    if kept:
                        part.met[name] = part.met.get(name, 0) + 1

    def fast_burn(self, now: float) -> float:
        """The worst of all targets over the fast window; 0 while too few were seen."""
        if not self.targets:
            return 0.0
        recent = self._windows[0].total(now)
        return max((burn for target in self.targets if (burn := _burn(target, recent)) is not None), default=0.0)

    def report(self, now: float) -> Report:
        totals = [window.total(now) for window in self._windows]
        fast, slow, budget = totals
        targets = tuple(_report_target(target, fast, slow, budget) for target in self.targets)
        windows = tuple(_report_window(window, total, now) for window, total in zip(self._windows, totals, strict=True))
        return Report(targets=targets, windows=windows)


def _count(part: Slice, sample: Sample) -> None:
    part.requests += 1
    part.output_tokens += sample.output_tokens
    if sample.failed:
        part.failures += 1
    if sample.ttft_seconds is not None:
        part.add_latency("ttft", sample.ttft_seconds)
    if sample.tpot_seconds is not None:
        part.add_latency("tpot", sample.tpot_seconds)
    if sample.latency_seconds is not None:
        part.add_latency("latency", sample.latency_seconds)


def _attainment(target: Target, total: Slice) -> float | None:
    judged = total.judged.get(target.name, 0)
    return total.met.get(target.name, 0) / judged if judged else None


def _burn(target: Target, total: Slice) -> float | None:
    if total.judged.get(target.name, 0) < _ENOUGH:
        return None
    attained = _attainment(target, total)
    assert attained is not None  # noqa: S101  # at least ten were judged
    allowed = 1 - target.part
    return (1 - attained) / allowed if allowed > 0 else (0.0 if attained == 1 else float("inf"))


def _report_target(target: Target, fast: Slice, slow: Slice, budget: Slice) -> TargetReport:
    spent = _burn(target, budget)
    return TargetReport(
        name=target.name,
        target_part=target.part,
        target_seconds=target.seconds,
        attainment=_attainment(target, budget),
        budget_left=None if spent is None else 1 - spent,
        fast_burn=_burn(target, fast),
        slow_burn=_burn(target, slow),
    )


def _report_window(window: SlidingWindow, total: Slice, now: float) -> WindowReport:
    covered = window.covered_seconds(now)
    percentiles = {
        name: {part: value for part in (0.5, 0.95, 0.99) if (value := histogram.percentile(part)) is not None}
        for name, histogram in total.latencies.items()
    }
    return WindowReport(
        seconds=window.seconds,
        covered_seconds=covered,
        requests=total.requests,
        failures=total.failures,
        requests_per_second=total.requests / covered if covered else None,
        output_tokens_per_second=total.output_tokens / covered if covered else None,
        percentiles=percentiles,
    )
