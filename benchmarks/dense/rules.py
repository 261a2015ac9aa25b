"""The rules of others, on the same mechanism as ours.

A victim sleeps with its weights where host memory has room, else without.

llama-swap and Ollama themselves stop a victim; a start takes two minutes here, so that would only show the mechanism. Requests
are taken first come, first served, as both do. One model at a time is woken from host memory, and one is loaded from disk.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import inf

from aimgpu.placement.residency import MemoryRoom, ModelUse, Move, Residence
from aimgpu.placement.residency_replay import Ours

Arrivals = Mapping[str, Sequence[float]]  # of each model, ascending

_KEEP_SECONDS = 300.0
_MOST_TRIED = 3  # victims at once that llama-swap's sets are searched for by number; more are taken largest first


class OnDemand:
    """First come, first served. Victims by a key, the least first; busy ones are passed over."""

    def __init__(self, key: Callable[[ModelUse, Counter[str]], tuple[float, ...]]) -> None:
        self._key = key
        self.tick_seconds: float | None = None
        self.counts: Counter[str] = Counter()

    def note(self, model: str, now: float) -> None:
        del now
        self.counts[model] += 1

    def expect(self, model: str, now: float) -> float:
        del model, now
        return inf

    def decide(self, models: Sequence[ModelUse], room: MemoryRoom) -> Sequence[Move]:
        taken = {model.residence for model in models if model.moving_to is Residence.AWAKE}
        waiting = [
            model
            for model in models
            if model.waiting and not (model.residence is Residence.AWAKE or model.moving_to or model.residence in taken)
        ]
        if not waiting:
            return ()
        first = max(waiting, key=lambda model: (model.waited_seconds, model.name))
        short = first.awake_bytes - first.bytes_in(first.residence) - gpu_free(models, room)
        victims = self.choose(models, first, short)
        if victims is None:
            return ()
        return [*fall_asleep(victims, models, room), Move(name=first.name, to=Residence.AWAKE, because="waits")]

    def choose(self, models: Sequence[ModelUse], wanted: ModelUse, short: int) -> list[ModelUse] | None:
        """None: wait until something changes."""
        del wanted
        chosen: list[ModelUse] = []
        for model in sorted(idle(models), key=lambda model: (self._key(model, self.counts), model.name)):
            if short <= 0:
                break
            chosen.append(model)
            short -= model.awake_bytes - model.asleep_bytes
        return chosen if short <= 0 else None


def lru() -> OnDemand:
    """The one idle for longest."""
    return OnDemand(lambda model, _: (-model.idle_seconds,))


def lfu() -> OnDemand:
    """The one with the fewest requests so far."""
    return OnDemand(lambda model, counts: (counts[model.name], -model.idle_seconds))


class LlamaSwap(OnDemand):
    """Its matrix, with every set that fits allowed: the set that costs least to reach, each victim 1, ties by their order.

    As read in internal/router/matrix_solver.go and scheduler/fifo.go: what works counts as a victim as any other, and is waited
    for. Cost 1 for each is the default of evict_costs.
    """

    def __init__(self) -> None:
        super().__init__(lambda _, __: ())

    def choose(self, models: Sequence[ModelUse], wanted: ModelUse, short: int) -> list[ModelUse] | None:
        if short <= 0:
            return []
        running = [model for model in models if model.residence is Residence.AWAKE and model.name != wanted.name]
        victims = _fewest(sorted(running, key=lambda model: model.name, reverse=True), short)
        return victims if all(model in idle(models) for model in victims) else None


def _fewest(running: Sequence[ModelUse], short: int) -> list[ModelUse]:
    for number in range(1, _MOST_TRIED + 1):
        for tried in combinations(running, number):
            if sum(model.awake_bytes - model.asleep_bytes for model in tried) >= short:
                return list(tried)
    chosen: list[ModelUse] = []
    for model in sorted(running, key=lambda model: -model.awake_bytes):
        if short > 0:
            chosen.append(model)
            short -= model.awake_bytes - model.asleep_bytes
    return chosen


class Ollama(OnDemand):
    """At most so many loaded. The victim is the first idle one by keep-alive, here alike for all, then by name.

    As read in server/sched.go of 0.17.4: where none is idle the first by name is to go, and is waited for. What is
    idle for five minutes goes too.
    """

    def __init__(self, most: int | None) -> None:
        """`most`: OLLAMA_MAX_LOADED_MODELS; its default is 3 for each GPU. None: as many as fit."""
        super().__init__(lambda _, __: ())
        self._most = most
        self.tick_seconds = 5.0

    def decide(self, models: Sequence[ModelUse], room: MemoryRoom) -> Sequence[Move]:
        expired = [model for model in idle(models) if model.idle_seconds >= _KEEP_SECONDS]
        return fall_asleep(expired, models, room) if expired else super().decide(models, room)

    def choose(self, models: Sequence[ModelUse], wanted: ModelUse, short: int) -> list[ModelUse] | None:
        del wanted
        loaded = sum((model.moving_to or model.residence) is Residence.AWAKE for model in models)
        chosen: list[ModelUse] = []
        for model in sorted(idle(models), key=lambda model: model.name):
            if short <= 0 and (self._most is None or loaded - len(chosen) < self._most):
                break
            chosen.append(model)
            short -= model.awake_bytes - model.asleep_bytes
        enough = short <= 0 and (self._most is None or loaded - len(chosen) < self._most)
        return chosen if enough else None


class KeepAlive(OnDemand):
    """What is idle for five minutes goes, nothing else does: who finds no room waits."""

    def __init__(self) -> None:
        super().__init__(lambda model, _: (-model.idle_seconds,))
        self.tick_seconds = 5.0

    def choose(self, models: Sequence[ModelUse], wanted: ModelUse, short: int) -> list[ModelUse] | None:
        return super().choose([model for model in models if model.idle_seconds >= _KEEP_SECONDS], wanted, short)


def idle(models: Sequence[ModelUse]) -> list[ModelUse]:
    """Awake and without work."""
    return [
        model
        for model in models
        if model.residence is Residence.AWAKE and not (model.moving_to or model.in_flight or model.waiting)
    ]


def gpu_free(models: Sequence[ModelUse], room: MemoryRoom) -> int:
    """Once what is under way has ended."""
    return room.gpu_bytes - sum(model.bytes_in(model.moving_to or model.residence) for model in models)


def fall_asleep(victims: Sequence[ModelUse], models: Sequence[ModelUse], room: MemoryRoom) -> list[Move]:
    """With their weights while host memory has room for them."""
    host = room.host_bytes - sum(
        model.host_bytes for model in models if Residence.WEIGHTS in (model.residence, model.moving_to)
    )
    moves = []
    for victim in victims:
        fits = victim.host_bytes <= host
        host -= victim.host_bytes if fits else 0
        moves.append(Move(name=victim.name, to=Residence.WEIGHTS if fits else Residence.EMPTY, because="victim"))
    return moves


class Farthest(OnDemand):
    """Clairvoyant and greedy: the victim is the one whose next request is farthest away."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__(lambda model, _: (-model.expected_seconds,))
        self._arrivals = arrivals

    def expect(self, model: str, now: float) -> float:
        return next_in(self._arrivals, model, now)


class Clairvoyant(Ours):
    """Ours, with the moment of each model's next request known instead of learned; it wakes ahead too."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals

    def note(self, model: str, now: float) -> None:
        pass

    def expect(self, model: str, now: float) -> float:
        return next_in(self._arrivals, model, now)


def next_in(arrivals: Arrivals, model: str, now: float) -> float:
    """Seconds until the next arrival after now; inf: none comes."""
    moments = arrivals.get(model, ())
    index = bisect_right(moments, now)
    return moments[index] - now if index < len(moments) else inf
