"""Polling until something holds."""

import time
from collections.abc import Callable

TIMEOUT_SECONDS = 300.0  # for a machine that does much else; nothing that works comes near it
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
