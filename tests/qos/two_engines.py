"""Two engines on one GPU behind the launch gate, token by token, with the loop of `sharing: promise` that steers it.

A chat engine streams answers; a batch engine makes steps, each one long launch. The gate is as native/yield.c: while chat
works, a step passes once its share of time is paid, at the next pause between two tokens, and the token after it comes later;
while chat is idle steps pass as fast as the engine makes them. Lengths are fitted to what two vLLM models did on one H200
(benchmarks/results/engines_h200.json and engines_h200_sweep.json): chat 2.41 ms per token, batch 3.15 ms per step alone; at
shares of 0.072, 0.15, 0.25 and 0.37 chat took 1.09, 1.19, 1.37 and 1.49 times as long.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

from aimgpu.daemon.sharing import SharingLoop
from aimgpu.domain import Ask, Auto, Deployment, Instance, InstanceState, Priority, ServiceObjective, Sharing
from aimgpu.gateway.token_pace import TokenPace
from aimgpu.qos.slo.sharing import TICK_SECONDS

WINDOW = 32  # tokens
_LOOK = TICK_SECONDS / 4
_UNUSED_MS = 5.0  # of its share that a neighbour keeps
_MOST_MS = 500.0  # that it pays for one step


@dataclass(frozen=True)
class Engines:
    """Milliseconds. What differs from workload to workload."""

    token: float = 2.41
    jitter: float = 0.03  # of a token, each for itself
    drift: float = 0.004  # of a request, slowly changing
    stalls: float = 1 / 8000  # of the tokens
    stall: float = 9.0
    charged: float = 1.9  # a step of the neighbour: what it pays
    delay: float = 2.1  # and what the token after it waits
    delay_jitter: float = 0.25
    step: float = 3.15  # alone
    wave: int = 256  # steps between two waves of new requests
    wave_steps: int = 10
    prefill: float = 1.0  # times the delay, in a wave
    gated_step: float = 0.0  # the least between two steps beside the gate; 0: as alone
    open_token: float = (
        0.0  # times a token, beside an open gate, where the neighbour is held to a part of the units; 0: it is not
    )
    open_step: float = 0.0
    first_token: float = 17.0
    pause: Callable[[random.Random], float] = lambda _: 50.0
    tokens: Callable[[random.Random], int] = lambda _: 96


@dataclass(eq=False)
class _Model:
    name: str = "chat"


@dataclass(eq=False)
class _Stream:
    model: Any = field(default_factory=_Model)
    priority: Priority = Priority.HIGH
    tokens_so_far: int = 0
    last_event: float | None = None


@dataclass
class World:
    """`promise_ms` None: a fixed share."""

    engines: Engines
    promise_ms: float | None
    seed: int = 0
    share: float = 0.0
    now: float = 0.0  # ms
    steps: float = 0.0
    windows: list[tuple[float, float, float]] = field(default_factory=list)  # when it ended (s), ms per token, share
    has_batch: bool = True
    _paid: float = 0.0
    _looked: float = 0.0
    _looks: int = 0
    _streams: list[_Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        objective = ServiceObjective(tpot_p95_ms=self.promise_ms) if self.promise_ms else None
        ask = Ask(name="chat", want=Auto(), priority=Priority.HIGH)
        chat = Deployment(name="chat", model="m", ask=ask, sharing=Sharing.PROMISE, objective=objective)
        instance = Instance(
            id="chat-0", deployment="chat", replica=0, model="m", engine="vllm", launcher="process", state=InstanceState.READY
        )
        self._pace = TokenPace(lambda: self._streams)
        self._loop = SharingLoop(deployments=lambda: [chat], instances=lambda: [instance], pace=self._pace, steer=self)
        self._loop.look()
        self._offset = 0.0

    def apply(self, instance_id: str, share: float) -> bool:
        """The gate, as the loop knows it."""
        self.share = share
        return True

    def read_lower(self, instance_id: str) -> float | None:
        """Not modelled: nothing here looks at it."""
        return None

    def run(self, seconds: float) -> "World":
        end = self.now + seconds * 1000
        while self.now < end:
            self._answer()
            self._idle(self.engines.pause(self._random))
        return self

    def change(self, **values: Any) -> None:
        """From now on."""
        self.engines = replace(self.engines, **values)

    def _answer(self) -> None:
        engines, stream = self.engines, _Stream()
        self._streams = [stream]
        self._pass(engines.first_token)
        self._offset = 0.9 * self._offset + self._random.gauss(0, engines.drift)
        began, began_at = self.now, 0
        for token in range(engines.tokens(self._random)):
            if token:
                self._pass(self._token_ms())
            stream.tokens_so_far, stream.last_event = token + 1, self.now / 1000
            if token - began_at == WINDOW:
                self.windows.append((self.now / 1000, (self.now - began) / WINDOW, self.share))
                began, began_at = self.now, token
        self._streams = []

    def _token_ms(self) -> float:
        engines, source = self.engines, self._random
        took = engines.token * (1 + self._offset + source.gauss(0, engines.jitter))
        if source.random() < engines.stalls:
            took += engines.stall * source.random() * 2
        if self.has_batch and self.share == 1 and engines.open_token:
            took *= engines.open_token
            self.steps += took / engines.open_step
            return took
        while self.has_batch and self.share > 0 and self._paid <= self.now + took / 2:
            scale = engines.prefill if self.steps % engines.wave < engines.wave_steps else 1.0
            spacing = max(min(engines.charged / self.share, _MOST_MS), engines.gated_step or engines.step)
            self._paid = max(self._paid, self.now - _UNUSED_MS) + spacing
            delay = engines.delay * scale * (1 - min(max(self.share - 0.2, 0) * 1.3, 0.24))  # larger pieces cost less
            took += max(0.2, source.gauss(delay, engines.delay_jitter))
            self.steps += 1
        return took

    def _idle(self, milliseconds: float) -> None:
        if self.has_batch:
            self.steps += milliseconds / self.engines.step
        self._pass(milliseconds)

    def _pass(self, milliseconds: float) -> None:
        """Time; the loop looks at the streams and ticks."""
        self.now += milliseconds
        while self.now / 1000 - self._looked >= _LOOK:
            self._looked += _LOOK
            self._looks += 1
            if self._looks % 4:
                self._pace.look(self._looked)
            elif self.promise_ms is not None:
                self._loop._apply(self._loop.tick(self._looked))

    def settled(self, after: float) -> list[tuple[float, float, float]]:
        return [one for one in self.windows if one[0] > after]

    def kept(self, after: float) -> float:
        return mean(took <= (self.promise_ms or 0) for _, took, _ in self.settled(after))

    def slowdown(self, after: float) -> float:
        return median(took for _, took, _ in self.settled(after)) / self.engines.token

    def rate(self) -> float:
        """Steps per second."""
        return self.steps / (self.now / 1000)
