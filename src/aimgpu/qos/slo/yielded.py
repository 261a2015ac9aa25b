"""What the share that a model yields is worth: the device time that its neighbours used while it worked. No clock, no I/O."""

import math
from dataclasses import dataclass, field

_MEMORY_SECONDS = 10.0  # of work of the model: older readings fade in the ratio
_LONGEST_STEP_SECONDS = 1.0  # between two readings; more was not watched, and is left out
_LEAST_SECONDS = 1.0  # of watched work, before a ratio is shown


@dataclass(slots=True)
class YieldedTime:
    """From readings of the neighbours' device time, one per tick of the control loop.

    Counted is what passed between two readings while the model worked and the gate let a part through. An open gate measures
    no launches, so nothing is counted then.
    """

    seconds: float = 0.0  # device time of the neighbours, of all that was watched
    watched_seconds: float = 0.0
    _recent: float = 0.0
    _recent_watched: float = 0.0
    _last: dict[str, tuple[float, float]] = field(default_factory=dict)  # by instance: the reading, and when

    @property
    def ratio(self) -> float | None:
        """Device time of the neighbours per second of the model's work, lately; None: too little was watched."""
        return self._recent / self._recent_watched if self._recent_watched >= _LEAST_SECONDS else None

    def note(self, instance_id: str, reading: float | None, now: float, *, counts: bool) -> None:
        """`reading`: the neighbours' device time so far; None: not measured. `counts`: the model worked since the last one."""
        before = self._last.pop(instance_id, None)
        if reading is None:
            return
        self._last[instance_id] = (reading, now)
        if before is None or not counts:
            return
        used, passed = reading - before[0], now - before[1]
        if used < 0 or not 0 < passed <= _LONGEST_STEP_SECONDS:
            return  # a neighbour left and took its count along, or the loop was held up
        self.seconds += used
        self.watched_seconds += passed
        kept = math.exp(-passed / _MEMORY_SECONDS)
        self._recent = self._recent * kept + used
        self._recent_watched = self._recent_watched * kept + passed

    def forget(self, running: frozenset[str]) -> None:
        """Readings of instances that no longer run."""
        self._last = {name: reading for name, reading in self._last.items() if name in running}
