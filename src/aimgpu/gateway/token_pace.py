"""How fast tokens come right now, per model: the feedback by which the launch gate shares the GPU.

The SLO windows judge requests when they are over; a request may take minutes, and a promise that breaks must be seen within a
second or two, so streams are looked at while they run, a few tokens at a time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from aimgpu.domain import Priority
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.routes import ServedModel
from aimgpu.gateway.slo_monitor import to_sample

Samples = dict[str, dict[str, list[float]]]  # model -> measure -> seconds
_ENOUGH_TOKENS = 20  # for one sample; fewer where these take too long
_LONG_SECONDS = 0.25
_STALL = 2.0  # times as long as its tokens took before: a stream that waits for one stalls


class Stream(Protocol):
    """An answer that streams, as far as its tokens go."""

    model: ServedModel
    priority: Priority
    tokens_so_far: int
    last_event: float | None


@dataclass(slots=True)
class _Mark:
    """Where a stream was at its last sample."""

    tokens: int
    at: float
    pace: float = 0.0  # seconds per token since the sample before


class TokenPace:
    """An Observer. Counts only requests of the model's own priority: those are what it was promised for."""

    def __init__(self, streams: Callable[[], Iterable[Stream]]) -> None:
        self._streams = streams
        self._marks: WeakKeyDictionary[Stream, _Mark] = WeakKeyDictionary()
        self._samples: Samples = {}
        self._priorities: dict[str, Priority] = {}

    def finished(self, record: RequestRecord) -> None:
        """One stream is over. Its tokens count here only if they were too few to be seen while it ran."""
        if self._priorities.get(record.model) is not record.priority:
            return  # not asked for
        sample = to_sample(record)
        if sample is None or sample.failed:
            return
        tpot = sample.tpot_seconds if sample.output_tokens <= _ENOUGH_TOKENS else None
        for measure, seconds in (("ttft", sample.ttft_seconds), ("tpot", tpot), ("latency", sample.latency_seconds)):
            if seconds is not None:
                self._add(record.model, measure, seconds)

    def look(self, now: float) -> None:
        """Several times per `take`: what the streams of the models that were last asked for have done since."""
        times: dict[str, tuple[float, int]] = {}
        for stream in self._streams():
            name = stream.model.name
            if self._priorities.get(name) is stream.priority and (advance := self._advance(stream, now)) is not None:
                seconds, tokens = times.get(name, (0.0, 0))
                times[name] = (seconds + advance[0], tokens + advance[1])
        for name, (seconds, tokens) in times.items():
            self._add(name, "tpot", seconds / tokens)

    def take(self, priorities: Mapping[str, Priority], now: float) -> Samples:
        """What was measured since the last call, of the models that are asked for."""
        self._priorities = dict(priorities)
        self.look(now)
        samples, self._samples = self._samples, {}
        return {name: found for name, found in samples.items() if name in priorities}

    def _add(self, model: str, measure: str, seconds: float) -> None:
        self._samples.setdefault(model, {}).setdefault(measure, []).append(seconds)

    def _advance(self, stream: Stream, now: float) -> tuple[float, int] | None:
        """Seconds and tokens since its last sample, once there are enough; a stream that stalls counts as one slow token."""
        tokens, at, mark = stream.tokens_so_far, stream.last_event, self._marks.get(stream)
        if at is None:
            return None
        if mark is None:
            self._marks[stream] = _Mark(tokens, at)
            return None
        if tokens == mark.tokens:
            return (now - at, 1) if now - at >= max(_LONG_SECONDS, _STALL * mark.pace) else None
        if tokens - mark.tokens < _ENOUGH_TOKENS and now - mark.at < _LONG_SECONDS:
            return None
        advance = (at - mark.at, tokens - mark.tokens)
        self._marks[stream] = _Mark(tokens, at, advance[0] / advance[1])
        return advance
