"""How fast tokens come right now, per model: the feedback by which the launch gate shares the GPU.

The SLO windows judge requests when they are over; a request may take minutes, and a promise that breaks must be seen within a
second or two, so streams are looked at while they run.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

from aimgpu.domain import Priority
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.routes import ServedModel
from aimgpu.gateway.slo_monitor import to_sample

Samples = dict[str, dict[str, list[float]]]  # model -> measure -> seconds


class Stream(Protocol):
    """An answer that streams, as far as its tokens go."""

    model: ServedModel
    priority: Priority
    tokens_so_far: int
    last_event: float | None


class TokenPace:
    """An Observer. Counts only requests of the model's own priority: those are what it was promised for."""

    def __init__(self, streams: Callable[[], Iterable[Stream]]) -> None:
        self._streams = streams
        self._seen: WeakKeyDictionary[Stream, tuple[int, float]] = WeakKeyDictionary()
        self._finished: Samples = {}
        self._priorities: dict[str, Priority] = {}

    def finished(self, record: RequestRecord) -> None:
        """One stream is over."""
        if self._priorities.get(record.model) is not record.priority:
            return  # not asked for
        sample = to_sample(record)
        if sample is None or sample.failed:
            return
        found = self._finished.setdefault(record.model, {})
        measured = (("ttft", sample.ttft_seconds), ("tpot", sample.tpot_seconds), ("latency", sample.latency_seconds))
        for measure, seconds in measured:
            if seconds is not None:
                found.setdefault(measure, []).append(seconds)

    def take(self, priorities: Mapping[str, Priority], now: float) -> Samples:
        """What was measured since the last call, of the models that are asked for."""
        self._priorities = dict(priorities)
        samples, self._finished = self._finished, {}
        times: dict[str, tuple[float, int]] = {}
        for stream in self._streams():
            name = stream.model.name
            if priorities.get(name) is stream.priority and (advance := self._advance(stream, now)) is not None:
                seconds, tokens = times.get(name, (0.0, 0))
                times[name] = (seconds + advance[0], tokens + advance[1])
        for name, (seconds, tokens) in times.items():
            samples.setdefault(name, {}).setdefault("tpot", []).append(seconds / tokens)
        return samples

    def _advance(self, stream: Stream, now: float) -> tuple[float, int] | None:
        """Seconds and tokens since it was last looked at; a stream that stalls counts as one slow token."""
        tokens, at = stream.tokens_so_far, stream.last_event
        before = self._seen.get(stream)
        if at is None or before is None:
            if at is not None:
                self._seen[stream] = (tokens, at)
            return None
        if tokens == before[0]:
            return (now - at, 1) if now > at else None
        self._seen[stream] = (tokens, at)
        return at - before[1], tokens - before[0]
