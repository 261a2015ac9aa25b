"""The page's state, section by section, pushed to every open tab; a section is sent again only when it changed."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

import orjson

from aimgpu.control.observation import Observation
from aimgpu.domain import Deployment, Footprint
from aimgpu.errors import AimGpuError
from aimgpu.qos.slo.activity import ActivityLog
from aimgpu.web.gpu_rows import describe_gpus
from aimgpu.web.history import SAMPLE_SECONDS, History
from aimgpu.web.journal import EventJournal
from aimgpu.web.model_rows import ModelRows
from aimgpu.web.sources import Json, Scores, Sources

_TICK_SECONDS = 1.0
_HEARTBEAT_SECONDS = 15.0
_MOST_BEHIND = 64  # events that a slow tab may be behind before it is sent everything again
_BACKLOG = 300
_FRESH_SECONDS = 0.25
_SETTLE_SECONDS = 0.3  # between two looks, however fast things change


class PageState:
    """Builds the sections. Footprints are computed once for each deployment: reading a model's files takes a while."""

    def __init__(self, sources: Sources, activity: ActivityLog) -> None:
        self.sources = sources
        self.activity = activity
        self.journal = EventJournal()
        self.history = History()
        self._footprints: dict[str, tuple[Deployment, Footprint | None]] = {}
        self._sampled = time.monotonic()
        self._noting = threading.Lock()

    def read(self, scores: Scores) -> dict[str, Any]:
        """Called in a thread; `scores` were read on the event loop."""
        waiting = self.sources.read_waiting()  # before the look: what has found room since then is seen there
        seen = self.sources.look(max_age_seconds=_FRESH_SECONDS)
        self.journal.compare(seen, waiting, scores.get("pressure", {}))
        footprints = self._size(seen)
        rows = ModelRows(seen, scores=scores, residents=self.sources.read_residents(), waiting=waiting, footprints=footprints)
        return {
            "page": self._page(seen),
            "gpus": describe_gpus(seen, footprints),
            "models": _with_last_used(rows.describe(), self.activity.last_used()),
            "queue": {"queue": scores.get("queue", {}), "pressure": scores.get("pressure", {})},
        }

    def note(self, scores: Scores) -> Observation:
        """Look, and write what changed since the last look into the journal."""
        with self._noting:
            waiting = self.sources.read_waiting()
            seen = self.sources.look(max_age_seconds=_FRESH_SECONDS)
            self.journal.compare(seen, waiting, scores.get("pressure", {}))
            return seen

    def sample(self, scores: Scores) -> Json:
        """One point of the charts."""
        now = time.monotonic()  # the wall clock may be set
        seen = self.note(scores)
        requests = self.activity.requests(self.history.last_number)
        sample = self.history.add(time.time(), seen, scores, requests, now - self._sampled)
        self._sampled = now
        return sample

    def footprint(self, name: str) -> Footprint | None:
        known = self._footprints.get(name)
        return known[1] if known else None

    def _page(self, seen: Observation) -> Json:
        return {
            "version": self.sources.version,
            "url": self.sources.url,
            "node": seen.node,
            "simulated": sorted({device.product for device in seen.devices if device.simulated}),
            "software": any(device.software for device in seen.devices),
            "notes": [*self.sources.read_notes(), *_describe_kept_prompts(self.activity.prompts_kept)],
            "prompts_kept": self.activity.prompts_kept,
            "cluster": asdict(self.sources.cluster()) if self.sources.cluster else None,
            "device_error": seen.problem,
        }

    def _size(self, seen: Observation) -> Mapping[str, Footprint]:
        wanted = {deployment.name: deployment for deployment in seen.deployments}
        self._footprints = {name: known for name, known in self._footprints.items() if name in wanted}
        for name, deployment in wanted.items():
            known = self._footprints.get(name)
            if known is None or known[0] != deployment:
                self._footprints[name] = (deployment, self._try_to_size(deployment))
        return {name: known[1] for name, known in self._footprints.items() if known[1] is not None}

    def _try_to_size(self, deployment: Deployment) -> Footprint | None:
        try:
            return self.sources.size(deployment).footprint
        except AimGpuError:  # an unknown model may still run with the memory that it was given
            return None


def _describe_kept_prompts(count: int) -> list[str]:
    if not count:
        return []
    return [f"Prompts are kept: those of the last {count} requests, in memory, for the daemon's user (AIMGPU_KEEP_PROMPTS)."]


def _with_last_used(rows: list[Json], last_used: Mapping[str, float]) -> list[Json]:
    """Rounded: a row that says nothing new is not sent again every second."""
    return [{**row, "last_used": last_used.get(row["name"]), **_steady(row)} for row in rows]


def _steady(row: Json) -> Json:
    left, idle = row["sleep_in_seconds"], row["idle_seconds"]
    return {
        "sleep_at": None if left is None else round(time.time() + left),
        "idle_seconds": None,
        "idle_since": None if idle is None else round(time.time() - idle),
        "sleep_in_seconds": None,
    }


class Broadcaster:
    """One builder for all tabs; it rests while no tab is open. Runs on the event loop."""

    def __init__(self, state: PageState) -> None:
        self.state = state
        self._tabs: set[_Tab] = set()
        self._sections: dict[str, bytes] = {}
        self._building: asyncio.Task[None] | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._last_request = 0
        self._last_entry = 0
        self._closed = False

    def start(self) -> None:
        """Begin to keep history; call it on the event loop."""
        self._sampling = asyncio.create_task(self._keep_history())

    async def close(self) -> None:
        """End every stream, so that the server can."""
        self._closed = True
        for tab in self._tabs:
            tab.end()
        for task in (self._building, self._sampling):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events for one tab: everything first, then what changes."""
        tab = _Tab()
        await self._build()
        self._tabs.add(tab)  # not before: what is built first would be sent twice
        try:
            yield b"retry: 1000\n\n" + b"".join(self._everything())
            if self._building is None and not self._closed:
                self._building = asyncio.create_task(self._keep_building())
            while not self._closed:
                event = await tab.next()
                if event is None:
                    return
                yield event
        finally:
            self._tabs.discard(tab)

    def _everything(self) -> list[bytes]:
        requests = [entry.to_json() for entry in self.state.activity.requests()[-_BACKLOG:]]
        entries = [entry.to_json() for entry in self.state.journal.entries()[-_BACKLOG:]]
        return [
            *(_event(name, body) for name, body in self._sections.items()),
            _event("history", orjson.dumps(self.state.history.samples())),
            _event("requests", orjson.dumps(requests)),
            _event("journal", orjson.dumps(entries)),
        ]

    async def _keep_building(self) -> None:
        try:
            while self._tabs:
                await asyncio.sleep(_TICK_SECONDS)
                await self._build()
        finally:
            self._building = None

    async def _build(self) -> None:
        sections = await asyncio.to_thread(self.state.read, self.state.sources.read_scores())
        for name, section in sections.items():
            body = orjson.dumps(section)
            if self._sections.get(name) != body:
                self._sections[name] = body
                self._push(_event(name, body))
        requests = self.state.activity.requests(self._last_request)
        if requests:
            self._last_request = requests[-1].number
            self._push(_event("requests", orjson.dumps([entry.to_json() for entry in requests])))
        entries = self.state.journal.entries(self._last_entry)
        if entries:
            self._last_entry = entries[-1].number
            self._push(_event("journal", orjson.dumps([entry.to_json() for entry in entries])))

    async def _keep_history(self) -> None:
        while not self._closed:
            # On the event loop, and more work the more models there are: not again at each change below.
            scores = self.state.sources.read_scores()
            sample = await asyncio.to_thread(self.state.sample, scores)
            self._push(_event("sample", orjson.dumps(sample)))
            until = time.monotonic() + SAMPLE_SECONDS
            while (left := until - time.monotonic()) > 0 and not self._closed:
                if await asyncio.to_thread(self.state.sources.wait_for_change, min(left, _TICK_SECONDS)):
                    await asyncio.to_thread(self.state.note, scores)
                    await asyncio.sleep(_SETTLE_SECONDS)

    def _push(self, event: bytes) -> None:
        for tab in self._tabs:
            tab.put(event)


class _Tab:
    """A slow reader is cut off; the browser connects again and is sent everything."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_BEHIND)

    def put(self, event: bytes) -> None:
        if self._events.full():
            self.end()
        else:
            self._events.put_nowait(event)

    def end(self) -> None:
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)

    async def next(self) -> bytes | None:
        try:
            # Not `wait_for`: until Python 3.12 it loses a cancellation that comes together with an event.
            async with asyncio.timeout(_HEARTBEAT_SECONDS):
                return await self._events.get()
        except TimeoutError:
            return b": still here\n\n"


def _event(name: str, body: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"
