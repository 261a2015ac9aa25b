"""Restarting what died in use: with a growing delay, and not for ever. Pure; time is passed in."""

from dataclasses import dataclass, replace

from aimgpu.control.dependencies import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A deployment that lost an instance: how often in a row, and when it may be tried again."""

    failures: int = 0
    last_failure: float = 0.0
    retry_at: float | None = None  # None: not waiting

    @property
    def waiting(self) -> bool:
        return self.retry_at is not None


_FORGOTTEN_AFTER_SECONDS = 600.0


def note_failure(trouble: FailureRecord, now: float, timing: Timing) -> FailureRecord:
    """A failure long after the last one counts as the first; beyond the limit nothing is tried any more."""
    failures = 1 if now - trouble.last_failure > _FORGOTTEN_AFTER_SECONDS else trouble.failures + 1
    if failures > timing.restart_limit:
        return FailureRecord(failures=failures, last_failure=now)
    delay = timing.restart_delay_seconds * 2 ** (failures - 1)
    return FailureRecord(failures=failures, last_failure=now, retry_at=now + delay)


def is_due(trouble: FailureRecord, now: float) -> bool:
    return trouble.retry_at is not None and now >= trouble.retry_at


def note_retry(trouble: FailureRecord) -> FailureRecord:
    return replace(trouble, retry_at=None)
