"""An open gate on trial: what is really late beside it decides whether it stays open. No clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from aimgpu.qos.slo.objectives import Target

_FEWEST_SAMPLES = 30  # before they say anything
_REMEMBERED = 400  # samples; older ones count half
_CHANCE = 3.0  # late ones beyond what is allowed that say nothing yet
_SOONEST_TRIAL, _LATEST_TRIAL = 240, 2400  # ticks from one that failed to the next


@dataclass(slots=True)
class _Count:
    samples: float = 0.0
    late: float = 0.0

    def add(self, values: Sequence[float], bound: float) -> None:
        self.samples += len(values)
        self.late += sum(value > bound for value in values)
        if self.samples > _REMEMBERED:
            self.samples, self.late = self.samples / 2, self.late / 2


@dataclass(slots=True)
class OpenGate:
    """Whether it is open, what was late meanwhile, and when it may be tried again after it had to be shut."""

    is_open: bool = False
    share_before: float = 0.0
    _rest: int = 0  # ticks until the next trial
    _wait: int = _SOONEST_TRIAL
    _counts: dict[str, _Count] = field(default_factory=dict)  # by promise

    @property
    def may_open(self) -> bool:
        return self._rest == 0

    def tick(self) -> None:
        self._rest = max(0, self._rest - 1)

    def open(self, share: float) -> None:
        self.is_open, self.share_before, self._counts = True, share, {}

    def shut(self, *, failed: bool) -> None:
        """`failed`: the next trial comes later, and after it later still."""
        self.is_open = False
        if failed:
            self._rest, self._wait = self._wait, min(2 * self._wait, _LATEST_TRIAL)

    def add(self, target: Target, values: Sequence[float]) -> None:
        if self.is_open and target.seconds:
            self._counts.setdefault(target.name, _Count()).add(values, target.seconds)

    def breaks(self, targets: Sequence[Target]) -> bool:
        """More was late than one of the promises allows, and more than chance."""
        for target in targets:
            found = self._counts.get(target.name)
            if found and found.samples >= _FEWEST_SAMPLES and found.late > target.allowed * found.samples + _CHANCE:
                return True
        return False
