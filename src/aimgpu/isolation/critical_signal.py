"""How the gateway signals to the gate that a request of a critical model runs, so that others pause and resume at once."""

import threading
import time
from pathlib import Path
from types import TracebackType

from aimgpu.isolation import layout
from aimgpu.isolation.region import Region

_MOST_COUNT = 4096


class CriticalSignal:
    """Counts the requests in flight of one tenant. `begin` before the request goes to the engine, `end` after its last byte.

    Costs a few microseconds; never blocks. It also records how long the pauses between requests and the requests themselves
    are, from which the gate decides whether a long launch of another tenant fits. A sender that dies with requests in flight is
    ignored after the gate's `hang_ns` without work of the tenant, or when the region is reaped.
    """

    def __init__(self, region: Region, tenant: str) -> None:
        self._region = region
        self._cell = region.writer_cell(tenant)
        self._tenant = region.tenant_of(tenant)
        self._lock = threading.Lock()
        self._busy_since_ns = 0

    @classmethod
    def open(cls, path: Path, tenant: str) -> "CriticalSignal":
        """For a process that has only the region's path."""
        return cls(Region.open(path), tenant)

    def begin(self) -> None:
        """A request is about to go to the engine."""
        if not self._region.is_whole:
            return
        with self._lock:
            now = time.monotonic_ns()
            cells = self._tenant.writers
            if not any(cell.running for cell in cells):
                self._note_pause(now - max(cell.ended_ns for cell in cells), first=not any(cell.begun_ns for cell in cells))
                self._cell.begun = (self._cell.begun + 1) % (1 << 32)
                self._busy_since_ns = now
            self._cell.begun_ns = now
            self._cell.running += 1

    def end(self) -> None:
        """A request has ended, in whatever way."""
        if not self._region.is_whole:
            return
        with self._lock:
            running = self._cell.running
            self._cell.running = max(0, running - 1)
            if running > 1:
                return
            now = time.monotonic_ns()
            self._cell.ended_ns = now
            if running and self._busy_since_ns:
                former, taken = self._cell.request_ns, now - self._busy_since_ns
                self._cell.request_ns = (7 * former + taken) // 8 if former else taken
        self._region.wake()

    def _note_pause(self, pause_ns: int, *, first: bool) -> None:
        if first or pause_ns < 0:
            return
        pauses = self._tenant.pauses
        bucket = layout.pause_bucket(pause_ns)
        pauses[bucket] += 1
        if pauses[bucket] > _MOST_COUNT:  # older pauses count less
            for at in range(layout.PAUSES):
                pauses[at] //= 2

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
