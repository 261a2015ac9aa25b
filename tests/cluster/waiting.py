"""Polling until something holds."""

import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")
# For a machine that does much else; nothing that works comes near it, but for a pod whose event kube-scheduler missed: after
# five minutes it tries such a pod again by itself.
TIMEOUT_SECONDS = 600.0
STEP_SECONDS = 0.1


def wait_until(
    holds: Callable[[], bool],
    what: str,
    check: Callable[[], None] = lambda: None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Return when ``holds`` does. ``check`` raises if waiting on is useless, such as when a component has ended."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {timeout_seconds:.0f} s")
        time.sleep(STEP_SECONDS)


def wait_for(
    read: Callable[[], Seen],
    holds: Callable[[Seen], object],
    what: str,
    check: Callable[[], None] = lambda: None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Seen:
    """What ``read`` returns once ``holds`` is true of it; a key or an item that ``holds`` does not find may still come.

    Everything that follows a change late belongs into one ``holds``: what is read a second time may have changed again.
    """
    seen: list[Seen] = []

    def is_seen() -> bool:
        seen[:] = [read()]
        try:
            return bool(holds(seen[0]))
        except LookupError:
            return False

    try:
        wait_until(is_seen, what, check, timeout_seconds)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; last seen: {seen[0]!r}") from None
    return seen[0]
