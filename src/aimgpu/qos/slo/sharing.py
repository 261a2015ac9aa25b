"""How much of the GPU a model's promises leave to its neighbours: a feedback controller, one per model. No clock, no I/O.

Each tick takes the times that were measured since the last one (per token, to the first token, per request) and estimates the
promised percentile of each. It then moves the share that lower-priority tenants may use while the model works. The goal is that
a little less is late than a promise allows. The cost of the share is learned, so the steps suit light and heavy neighbours.
When most times are late, the share is cut at once. It goes up only slowly near the share at which that happened, so that it
settles instead of swinging. A model is steered by its own promises alone.

A share of 1 is more than a little beyond 0.99: the gate is open, and launches are neither counted nor held. Where the neighbour
is held to a part of the units (MPS, CU masks), that costs the model little and gives the neighbour twice as much. It is tried
early, if the measurements allow it. It stays open while no more is late than is allowed. When a promise breaks, the earlier
share is restored, and the next trial comes much later.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aimgpu.qos.slo.objectives import Target
from aimgpu.qos.slo.open_gate import OpenGate

TICK_SECONDS = 0.25
_MISSES = 0.5  # of those that a promise allows: that many are aimed at
_BREACH_TICKS = 3  # with a mean beyond the promise, until the share is cut; a single burst of the neighbour is shorter
_FAR_BREACH = 1.3  # of the promise, by its mean: cut at once
_RATE = 0.09  # of the way to the share that would use the promise up, per tick
_FAST_RATE = 0.3  # of the way back, when clearly more than the promise is used
_LITTLE = 0.02
_RAMP_RATE = 0.15  # of the way up, when clear room is left
_ROOM = 0.03
_LARGEST_STEP = 0.05
_FIRST_TICKS = 2  # until the model's own times are known: the share stays 0
_LARGEST_START = 0.25
_COST = 1.3  # of the whole device, in times alone: measured beside an LLM, and believed until something was measured here
_LEAST_COST, _MOST_COST = 0.3, 8.0
_COST_WEIGHT = 0.15
_LARGE_SHARE = 0.15  # of smaller ones the cost is seen less well
_START = 0.5  # of the way to the share that would use the promise up, in the first step
_CAREFUL_STEP = 0.003  # beyond the share at which a promise was last broken
_NEAR = 0.9  # of that share: from here on careful
_STEEPEST_CUT = 0.3
_CUT_GAIN = 3.0
_LEAST_SHARE = 0.01  # less than this is none
_LARGEST_GATED = 0.99
_PAUSE_TICKS = 4  # after a cut, until the effect has been seen
_CEILING_GROWTH = 1.003  # per tick: the neighbour's work changes, so a ceiling is forgotten within minutes
_EXHAUSTED_TICKS = 8  # measured ones in a row
_MEAN_WEIGHT = 0.4  # of the samples of the newest tick
_SPREAD_WEIGHT = 0.05
_FIRST_SPREAD = 0.015
_OPEN_FROM = 0.4  # of smaller shares too little is known of what an open gate costs
_OPEN_ROOM = 0.03  # of the promise that shall be left beside an open gate, by what smaller shares cost
_OUTLIER = 4.0  # spreads: more is not the usual spread
_MARGIN_STEP = 0.4  # spreads


@dataclass(slots=True)
class _Series:
    """Mean of one measure, and the margin above it that all but `late` of the samples keep.

    The margin is found by counting the samples beyond it, so that no shape is assumed.
    """

    late: float
    mean: float | None = None
    spread: float = _FIRST_SPREAD  # of the mean: the average distance of a sample
    margin: float = 2 * _FIRST_SPREAD  # of the mean

    def add(self, value: float, weight: float) -> None:
        if self.mean is None:
            self.mean = value
            return
        above = value / self.mean - 1
        self.spread += _SPREAD_WEIGHT * (min(abs(above), _OUTLIER * self.spread) - self.spread)
        self.margin += _MARGIN_STEP * self.spread * ((1 if above > self.margin else 0) - self.late)
        self.margin = max(0.0, self.margin)
        self.mean += weight * (value - self.mean)


@dataclass(slots=True)
class PromiseController:
    """`share`: the part of the device's time that lower-priority tenants may use while the model works, from 0 to 1."""

    targets: tuple[Target, ...]
    share: float = 0.0
    used: float | None = None  # of the promise that is nearest to breaking, 1 is all of it; None: nothing measured yet
    nearest: str | None = None  # that promise
    _series: dict[str, _Series] = field(default_factory=dict)  # by promise
    _mean_used: float = 0.0  # of that promise, by the mean
    _alone: dict[str, float] = field(default_factory=dict)  # by promise: its mean, of what it allows, at share 0
    _cost: float = _COST
    _ceiling: float = math.inf
    _pause: int = 0
    _late_ticks: int = 0
    _ticks: int = 0  # with measurements
    _broken_shut: int = 0
    _gate: OpenGate = field(default_factory=OpenGate)

    @property
    def is_exhausted(self) -> bool:
        """Nothing is left to take away, and a promise still breaks."""
        return self._broken_shut >= _EXHAUSTED_TICKS

    @property
    def cost(self) -> float | None:
        """How much longer the nearest promise's measure takes than while nothing was given away; None: not known yet."""
        alone = self._alone.get(self.nearest or "")
        return max(0.0, self._mean_used / alone - 1) if alone else None

    def step(self, samples: Mapping[str, Sequence[float]]) -> float:
        """One tick. `samples`: seconds by measure ("tpot", "ttft", "latency"); without any the share stays as it is."""
        fresh = False
        for target in self.targets:
            # A time of 0 is not a measurement: events that were read together, or a clock that stood still.
            values = [value for value in samples.get(target.measure, ()) if value > 0] if target.seconds else []
            for value in values:
                late = max(target.allowed, 0.001) * _MISSES
                weight = 1 - (1 - _MEAN_WEIGHT) ** (1 / len(values))
                self._series.setdefault(target.name, _Series(late)).add(value, weight)
                fresh = True
            self._gate.add(target, values)
        if not fresh:
            return self.share
        self._estimate()
        if self.used is not None:
            self._broken_shut = self._broken_shut + 1 if self.share == 0 and self.used > 1 else 0
            self._ticks += 1
            self._move(self.used)
        return self.share

    def _estimate(self) -> None:
        found = [
            (series.mean * (1 + series.margin) / target.seconds, target.name, series.mean / target.seconds)
            for target in self.targets
            if target.seconds and (series := self._series.get(target.name)) is not None and series.mean is not None
        ]
        if not found:
            return
        self.used, self.nearest, self._mean_used = max(found)
        self._learn_cost(self.nearest, self._mean_used)

    def _learn_cost(self, promise: str, mean_used: float) -> None:
        """How much longer the model would take beside a neighbour that had the whole device, in times alone."""
        if self.share == 0:
            self._alone[promise] = mean_used
        elif _LEAST_SHARE < self.share < 1 and promise in self._alone:
            cost = (mean_used / self._alone[promise] - 1) / self.share
            weight = _COST_WEIGHT * min(1.0, self.share / _LARGE_SHARE)
            self._cost += weight * (min(max(cost, _LEAST_COST), _MOST_COST) - self._cost)

    def _move(self, used: float) -> None:
        self._pause = max(0, self._pause - 1)
        self._ceiling *= _CEILING_GROWTH
        self._late_ticks = self._late_ticks + 1 if self._mean_used > 1 else 0
        self._gate.tick()
        if self._late_ticks >= _BREACH_TICKS or self._mean_used > _FAR_BREACH:
            if self._pause < _PAUSE_TICKS - 1 or self._mean_used > _FAR_BREACH:
                self._cut(max(used, 1.0))
        elif self._gate.is_open:
            if self._gate.breaks(self.targets):
                self._shut()
        elif used > 1:
            self.share = max(0.0, self.share * _STEEPEST_CUT, self.share + self._step_of(used))
            self.share = self.share if self.share >= _LEAST_SHARE else 0.0
        elif self._ticks == _FIRST_TICKS:
            self.share = max(self.share, min(_START * (1 - used) / self._cost, _LARGEST_START))
        elif self._ticks > _FIRST_TICKS and self._pause == 0:
            self._grow(self._step_of(used))
            if self._can_open(used):
                self._gate.open(self.share)
                self.share = 1.0

    def _can_open(self, used: float) -> bool:
        """Whether the cost of the share so far, extrapolated to the whole device, keeps the promise."""
        alone = self._alone.get(self.nearest or "")
        if alone is None or self.share < _OPEN_FROM or not self._gate.may_open:
            return False
        rest = max(0.0, self._mean_used - alone) * (1 - self.share) / self.share
        return used + rest <= 1 - _OPEN_ROOM or self.share >= _LARGEST_GATED

    def _shut(self) -> None:
        self.share = self._gate.share_before
        self._gate.shut(failed=True)
        self._pause = _PAUSE_TICKS

    def _step_of(self, used: float) -> float:
        """Slowly near the goal, where most of what is seen is chance, and fast where much is free or far too much is used."""
        far = _RAMP_RATE * max(0.0, 1 - used - _ROOM) - _FAST_RATE * max(0.0, used - 1 - _LITTLE)
        return (_RATE * (1 - used) + far) / self._cost

    def _cut(self, used: float) -> None:
        if self._gate.is_open:
            self._shut()
            if self._mean_used <= _FAR_BREACH:
                return
        self._ceiling = min(self._ceiling, self.share) if self.share > 0 else self._ceiling
        share = min(self.share * (1 - _CUT_GAIN * (used - 1) - 0.02), self.share - (used - 1) / self._cost)
        share = max(share, self.share * _STEEPEST_CUT)
        self.share = share if share >= _LEAST_SHARE else 0.0
        self._pause = _PAUSE_TICKS

    def _grow(self, step: float) -> None:
        step = min(step, _LARGEST_STEP)
        careful = self._ceiling * _NEAR
        if self.share >= careful:
            step = min(step, _CAREFUL_STEP)
        elif self.share + step > careful:
            step = careful - self.share
        self.share = min(_LARGEST_GATED, max(self.share + step, _LEAST_SHARE))
