"""How much of the GPU a model's promises leave to its neighbours: a feedback controller, one per model. No clock, no I/O.

Each tick takes the times that were measured since the last one (per token, to the first token, per request), estimates the
promised percentile of each, and moves the share that lower-priority tenants may use while the model works. It goes down at
once and far when a promise is about to break, and up slowly towards the share at which that last happened, so that it
settles instead of swinging. A model is steered by its own promises alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from aimgpu.qos.slo.objectives import Target

TICK_SECONDS = 0.25
_GOAL = 0.97  # of a promise: the rest is for what the estimate does not know
_MISSES = 0.5  # of those that the promise allows: that many are aimed at
_FULL = 1.0  # from here on it is about to break
_GAIN = 0.4  # of the room that is left, per tick
_LARGEST_STEP = 0.06
_TRIM = 0.5  # of what is used beyond the goal, per tick
_CAREFUL_STEP = 0.003  # beyond the share at which a promise was last about to break
_NEAR = 0.9  # of that share: from here on careful
_STEEPEST_CUT = 0.3
_CUT_GAIN = 3.0
_LEAST_SHARE = 0.01  # less than this is none
_PAUSE_TICKS = 4  # after a cut, until the effect has been seen
_CEILING_GROWTH = 1.003  # per tick: the neighbour's work changes, so a ceiling is forgotten within minutes
_EXHAUSTED_TICKS = 8  # measured ones in a row
_MEAN_WEIGHT = 0.4  # of the newest sample
_SPREAD_WEIGHT = 0.08


@dataclass(slots=True)
class _Series:
    """Mean and spread of one measure. The spread is of neighbouring samples, so that a moving mean does not widen it."""

    mean: float | None = None
    last: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        if self.mean is None:
            self.mean = self.last = value
            return
        difference = min(abs(value - self.last), self.mean, value)  # neither a stall nor its end is the usual spread
        self.squares += _SPREAD_WEIGHT * (difference * difference / 2 - self.squares)
        self.mean += _MEAN_WEIGHT * (value - self.mean)
        self.last = value

    def percentile(self, part: float) -> float | None:
        """As of a normal distribution; the lower half of one is not below its mean here. Fewer misses than `part` allows."""
        if self.mean is None:
            return None
        above = NormalDist().inv_cdf(min(1 - (1 - max(part, 0.5)) * _MISSES, 0.999))
        return self.mean + above * math.sqrt(self.squares)


@dataclass(slots=True)
class PromiseController:
    """`share`: the part of the device's time that lower-priority tenants may use while the model works, from 0 to 1."""

    targets: tuple[Target, ...]
    share: float = 0.0
    used: float | None = None  # of the promise that is nearest to breaking, 1 is all of it; None: nothing measured yet
    nearest: str | None = None  # that promise
    _series: dict[str, _Series] = field(default_factory=dict)
    _ceiling: float = math.inf
    _pause: int = 0
    _broken_shut: int = 0

    @property
    def is_exhausted(self) -> bool:
        """Nothing is left to take away, and a promise still breaks."""
        return self._broken_shut >= _EXHAUSTED_TICKS

    def step(self, samples: Mapping[str, Sequence[float]]) -> float:
        """One tick. `samples`: seconds by measure ("tpot", "ttft", "latency"); without any the share stays as it is."""
        fresh = False
        for measure, values in samples.items():
            for value in values:
                self._series.setdefault(measure, _Series()).add(value)
                fresh = True
        if not fresh:
            return self.share
        self._estimate()
        if self.used is not None:
            self._broken_shut = self._broken_shut + 1 if self.share == 0 and self.used > _FULL else 0
            self._move(self.used)
        return self.share

    def _estimate(self) -> None:
        found = [
            (value / target.seconds, target.name)
            for target in self.targets
            if target.seconds and target.measure in self._series
            if (value := self._series[target.measure].percentile(target.part)) is not None
        ]
        self.used, self.nearest = max(found, default=(None, None))

    def _move(self, used: float) -> None:
        self._pause = max(0, self._pause - 1)
        self._ceiling *= _CEILING_GROWTH
        if used > _FULL:
            if self._pause < _PAUSE_TICKS - 1 or used > 1.1:  # noqa: PLR2004 - far off: no time to wait for the last cut
                self._cut(used)
        elif used < _GOAL and self._pause == 0:
            self._grow(_GOAL - used)
        elif used > _GOAL:
            self.share *= 1 - _TRIM * (used - _GOAL)

    def _cut(self, used: float) -> None:
        self._ceiling = min(self._ceiling, self.share) if self.share > 0 else self._ceiling
        share = self.share * max(_STEEPEST_CUT, 1 - _CUT_GAIN * (used - _FULL) - 0.02)
        self.share = share if share >= _LEAST_SHARE else 0.0
        self._pause = _PAUSE_TICKS

    def _grow(self, room: float) -> None:
        step = min(_GAIN * room, _LARGEST_STEP)
        careful = self._ceiling * _NEAR
        if self.share >= careful:
            step = min(step, _CAREFUL_STEP)
        elif self.share + step > careful:
            step = careful - self.share
        self.share = min(1.0, self.share + step)
