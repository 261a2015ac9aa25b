"""Whether a promised rate of output tokens is kept: judged by slices of time, and only while there are requests.

A slice's rate is the tokens made in it by the time in it during which a request waited or was served. Tokens of an answer
count evenly from its first byte to its end, so a slice is judged once everything that was there has ended, at the latest a
minute after. A slice with less than a second of demand is judged together with the next, unless a request failed in it.
"""

from dataclasses import dataclass, field

from aimgpu.qos.slo.objectives import Target
from aimgpu.qos.slo.tracker import SLICE_SECONDS, ObjectiveTracker

_PATIENCE_SECONDS = 60.0
_LEAST_DEMAND_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Flow:
    """A request that is there."""

    meter: "ThroughputMeter"
    arrived: float
    counted: int = 0  # of its tokens
    counted_until: float = 0.0


@dataclass(slots=True)
class _Piece:
    """What a slice holds that is not judged yet."""

    demand_seconds: float = 0.0
    tokens: float = 0.0
    failures: int = 0


@dataclass(slots=True, eq=False)
class ThroughputMeter:
    """Judges a promised rate of tokens for one class, or for all that share it."""

    target: Target
    tracker: ObjectiveTracker = field(init=False)
    _open: dict[Flow, None] = field(default_factory=dict)  # the oldest first
    _pieces: dict[int, _Piece] = field(default_factory=dict)  # by the slice's number
    _judged_until: int = 0  # slices before this one are judged
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self.tracker = ObjectiveTracker((self.target,))

    def begin(self, now: float) -> Flow:
        """A request is there; pass the Flow to `count` and `end`."""
        self._pass_time(now)
        flow = Flow(self, now)
        self._open[flow] = None
        return flow

    def count(self, flow: Flow, tokens: int, since: float, now: float) -> None:
        """Tokens that were made by now, the first of them at `since`."""
        new, start = tokens - flow.counted, max(since, flow.counted_until)
        if new > 0:
            self._spread(new, start, now)
            flow.counted = tokens
        flow.counted_until = now

    def end(self, flow: Flow, now: float, *, failed: bool = False) -> None:
        """Exactly once for every Flow."""
        self._pass_time(now)
        self._open.pop(flow, None)
        if failed:
            self._piece(int(now / SLICE_SECONDS)).failures += 1
        self.settle(now)

    def settle(self, now: float) -> None:
        """Judge the slices of which nothing more is to come."""
        self._pass_time(now)
        oldest = next(iter(self._open)).arrived if self._open else now
        settled = max(oldest, now - _PATIENCE_SECONDS)
        carried = _Piece()
        for number in sorted(self._pieces):
            if (number + 1) * SLICE_SECONDS > settled:
                break
            piece = self._pieces.pop(number)
            self._judged_until = number + 1
            piece.demand_seconds += carried.demand_seconds
            piece.tokens += carried.tokens
            carried = _Piece()
            if piece.failures or piece.demand_seconds >= _LEAST_DEMAND_SECONDS:
                wanted = (self.target.tokens_per_second or 0.0) * piece.demand_seconds
                self.tracker.note(self.target.name, now, kept=piece.tokens >= wanted and piece.tokens > 0)
            else:
                carried = piece
        if carried.demand_seconds:
            running = self._piece(int(now / SLICE_SECONDS))
            running.demand_seconds += carried.demand_seconds
            running.tokens += carried.tokens

    def _pass_time(self, now: float) -> None:
        if self._open:
            start = self._looked
            while start < now:
                number = int(start / SLICE_SECONDS)
                end = min(now, (number + 1) * SLICE_SECONDS)
                self._piece(number).demand_seconds += end - start
                start = end
        self._looked = now

    def _spread(self, tokens: float, start: float, end: float) -> None:
        """Evenly over the time; what falls into slices that are judged already is lost."""
        if end <= start:
            self._piece(int(end / SLICE_SECONDS)).tokens += tokens
            return
        for number in range(max(int(start / SLICE_SECONDS), self._judged_until), int(end / SLICE_SECONDS) + 1):
            inside = min(end, (number + 1) * SLICE_SECONDS) - max(start, number * SLICE_SECONDS)
            if inside > 0:
                self._piece(number).tokens += tokens * inside / (end - start)

    def _piece(self, number: int) -> _Piece:
        piece = self._pieces.get(number)
        if piece is None:
            piece = self._pieces[number] = _Piece()
        return piece
