"""Work that a test starts beside its own, and waiting for what it brings about."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.control.world import FAST

SLOW = replace(FAST, load_timeout_seconds=1e9, drain_seconds=1e9)
BOUND_SECONDS = 300.0  # only ends a test that waits in vain


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {BOUND_SECONDS:g} s in vain")
        time.sleep(0.01)
