"""The control loop of `sharing:`: measured token times in, shares of the launch gate out, four times a second."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aimgpu.domain import Deployment, Instance, InstanceState, Level, Priority, Sharing
from aimgpu.qos.slo.arbiter import Arbiter
from aimgpu.qos.slo.sharing import TICK_SECONDS
from aimgpu.qos.slo.yielded import YieldedTime

_LOOK_SECONDS = 1.0
_LOOKS_PER_TICK = 4  # at the streams: some twenty tokens of a fast model each
_WRITE_AGAIN_SECONDS = 5.0  # a region that was made again since has the default


class Pace(Protocol):
    def look(self, now: float) -> None: ...

    def take(self, priorities: Mapping[str, Priority], now: float) -> dict[str, dict[str, list[float]]]: ...


class Steer(Protocol):
    def apply(self, instance_id: str, share: float) -> bool: ...

    def read_lower(self, instance_id: str) -> float | None: ...


@dataclass(slots=True)
class _Written:
    share: float
    at: float


@dataclass(slots=True)
class SharingLoop:
    """Knows what each deployment wants; writes a share only where it changed."""

    deployments: Callable[[], Iterable[Deployment]]
    instances: Callable[[], Iterable[Instance]]
    pace: Pace
    steer: Steer
    arbiter: Arbiter = field(default_factory=Arbiter)
    _written: dict[str, _Written] = field(default_factory=dict)
    _yielded: dict[str, YieldedTime] = field(default_factory=dict)  # by model
    _worked: frozenset[str] = frozenset()  # models of which something was measured in the last tick
    _wanted: Mapping[str, Deployment] = field(default_factory=dict)
    _promised: Mapping[str, Deployment] = field(default_factory=dict)
    _running: tuple[Instance, ...] = ()  # those whose share may have to be written

    async def run(self) -> None:
        looked = -math.inf
        while True:
            if self._promised:
                await self._watch_streams()
            else:
                await asyncio.sleep(TICK_SECONDS if self._running else _LOOK_SECONDS)
            now = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                await asyncio.to_thread(self.look)
                looked = now
            changes = self.tick(now)
            if changes or self._promised:
                await asyncio.to_thread(self._exchange, changes, now)

    async def _watch_streams(self) -> None:
        for _ in range(_LOOKS_PER_TICK - 1):
            await asyncio.sleep(TICK_SECONDS / _LOOKS_PER_TICK)
            self.pace.look(time.monotonic())
        await asyncio.sleep(TICK_SECONDS / _LOOKS_PER_TICK)  # the last look is that of the tick

    def look(self) -> None:
        """Read what is deployed and what runs, not at every tick. If all are strict a tick has nothing to do."""
        wanted = {one.name: one for one in self.deployments()}
        ready = [one for one in self.instances() if one.state is InstanceState.READY and one.deployment in wanted]
        self._promised = {
            name: one for name, one in wanted.items() if one.sharing is Sharing.PROMISE and one.objective is not None
        }
        self._running = tuple(
            one for one in ready if wanted[one.deployment].sharing is not Sharing.STRICT or one.id in self._written
        )
        self._wanted = wanted

    def tick(self, now: float) -> dict[str, float]:
        """Instance -> share, of those to be written."""
        wanted, promised = self._wanted, self._promised
        samples = self.pace.take({name: one.ask.priority for name, one in promised.items()}, now)
        self._worked = frozenset(name for name, measured in samples.items() if any(measured.values()))
        self.arbiter.follow(promised, samples)
        running = [one for one in self._running if one.deployment in wanted]
        self._written = {one.id: self._written[one.id] for one in running if one.id in self._written}
        self._note_gated()
        return {
            one.id: share for one in running if self._is_due(one.id, share := self.arbiter.share(wanted[one.deployment]), now)
        }

    def report(self) -> dict[str, dict[str, object]]:
        """JSON-ready, by model: the share in force, what it costs and yields, how much of the nearest promise is used."""
        found: dict[str, dict[str, object]] = {}
        for deployment in self._wanted.values():
            entry: dict[str, object] = {"sharing": deployment.sharing.value, "share": self.arbiter.share(deployment)}
            controller = self.arbiter.promise_of(deployment.name)
            if controller is not None:
                entry |= {"promise": controller.nearest, "promise_used": controller.used, "cost": controller.cost}
                yielded = self._yielded.get(deployment.name) or YieldedTime()
                entry |= {"yielded": yielded.ratio, "yielded_seconds": yielded.seconds}
                entry |= {"watched_seconds": yielded.watched_seconds}
            if deployment.sharing is Sharing.PROMISE and self._is_ungated(deployment.name):
                entry["gate"] = False
            found[deployment.name] = entry
        return found

    def _is_ungated(self, model: str) -> bool:
        """Nothing stands between its copies and the GPU, so that no share is in force, whatever was steered."""
        levels = [grant.level for one in self._running if one.deployment == model for grant in one.grants]
        return bool(levels) and all(level in (Level.NONE, Level.ADVISORY) for level in levels)

    def _is_due(self, instance_id: str, share: float, now: float) -> bool:
        written = self._written.get(instance_id)
        if written is None:
            return share > 0
        return written.share != share or (share > 0 and now - written.at > _WRITE_AGAIN_SECONDS)

    def _exchange(self, changes: Mapping[str, float], now: float) -> None:
        """With the gate: read what the share was worth until now, then write the new one."""
        self.watch(now)
        self._apply(changes)

    def watch(self, now: float) -> None:
        """Read what neighbours used since the last tick, under the shares that were written then."""
        promised, running = self._promised, self._running
        self._yielded = {name: one for name, one in self._yielded.items() if name in promised}
        for one in running:
            if one.deployment in promised:
                written = self._written.get(one.id)
                measures = written is not None and 0 < written.share < 1
                yielded = self._yielded.setdefault(one.deployment, YieldedTime())
                reading = self.steer.read_lower(one.id) if measures else None
                yielded.note(one.id, reading, now, counts=one.deployment in self._worked)
        names = frozenset(one.id for one in running)
        for yielded in self._yielded.values():
            yielded.forget(names)

    def _apply(self, changes: Mapping[str, float]) -> None:
        for instance_id, share in changes.items():
            if self.steer.apply(instance_id, share):
                self._written[instance_id] = _Written(share, time.monotonic())
        self._note_gated()

    def _note_gated(self) -> None:
        self.arbiter.note_gated({one.deployment for one in self._running if one.id in self._written})
