"""Times of the last minutes, kept one by one, so that a percentile is a time that a request really took."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of one kind (time to first token, per output token, or whole requests), in seconds."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[float, float]


class RecentTimes:
    """The newest times of a window; when there are more than `most`, the oldest go first."""

    def __init__(self, window_seconds: float = 300.0, most: int = 100_000) -> None:
        self._window_seconds = window_seconds
        self._times: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, now: float, seconds: float) -> None:
        """A request that ended now."""
        self._times.append((now, seconds))

    def read(self, now: float) -> Times | None:
        """None where nothing ended within the window."""
        while self._times and self._times[0][0] <= now - self._window_seconds:
            self._times.popleft()
        times = sorted(seconds for _, seconds in self._times)
        if not times:
            return None
        return Times(
            count=len(times),
            mean=sum(times) / len(times),
            minimum=times[0],
            maximum=times[-1],
            percentiles={part: _percentile(times, part) for part in PERCENTILES},
        )


def _percentile(times: Sequence[float], part: float) -> float:
    """The time that at least `1 - part` of the requests took or exceeded: of 200, 2 at 50 s are a p99 of 50 s."""
    return times[min(int(len(times) * part + 1e-9), len(times) - 1)]
