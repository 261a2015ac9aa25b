"""One model's promises and how they are kept: by class, and where classes share a promise, together."""

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.qos.slo.objectives import Sample, throughput_target
from aimgpu.qos.slo.throughput import ThroughputMeter
from aimgpu.qos.slo.tracker import ObjectiveTracker, Report, burning, report_together, worst_slow_burn


class ModelScores:
    """One tracker per class, and meters where a rate of tokens was promised."""

    def __init__(self, objective: ServiceObjective | None) -> None:
        self.objective = objective
        promised = {priority: objective.of_class(priority) if objective else None for priority in Priority}
        own = {priority for priority in Priority if objective is not None and objective.own_of(priority) is not None}
        self.own = frozenset(own)  # classes with promises of their own
        self.by_class = {priority: ObjectiveTracker.for_objective(promised[priority]) for priority in Priority}
        shared = _meter(objective)
        self._shared_meter = shared if len(own) < len(Priority) else None
        self._meters = {priority: _meter(promised[priority]) if priority in own else shared for priority in Priority}
        self._trackers = tuple(self.by_class.values())

    def record(self, sample: Sample, priority: Priority, now: float) -> None:
        """One request of a class that is over."""
        self.by_class[priority].record(sample, now)

    def meter(self, priority: Priority) -> ThroughputMeter | None:
        """Where the tokens of this class count, where a rate was promised."""
        return self._meters[priority]

    def report(self, now: float, *, windows: int = 3) -> Report:
        """Windows of all requests; targets as promised to the model, on the requests of classes without their own."""
        if not self.own and self._shared_meter is None:
            return report_together(self._trackers, now, windows=windows)
        return report_together(self._trackers, now, self._judged(now), windows=windows)

    def report_class(self, priority: Priority, now: float, *, windows: int = 3) -> Report:
        """A rate that classes share is not one of them's to keep, and left out."""
        tracker = self.by_class[priority]
        return report_together((tracker,), now, [tracker, *_metered(self._own_meter(priority), now)], windows=windows)

    def burning_high(self, now: float) -> float:
        """How fast high work burns its budget: that of high requests alone.

        Were shed low ones to count, holding them back would be a reason to hold them back.
        """
        meter = self._own_meter(Priority.HIGH)
        return burning((self.by_class[Priority.HIGH], *_metered(meter, now)), now)

    def is_overspending(self, now: float) -> bool:
        """Whether any promise is broken faster than it may, over the slow window."""
        own = [((self.by_class[priority], *_metered(self._own_meter(priority), now))) for priority in self.own]
        return any(worst_slow_burn(trackers, now) > 1 for trackers in (self._judged(now), *own))

    def _judged(self, now: float) -> list[ObjectiveTracker]:
        """Where the model's own promises are judged."""
        shared = [tracker for priority, tracker in self.by_class.items() if priority not in self.own]
        return [*shared, *_metered(self._shared_meter, now)]

    def _own_meter(self, priority: Priority) -> ThroughputMeter | None:
        return self._meters[priority] if priority in self.own else None


def _meter(objective: ServiceObjective | None) -> ThroughputMeter | None:
    target = throughput_target(objective)
    return ThroughputMeter(target) if target is not None else None


def _metered(meter: ThroughputMeter | None, now: float) -> tuple[ObjectiveTracker, ...]:
    if meter is None:
        return ()
    meter.settle(now)
    return (meter.tracker,)
