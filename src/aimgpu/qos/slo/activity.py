"""Requests as they end, and who was served when: bounded, in memory, and without prompts unless they are switched on."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aimgpu.errors import InvalidInput

MOST_REQUESTS = 2000
MOST_PROMPTS = 200
MOST_TURNS = 4000


class FinishedRequest(Protocol):
    """What the gateway records about a request once it is over."""

    model: str
    instance_id: str | None
    caller: str
    priority: Any
    status: int
    code: str | None
    streamed: bool
    queued_seconds: float
    first_byte_seconds: float | None
    seconds: float
    output_tokens: int | None
    recalls: int
    prompt: str | None  # an excerpt, only where prompts are kept


class Signal(Protocol):
    """Where the requests of one instance are counted."""

    def begin(self) -> None: ...

    def end(self) -> None:
        """It is over."""


FindSignals = Callable[[Iterable[str]], Mapping[str, Sequence[Signal]]]  # by instance


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """One finished request, numbered in the order in which they ended."""

    number: int
    ended: float  # seconds since the epoch
    record: FinishedRequest

    @property
    def arrived(self) -> float:
        """Seconds since the epoch."""
        return self.ended - self.record.seconds

    @property
    def sent(self) -> float | None:
        """When an engine got it; None: none did."""
        return None if self.record.instance_id is None else self.arrived + self.record.queued_seconds

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        record = self.record
        return {
            "number": self.number,
            "ended": self.ended,
            "model": record.model,
            "instance": record.instance_id,
            "caller": record.caller,
            "priority": str(record.priority),
            "status": record.status,
            "code": record.code,
            "streamed": record.streamed,
            "queued_seconds": record.queued_seconds,
            "first_byte_seconds": record.first_byte_seconds,
            "seconds": record.seconds,
            "tokens": record.output_tokens,
            "recalls": record.recalls,
        }


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of time in which an instance served at least one request."""

    instance_id: str
    began: float
    ended: float


class ActivityLog:
    """An Observer of the gateway, and a signal for each of its instances. Written on the event loop, read from any thread."""

    def __init__(self, now: Callable[[], float], *, prompts: int = 0) -> None:
        """`now`: seconds since the epoch. `prompts`: of how many requests, the last ones, the prompt is kept."""
        self._now = now
        self._prompts: deque[tuple[int, str]] = deque(maxlen=prompts)
        self._signals: dict[str, _TurnSignal] = {}
        self._requests: deque[RequestEntry] = deque(maxlen=MOST_REQUESTS)
        self._turns: deque[Turn] = deque(maxlen=MOST_TURNS)
        self._numbers = itertools.count(1)

    def finished(self, record: FinishedRequest) -> None:
        """Called once per request."""
        self.add(record, self._now())

    def add(self, record: FinishedRequest, ended: float) -> None:
        """A request that ended then, in seconds since the epoch."""
        number = next(self._numbers)
        if record.prompt is not None:
            self._prompts.append((number, record.prompt))
            record.prompt = None  # the list of prompts is shorter than that of requests
        self._requests.append(RequestEntry(number, ended, record))

    @property
    def prompts_kept(self) -> int:
        """Of how many requests at most; 0: of none."""
        return self._prompts.maxlen or 0

    def prompt(self, number: int) -> str | None:
        """What this request asked, if it is still kept."""
        return next((text for known, text in _copy(self._prompts) if known == number), None)

    def add_signals(self, find: FindSignals) -> FindSignals:
        """What `find` finds, and for each instance one more that notes its turns here."""

        def find_more(instance_ids: Iterable[str]) -> Mapping[str, Sequence[Signal]]:
            ids = list(instance_ids)
            found = find(ids)
            self._signals = {one: self._signals.get(one) or _TurnSignal(one, self._turns, self._now) for one in ids}
            return {one: (*found.get(one, ()), self._signals[one]) for one in ids}

        return find_more

    def requests(self, after: int = 0) -> tuple[RequestEntry, ...]:
        """Those with a higher number, oldest first."""
        found = []
        for entry in reversed(_copy(self._requests)):
            if entry.number <= after:
                break
            found.append(entry)
        return tuple(reversed(found))

    def last_used(self) -> dict[str, float]:
        """Model -> when its last request ended."""
        return {entry.record.model: entry.ended for entry in _copy(self._requests)}

    def turns(self, since: float) -> Iterator[Turn]:
        """Oldest first; those under way end now."""
        now = self._now()
        yield from (turn for turn in _copy(self._turns) if turn.ended >= since)
        for signal in tuple(self._signals.values()):
            if signal.count:
                yield Turn(signal.instance_id, signal.since, now)

    def waits(self, since: float) -> Iterator[RequestEntry]:
        """Requests that waited noticeably before an engine got them, or were never sent."""
        return (entry for entry in _copy(self._requests) if entry.ended >= since and entry.record.queued_seconds > _NOTICEABLE)


class _TurnSignal:
    """Counts the requests that an instance serves; a turn lasts while there is one."""

    def __init__(self, instance_id: str, turns: "deque[Turn]", now: Callable[[], float]) -> None:
        self.instance_id = instance_id
        self.count = 0
        self.since = 0.0
        self._turns = turns
        self._now = now

    def begin(self) -> None:
        if not self.count:
            self.since = self._now()
        self.count += 1

    def end(self) -> None:
        self.count -= 1
        if not self.count:
            self._turns.append(Turn(self.instance_id, self.since, self._now()))


_NOTICEABLE = 0.005


def parse_kept_prompts(text: str) -> int:
    """The number of requests whose prompts are kept; raises InvalidInput."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(MOST_PROMPTS)) or int(text) > MOST_PROMPTS:
        raise InvalidInput(
            f"AIMGPU_KEEP_PROMPTS={text[:20]!r} is not a number of requests from 0 to {MOST_PROMPTS}",
            hint="0 keeps no prompt; 50 keeps those of the last 50 requests in memory.",
        )
    return int(text)


def _copy(items: "deque[Any]") -> tuple[Any, ...]:
    """A deque that grows while it is copied raises; the writer is quick, so another try succeeds."""
    while True:
        try:
            return tuple(items)
        except RuntimeError:
            continue
