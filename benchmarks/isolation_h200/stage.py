"""Tenants that are started once and then measured in short windows, in turns.

Clocks, temperature and where a process's memory lies move a baseline by 3 % between two processes or two minutes, as much as
the library is allowed to cost. So all tenants of a comparison stay alive, and which of them work changes every few seconds; one
that does not work has nothing launched and waits for its next order.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.isolation_h200.bench import PATIENCE_SECONDS, Bench, Member, end, expect, limits_of, rate, send

if TYPE_CHECKING:
    import subprocess

    from aimgpu.isolation.region import Region

LEAD_SECONDS = 0.15  # that hogs work before a window begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Who works in a window."""

    setup: str
    round: int
    server: str
    seconds: float
    hogs: tuple[str, ...] = ()
    signal: bool = True
    seed: int | None = None  # of the pauses; None: the windows of a round have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was measured while one server worked, alone or beside hogs."""

    setup: str
    round: int
    server: str
    requests: tuple[float, ...]  # seconds
    starts: tuple[float, ...] = ()
    steps: tuple[float, ...]
    seconds: float
    hog_units: float = 0.0  # per second, of all hogs
    hog_seconds: float = 0.0  # on the device, as the gate measured it
    counted: Mapping[str, float]  # by the gate within the window

    @property
    def idle_seconds(self) -> float:
        return self.seconds - sum(self.requests)

    @property
    def busy(self) -> list[tuple[float, float]]:
        return [(start, start + taken) for start, taken in zip(self.starts, self.requests, strict=True)]


class Stage:
    """Tenants by name, started when they are first needed."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._members: dict[str, Member] = {}
        self._regions: dict[str, Region] = {}

    def start(self, places: Mapping[str, Sequence[Member]]) -> None:
        """Start what does not run yet, all at once; the members of one place share a region."""
        fresh = []
        for place, members in places.items():
            fresh += [member for member in members if member.name not in self._running]
            for member in members:
                self._start(place, member)
        with self._patience(2 * PATIENCE_SECONDS):
            for member in fresh:
                expect(self._running[member.name], "READY")

    def _start(self, place: str, member: Member) -> None:
        if member.name in self._running:
            return
        if member.priority is not None:
            if place not in self._regions:
                self._regions[place] = self._bench.create_region(f"stage-{place}")
            self._regions[place].admit(limits_of(member))
        self._running[member.name] = self._bench.start(member, self._regions.get(place))
        self._members[member.name] = member

    def serve(self, turn: Turn) -> Window:
        """One window. Hogs begin before it and end after it; what they did within it counts."""
        server = self._running[turn.server]
        with self._patience(PATIENCE_SECONDS + turn.seconds):
            first = self._read(turn)
            for hog in turn.hogs:
                send(self._running[hog], "RUN")
                expect(self._running[hog], "BEGUN")
            if turn.hogs:
                time.sleep(LEAD_SECONDS)
            before = self._read(turn)
            seed = turn.round if turn.seed is None else turn.seed
            send(server, f"GO {turn.seconds} {seed} {'signal' if turn.signal else 'silent'}")
            expect(server, "DONE")
            after = self._read(turn)
            got = json.loads(expect(server, "{"))
            results = self._stop(turn.hogs)
        counted = {name: round(after[name] - before[name], 6) for name in after}
        if results:  # from the hogs' first launch to their last
            begun, ended = min(result["begun"] for result in results), max(result["ended"] for result in results)
            counted["whole_hog_seconds"] = round(self._read(turn)["hog_seconds"] - first["hog_seconds"], 6)
            counted["whole_idle_seconds"] = round(ended - begun - sum(got["requests"]), 6)
        return Window(
            setup=turn.setup,
            round=turn.round,
            server=turn.server,
            requests=tuple(got["requests"]),
            starts=tuple(got["starts"]),
            steps=tuple(got["steps"]),
            seconds=got["ended"] - got["begun"],
            hog_units=sum(rate(result, (got["begun"], got["ended"])) for result in results),
            hog_seconds=counted["hog_seconds"],
            counted=counted,
        )

    def work(self, hog: str, seconds: float) -> float:
        """Units per second of a hog alone, from the first that it finished to the last."""
        got = self.order(hog, f"GO {seconds}", seconds)
        (first_at, first), (last_at, last) = got["marks"][1], got["marks"][-1]
        return float(got["units_each"] * (last - first) / (last_at - first_at))

    def order(self, name: str, line: str, seconds: float) -> dict[str, Any]:
        """Any other order, and its answer."""
        with self._patience(PATIENCE_SECONDS + seconds):
            send(self._running[name], line)
            answer: dict[str, Any] = json.loads(expect(self._running[name], "{"))
        return answer

    def longest_launch_ms(self, tenant: str) -> float:
        uses = (use for region in self._regions.values() for use in region.read_use())
        return round(max((use.longest_launch_ns for use in uses if use.name == tenant), default=0) / 1e6, 3)

    def close(self) -> None:
        end(self._running.values())
        for pipe in (pipe for process in self._running.values() for pipe in (process.stdin, process.stdout)):
            with contextlib.suppress(OSError):  # a line that the process did not read any more
                pipe.close()  # type: ignore[union-attr]
        for region in self._regions.values():
            region.close()
            region.path.unlink()
        self._running, self._members, self._regions = {}, {}, {}

    def _stop(self, hogs: Iterable[str]) -> list[dict[str, Any]]:
        """Also one whose launch is held back for a pause: that would last for seconds after the server's last request."""
        for hog in hogs:
            send(self._running[hog], "STOP")
        held_back = {place: region.header.absent_ns for place, region in self._regions.items()}
        for place in held_back:
            self._regions[place].header.absent_ns = 1
            self._regions[place].wake()
        results = [json.loads(expect(self._running[hog], "{")) for hog in hogs]
        for place, absent_ns in held_back.items():
            self._regions[place].header.absent_ns = absent_ns
        return results

    def _read(self, turn: Turn) -> dict[str, float]:
        tenants = {self._members[name].tenant for name in turn.hogs}
        sums = dict.fromkeys(("hog_seconds", "overruns", "held_seconds", "requests", "touched"), 0.0)
        for use in (use for region in self._regions.values() for use in region.read_use()):
            if use.name in tenants:
                sums["hog_seconds"] += use.gpu_seconds
                sums["overruns"] += use.overruns
                sums["held_seconds"] += use.held_seconds
            elif use.name == self._members[turn.server].tenant:
                sums["requests"] += use.requests
                sums["touched"] += use.touched
        return sums

    def _patience(self, seconds: float) -> "Patience":
        return Patience(seconds, self._running)


class Patience:
    """Ends all tenants when the block takes too long: what reads from them then fails instead of waiting forever."""

    def __init__(self, seconds: float, running: Mapping[str, "subprocess.Popen[str]"]) -> None:
        self._timer = threading.Timer(seconds, lambda: end(running.values()))

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
