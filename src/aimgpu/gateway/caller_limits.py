"""What a caller may: how often, how many at once, how important."""

from dataclasses import dataclass, field

from aimgpu.domain import Priority
from aimgpu.errors import InvalidRequest, RateExceeded
from aimgpu.gateway.auth import Caller
from aimgpu.gateway.http.asgi import Head
from aimgpu.qos.queueing.rate import TokenBucket

_LONGEST_DEADLINE_MS = 24 * 3600 * 1000
_MOST_DIGITS = len(str(_LONGEST_DEADLINE_MS))


@dataclass(slots=True)
class _Use:
    in_flight: int = 0
    bucket: TokenBucket | None = None


@dataclass(slots=True)
class CallerLimits:
    """Counts per caller; callers without limits are not counted."""

    _uses: dict[str, _Use] = field(default_factory=dict)

    def enter(self, caller: Caller, now: float) -> None:
        """Raises RateExceeded; else `leave` must follow."""
        if caller.requests_per_second is None and caller.concurrency is None:
            return
        use = self._uses.get(caller.name)
        if use is None:
            use = self._uses[caller.name] = _Use()
        if caller.concurrency is not None and use.in_flight >= caller.concurrency:
            text = f"This API key may have {caller.concurrency} request{'s' * (caller.concurrency > 1)} at once."
            raise RateExceeded(text, retry_after_seconds=1)
        if caller.requests_per_second is not None:
            if use.bucket is None or use.bucket.per_second != caller.requests_per_second:
                burst = max(1.0, caller.requests_per_second)
                use.bucket = TokenBucket.full(caller.requests_per_second, burst, now)
            wait = use.bucket.take(now)
            if wait:
                text = f"This API key may send {caller.requests_per_second:g} requests a second."
                raise RateExceeded(text, retry_after_seconds=int(wait) + 1)
        use.in_flight += 1

    def leave(self, caller: Caller) -> None:
        """The request that entered is over."""
        use = self._uses.get(caller.name)
        if use is not None:
            use.in_flight -= 1


def choose_priority(caller: Caller, of_model: Priority, head: Head) -> Priority:
    """The key's class, or the model's for callers without one; a header may lower it, and never lifts it above the key's."""
    asked = head.get(b"x-aimgpu-priority")
    base = caller.priority or of_model
    if asked is None:
        return base
    try:
        wanted = Priority(asked.decode("ascii", "replace").strip().lower())
    except ValueError:
        raise InvalidRequest("'x-aimgpu-priority' must be high, medium or low.") from None
    ceiling = caller.priority or Priority.HIGH
    return wanted if wanted.rank <= ceiling.rank else ceiling


def read_deadline(head: Head) -> float | None:
    """Seconds within which the request must have started."""
    text = head.get(b"x-aimgpu-deadline-ms")
    if text is None:
        return None
    text = text.strip()
    if not text.isdigit() or len(text) > _MOST_DIGITS or not 0 < int(text) <= _LONGEST_DEADLINE_MS:
        raise InvalidRequest("'x-aimgpu-deadline-ms' must be a whole number of milliseconds.")
    return int(text) / 1000
