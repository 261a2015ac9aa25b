"""When a deployment that failed or found no room is tried again: growing pauses with jitter, up to a bound. Pure."""

from dataclasses import replace

from aimgpu.control.dependencies import Timing
from aimgpu.ledger import Retry

_FORGOTTEN_AFTER_MS = 600_000  # a failure that long after the last one counts as the first


def after_failure(known: Retry | None, failed: Retry, timing: Timing, jitter: float) -> Retry:
    """`failed` has the reason and the time; `jitter` is between 0 and 1. Beyond the bound nothing is tried any more."""
    now_ms = failed.last_failure_ms
    recent = known is not None and now_ms - known.last_failure_ms <= _FORGOTTEN_AFTER_MS
    failures = known.failures + 1 if recent and known is not None else 1
    if failures > timing.restart_limit:
        return replace(failed, failures=failures, retry_at_ms=None, exhausted=True)
    pause = min(timing.restart_delay_seconds * 2 ** (failures - 1), timing.restart_longest_seconds)
    pause *= 1 + timing.restart_jitter * (2 * jitter - 1)
    return replace(failed, failures=failures, retry_at_ms=now_ms + round(pause * 1000))


def after_refusal(known: Retry | None, refused: Retry, pause_seconds: float) -> Retry:
    """No room is no failure: it is tried again for as long as it is wanted."""
    failures = known.failures if known is not None else 0
    last_ms = known.last_failure_ms if known is not None else 0
    retry_at_ms = refused.last_failure_ms + round(pause_seconds * 1000)
    return replace(refused, failures=failures, last_failure_ms=last_ms, retry_at_ms=retry_at_ms)


def is_due(retry: Retry, now_ms: int, timing: Timing) -> bool:
    """Also where the clock was set back so that its time seems further away than any pause is."""
    if retry.retry_at_ms is None:
        return False
    longest = max(timing.restart_longest_seconds, timing.error_retry_seconds) * 2000
    return now_ms >= retry.retry_at_ms or retry.retry_at_ms - now_ms > longest


def is_stale(retry: Retry, now_ms: int) -> bool:
    """Whether it only counts failures that are long past."""
    return retry.retry_at_ms is None and not retry.exhausted and now_ms - retry.last_failure_ms > _FORGOTTEN_AFTER_MS


def describe_retry(retry: Retry, now_ms: int) -> str:
    """For people: "failed 3 times, next try in 40 s: REASON"."""
    times = f"failed {retry.failures} time{'' if retry.failures == 1 else 's'}" if retry.failures else "waits for room"
    if retry.exhausted:
        return f"{times} and is not tried again until it is applied again: {retry.reason}"
    if retry.retry_at_ms is None:
        return f"{times}: {retry.reason}"
    return f"{times}, next try in {max(0, round((retry.retry_at_ms - now_ms) / 1000))} s: {retry.reason}"
