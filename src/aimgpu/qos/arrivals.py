"""When a model's next request is expected, learned from its arrivals. Pure: time is passed in, in seconds since the epoch.

1. Gaps between arrivals are counted in bins, each half as wide again as the one before. Old counts fade, so that a change of
   habit shows within some two hundred arrivals.
2. The expected wait is a mean of what is left of the gaps longer than the present pause. It is harmonic above
   `_SOON_SECONDS`: one long pause among thirty short gaps does not make a burst look slow. After the usual gaps have passed it
   jumps to the pauses between bursts.
3. One gap more is always assumed: as long again as the present pause. It speaks where nothing was learned, and bounds what is
   known of a pause longer than all before.
4. Arrivals are counted by the quarter of an hour of the day too, once a whole day was seen. Where the same quarters of earlier
   days say that a request is due sooner, this is taken.
"""

from bisect import bisect_right
from itertools import accumulate, pairwise, repeat

_GROWTH = 1.5
_SHORTEST_SECONDS = 0.05
_BINS = 44  # up to a month
_EDGES = tuple(accumulate(repeat(_GROWTH, _BINS - 1), lambda edge, growth: edge * growth, initial=_SHORTEST_SECONDS))
_MIDDLES = (_SHORTEST_SECONDS / 2, *((low + high) / 2 for low, high in pairwise(_EDGES)), _EDGES[-1])
_FADE = 0.995  # per arrival
_LARGEST_UNIT = 1e100
UNKNOWN_GAP_SECONDS = 600.0
_SOON_SECONDS = 30.0
_SLOT_SECONDS = 900
_DAY_SECONDS = 86_400
_SLOTS = _DAY_SECONDS // _SLOT_SECONDS
_DAY_FADE = 0.6  # per day: the last three days weigh nearly all
_LOOK_AHEAD_SLOTS = 8


class ArrivalHistory:
    """The arrivals of one model."""

    def __init__(self) -> None:
        self.last: float | None = None
        self._first: float | None = None
        self._gaps = [0.0] * (_BINS + 1)  # in units of `_unit`, which grows in place of all fading
        self._unit = 1.0
        self._slots = [0.0] * _SLOTS  # requests per quarter of an hour, the mean of earlier days
        self._today: dict[int, float] = {}
        self._day = 0

    def note(self, now: float) -> None:
        """A request came."""
        if self._first is None or now >= (self._day + 1) * _DAY_SECONDS:
            self._turn_day(now)
        slot = int(now // _SLOT_SECONDS) % _SLOTS
        self._today[slot] = self._today.get(slot, 0.0) + 1
        if self.last is None:
            self._first = now
        else:
            self._unit /= _FADE
            self._gaps[bisect_right(_EDGES, now - self.last)] += self._unit
            if self._unit > _LARGEST_UNIT:
                self._gaps = [count / self._unit for count in self._gaps]
                self._unit = 1.0
        self.last = now

    def expected_seconds(self, now: float) -> float:
        """From now until the next request."""
        self._turn_day(now)
        by_gap = self._by_gap(now)
        by_day = self._by_day(now)
        return by_gap if by_day is None else min(by_gap, by_day)

    def _by_gap(self, now: float) -> float:
        if self.last is None:
            return UNKNOWN_GAP_SECONDS
        pause = max(now - self.last, 0.0)
        weight = 1.0
        total = _soonness(max(pause, _SHORTEST_SECONDS) if self._seen else UNKNOWN_GAP_SECONDS)
        for index in range(bisect_right(_EDGES, pause), _BINS + 1):
            count = self._gaps[index] / self._unit
            if count:
                weight += count
                total += count * _soonness(max(_MIDDLES[index] - pause, _SHORTEST_SECONDS))
        return _SOON_SECONDS * (weight / total - 1.0)

    def _by_day(self, now: float) -> float | None:
        """Until one request is expected by the earlier days; None: no whole day was seen, or none is due for hours."""
        if self._first is None or now - self._first < _DAY_SECONDS:
            return None
        left = _SLOT_SECONDS - now % _SLOT_SECONDS
        expected, passed = 0.0, 0.0
        for step in range(_LOOK_AHEAD_SLOTS):
            per_second = self._slots[(_slot(now) + step) % _SLOTS] / _SLOT_SECONDS
            if expected + per_second * left >= 1.0:
                return passed + (1.0 - expected) / per_second
            expected += per_second * left
            passed, left = passed + left, float(_SLOT_SECONDS)
        return None

    @property
    def _seen(self) -> bool:
        return any(self._gaps)

    def _turn_day(self, now: float) -> None:
        day = int(now // _DAY_SECONDS)
        if self._first is None:
            self._day = day
        for _ in range(min(day - self._day, 30)):
            first = not any(self._slots)
            for slot in range(_SLOTS):
                seen = self._today.get(slot, 0.0)
                self._slots[slot] = seen if first else self._slots[slot] * _DAY_FADE + seen * (1 - _DAY_FADE)
            self._today = {}
        self._day = max(self._day, day)


def _soonness(seconds: float) -> float:
    return 1.0 / (1.0 + seconds / _SOON_SECONDS)


def _slot(now: float) -> int:
    return int(now // _SLOT_SECONDS) % _SLOTS
