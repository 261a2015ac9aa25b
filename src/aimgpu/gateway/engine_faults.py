"""Engines that answer, and still cannot serve: found by the gateway, replaced by the daemon."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import orjson

from aimgpu.errors import AimGpuError
from aimgpu.gateway.http.upstream import Upstream, UpstreamTarget
from aimgpu.gateway.routes import Backend


class EngineFaults:
    """Instances to be replaced, and why. Written on the event loop, taken from any thread."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._lock = threading.Lock()

    def report(self, instance_id: str, reason: str) -> None:
        """The first reason counts."""
        with self._lock:
            self._found.setdefault(instance_id, reason)

    def take(self) -> dict[str, str]:
        """Faults since the last call: reasons by instance."""
        with self._lock:
            found, self._found = self._found, {}
            return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckLimits:
    """An abandoned request that keeps its engine busy for longer than this has blocked it."""

    look_seconds: float = 2.0
    longest_seconds: float = 60.0


@dataclass(slots=True)
class _Suspect:
    backend: Backend
    model: str
    since: float
    probe: "asyncio.Task[None] | None" = None


class StuckEngines:
    """Watches engines whose callers left without an answer: some go on compiling a grammar for minutes, and serve no one.

    A sign of life clears an engine: a byte of any answer since then. One with nothing else to do is asked for a single token.
    """

    def __init__(
        self,
        upstream: Upstream,
        in_flight: Callable[[str], int],
        report: Callable[[str, str], None],
        limits: StuckLimits | None = None,
    ) -> None:
        self._upstream = upstream
        self._in_flight = in_flight
        self._report = report
        self._limits = limits or StuckLimits()
        self._suspects: dict[str, _Suspect] = {}
        self._timer: asyncio.TimerHandle | None = None

    def abandoned(self, backend: Backend, model: str) -> None:
        """A caller left while this engine worked on its request."""
        if backend.instance_id not in self._suspects:
            self._suspects[backend.instance_id] = _Suspect(backend, model, monotonic())
            self._arm()

    def close(self) -> None:
        """Watch nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for suspect in self._suspects.values():
            if suspect.probe is not None:
                suspect.probe.cancel()
        self._suspects.clear()

    def _look(self) -> None:
        self._timer = None
        now = monotonic()
        for name, suspect in tuple(self._suspects.items()):
            if self._upstream.last_heard(suspect.backend.url) > suspect.since:
                self._clear(name)
            elif now - suspect.since > self._limits.longest_seconds:
                self._clear(name)
                waited = f"{self._limits.longest_seconds:.0f} s after a caller left"
                self._report(name, f"its engine made no progress for {waited}, although it answers")
            elif suspect.probe is None and self._in_flight(name) == 0:
                suspect.probe = asyncio.get_running_loop().create_task(self._probe(suspect))
        if self._suspects:
            self._arm()

    def _clear(self, name: str) -> None:
        suspect = self._suspects.pop(name)
        if suspect.probe is not None:
            suspect.probe.cancel()

    async def _probe(self, suspect: _Suspect) -> None:
        """Any answer is a sign of life, an error too: hearing of it clears the suspect."""
        body = orjson.dumps({"model": suspect.model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1})
        try:
            answer = await self._upstream.send(_target(suspect.backend), body)
            answer.cancel()
        except AimGpuError:
            self._suspects.pop(suspect.backend.instance_id, None)  # it is gone: others notice that

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.look_seconds, self._look)


def _target(backend: Backend) -> UpstreamTarget:
    headers = ((b"content-type", b"application/json"), (b"authorization", b"Bearer " + backend.api_key.encode()))
    return UpstreamTarget.make(backend.url, "/v1/chat/completions", headers)
