"""Replays arrivals against a rule of residency on one GPU: who was in time for the first token. Pure, on simulated time.

Sleeping with weights and waking copy over one link, one after the other; loading weights again reads one disk, likewise. A
wake begins once everything that gives room has ended, so that no moment holds more than the GPU has. Starts run beside each
other. Requests of one model run at once and do not slow each other down, nor do other models on the same GPU: what is late
here is late because its model was not awake.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Protocol

from aimgpu.domain import Priority
from aimgpu.placement.residency import MemoryRoom, ModelUse, Move, Residence, decide_residency
from aimgpu.qos.arrivals import ArrivalHistory

_DROP_SECONDS = 0.1  # to sleep without weights: nothing is copied
_STOP_SECONDS = 2.0
_LONGEST_SECONDS = 600.0  # that callers are waited for after the last request came


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What does not change of a model."""

    name: str
    awake_bytes: int
    asleep_bytes: int
    host_bytes: int
    wake_seconds: float
    reload_seconds: float | None
    start_seconds: float
    sleep_seconds: float
    pinned: bool = False
    keep_seconds: float | None = inf
    priority: Priority = Priority.MEDIUM
    first_token_seconds: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    at: float
    model: str
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class Rule(Protocol):
    """Decides who is where. Called when something changed, and every `tick_seconds`, where that is not None."""

    tick_seconds: float | None

    def note(self, model: str, now: float) -> None:
        """A request came."""

    def expect(self, model: str, now: float) -> float:
        """Seconds until its next request."""

    def decide(self, models: Sequence[ModelUse], room: MemoryRoom) -> Sequence[Move]: ...


class Ours:
    """The policy of this product, which learns from the arrivals that it sees."""

    tick_seconds: float | None = 20.0

    def __init__(self) -> None:
        self._histories: dict[str, ArrivalHistory] = {}

    def note(self, model: str, now: float) -> None:
        self._histories.setdefault(model, ArrivalHistory()).note(now)

    def expect(self, model: str, now: float) -> float:
        return self._histories.setdefault(model, ArrivalHistory()).expected_seconds(now)

    def decide(self, models: Sequence[ModelUse], room: MemoryRoom) -> Sequence[Move]:
        return decide_residency(models, room).moves


@dataclass(slots=True)
class ReplayOutcome:
    """What came of the requests. `waits`: seconds to the first token, in the order of arrival; inf: never."""

    waits: list[float] = field(default_factory=list)
    late: int = 0
    late_by_model: dict[str, int] = field(default_factory=dict)
    wakes: int = 0
    starts: int = 0
    copied_seconds: float = 0.0  # between GPU and host
    loaded_seconds: float = 0.0  # from disk

    @property
    def attainment(self) -> float:
        """The part of the requests that was in time."""
        return 1.0 - self.late / len(self.waits) if self.waits else 1.0


@dataclass(slots=True)
class _Model:
    shape: ModelShape
    residence: Residence
    moving_to: Residence | None = None
    in_flight: int = 0
    waiting: deque[int] = field(default_factory=deque)
    last_used: float = 0.0
    ready_since: float = 0.0

    @property
    def after(self) -> Residence:
        return self.moving_to or self.residence

    def bytes_in(self, residence: Residence) -> int:
        if residence is Residence.AWAKE:
            return self.shape.awake_bytes
        return 0 if residence is Residence.STOPPED else self.shape.asleep_bytes


def replay(shapes: Sequence[ModelShape], requests: Sequence[Request], room: MemoryRoom, rule: Rule) -> ReplayOutcome:
    """Requests in the order of `at`. At the start as many models are awake as fit, in the order of `shapes`; others sleep."""
    return _Replay(shapes, requests, room, rule).run()


class _Replay:
    def __init__(self, shapes: Sequence[ModelShape], requests: Sequence[Request], room: MemoryRoom, rule: Rule) -> None:
        self._room, self._rule, self._requests = room, rule, requests
        self._models = {shape.name: _Model(shape, Residence.STOPPED) for shape in shapes}
        self._events: list[tuple[float, int, str, str]] = []
        self._numbers = count()
        self._link_free_at = 0.0
        self._disk_free_at = 0.0
        self._freed_at = 0.0
        self._outcome = ReplayOutcome(waits=[inf] * len(requests))
        self._settle(shapes)

    def run(self) -> ReplayOutcome:
        if not self._requests:
            return self._outcome
        end = self._requests[-1].at
        if self._rule.tick_seconds is not None:
            self._push(self._requests[0].at, "tick", "")
        upcoming = iter(enumerate(self._requests))
        entry = next(upcoming, None)
        while entry is not None or self._events:
            if entry is not None and (not self._events or entry[1].at <= self._events[0][0]):
                self._arrive(*entry)
                entry = next(upcoming, None)
                continue
            now, _, kind, name = heapq.heappop(self._events)
            if kind == "tick":
                self._decide(now)
                last = end if not any(model.waiting for model in self._models.values()) else end + _LONGEST_SECONDS
                if now < last:
                    self._push(now + (self._rule.tick_seconds or inf), "tick", "")
            elif kind == "finish":
                self._finish(self._models[name], now)
            else:
                self._arrived_at(self._models[name], now)
        limits = {name: model.shape.first_token_seconds for name, model in self._models.items()}
        for request, wait in zip(self._requests, self._outcome.waits, strict=True):
            if wait > limits[request.model]:
                self._outcome.late += 1
                by_model = self._outcome.late_by_model
                by_model[request.model] = by_model.get(request.model, 0) + 1
        return self._outcome

    def _settle(self, shapes: Iterable[ModelShape]) -> None:
        room = self._room
        gpu, host = room.gpu_bytes - sum(shape.asleep_bytes for shape in shapes), room.host_bytes
        for model in self._models.values():
            shape = model.shape
            if gpu >= shape.awake_bytes - shape.asleep_bytes:
                gpu -= shape.awake_bytes - shape.asleep_bytes
                model.residence = Residence.AWAKE
            elif host >= shape.host_bytes:
                host -= shape.host_bytes
                model.residence = Residence.WEIGHTS
            elif shape.reload_seconds is not None:
                model.residence = Residence.EMPTY

    def _push(self, at: float, kind: str, name: str) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), kind, name))

    def _arrive(self, index: int, request: Request) -> None:
        self._rule.note(request.model, request.at)
        model = self._models[request.model]
        if model.residence is Residence.AWAKE and model.moving_to is None:
            self._serve(model, index, request.at)
            return
        model.waiting.append(index)
        if model.moving_to is None or model.moving_to is not Residence.AWAKE:
            self._decide(request.at)

    def _serve(self, model: _Model, index: int, now: float) -> None:
        request = self._requests[index]
        model.in_flight += 1
        self._outcome.waits[index] = now + request.prefill_seconds - request.at
        self._push(now + request.prefill_seconds + request.decode_seconds, "finish", request.model)

    def _finish(self, model: _Model, now: float) -> None:
        model.in_flight -= 1
        model.last_used = now
        if not model.in_flight and any(one.waiting for one in self._models.values()):
            self._decide(now)

    def _arrived_at(self, model: _Model, now: float) -> None:
        if model.moving_to is None:
            return
        model.residence, model.moving_to = model.moving_to, None
        if model.residence is Residence.AWAKE:
            model.ready_since = model.last_used = now
            while model.waiting:
                self._serve(model, model.waiting.popleft(), now)
        self._decide(now)

    def _decide(self, now: float) -> None:
        uses = [self._use(name, model, now) for name, model in self._models.items()]
        for move in self._rule.decide(uses, self._room):
            self._begin(self._models[move.name], move.to, now)
        self._check()

    def _use(self, name: str, model: _Model, now: float) -> ModelUse:
        shape = model.shape
        idle = 0.0 if model.in_flight or model.waiting else now - model.last_used
        return ModelUse(
            name=name,
            residence=model.residence,
            awake_bytes=shape.awake_bytes,
            asleep_bytes=shape.asleep_bytes,
            host_bytes=shape.host_bytes,
            pinned=shape.pinned,
            wake_seconds=shape.wake_seconds,
            reload_seconds=shape.reload_seconds,
            start_seconds=shape.start_seconds,
            sleep_seconds=shape.sleep_seconds,
            expected_seconds=self._rule.expect(name, now),
            moving_to=model.moving_to,
            in_flight=model.in_flight,
            waiting=len(model.waiting),
            waited_seconds=now - self._requests[model.waiting[0]].at if model.waiting else 0.0,
            idle_seconds=idle,
            resident_seconds=now - model.ready_since,
            keep_seconds=shape.keep_seconds,
            priority=shape.priority,
            first_token_seconds=shape.first_token_seconds,
        )

    def _begin(self, model: _Model, to: Residence, now: float) -> None:
        before = model.residence
        if model.moving_to is not None or before is to or (before is Residence.AWAKE and model.in_flight):
            message = f"{model.shape.name} cannot go from {before} to {to} now"
            raise ValueError(message)
        model.moving_to = to
        if to is Residence.AWAKE:
            ends = self._wake(model, before, now)
        elif to is Residence.WEIGHTS:
            ends = self._copy(model.shape.sleep_seconds, now)
        elif before is Residence.WEIGHTS and to is Residence.EMPTY:
            ends = self._copy(model.shape.wake_seconds + _DROP_SECONDS, now)
        else:
            ends = now + (_DROP_SECONDS if to is Residence.EMPTY else _STOP_SECONDS)
        if to is not Residence.AWAKE:
            self._freed_at = max(self._freed_at, ends)
        self._push(ends, "moved", model.shape.name)

    def _wake(self, model: _Model, before: Residence, now: float) -> float:
        room_at = max(now, self._freed_at)
        if before is Residence.STOPPED:
            self._outcome.starts += 1
            return room_at + model.shape.start_seconds
        self._outcome.wakes += 1
        if before is Residence.WEIGHTS or model.shape.reload_seconds is None:
            return self._copy(model.shape.wake_seconds, room_at)
        self._disk_free_at = max(self._disk_free_at, room_at) + model.shape.reload_seconds
        self._outcome.loaded_seconds += model.shape.reload_seconds
        return self._disk_free_at

    def _copy(self, seconds: float, now: float) -> float:
        self._link_free_at = max(self._link_free_at, now) + seconds
        self._outcome.copied_seconds += seconds
        return self._link_free_at

    def _check(self) -> None:
        """No rule may pass the bounds."""
        gpu = sum(model.bytes_in(model.after) for model in self._models.values())
        host = sum(
            model.shape.host_bytes for model in self._models.values() if Residence.WEIGHTS in (model.residence, model.after)
        )
        if gpu > self._room.gpu_bytes or host > self._room.host_bytes:
            message = f"{gpu} bytes on the GPU and {host} on the host pass {self._room}"
            raise ValueError(message)
