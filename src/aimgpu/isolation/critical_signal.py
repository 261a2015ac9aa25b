"""How the gateway tells the gate that a request of a critical model runs, so that others pause at once and resume at once."""

import threading
import time
from pathlib import Path
from types import TracebackType

from aimgpu.isolation.region import Region


class CriticalSignal:
    """Counts the requests in flight of one tenant. `begin` before the request goes to the engine, `end` after its last byte.

    Costs about a microsecond; never blocks. A process that dies with requests in flight is forgotten after the gate's
    `hang_ns` without work of the tenant, or when the region is reaped.
    """

    def __init__(self, region: Region, tenant: str) -> None:
        self._region = region
        self._cell = region.writer_cell(tenant)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, tenant: str) -> "CriticalSignal":
        return cls(Region.open(path), tenant)

    def begin(self) -> None:
        if not self._region.is_whole:
            return
        with self._lock:
            self._cell.begun_ns = time.monotonic_ns()
            self._cell.running += 1

    def end(self) -> None:
        if not self._region.is_whole:
            return
        with self._lock:
            running = self._cell.running
            self._cell.running = max(0, running - 1)
            if running > 1:
                return
            self._cell.ended_ns = time.monotonic_ns()
        self._region.wake()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
