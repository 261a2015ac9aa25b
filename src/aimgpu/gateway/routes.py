"""How the gateway learns where a model answers; the daemon keeps it up to date from the controller's events."""

from dataclasses import dataclass, field
from typing import Protocol

from aimgpu.domain import Priority, ServiceObjective

_NOTHING = ServiceObjective()
_BY_RANK = tuple(sorted(Priority, key=lambda priority: priority.rank))
_NEARLY_ALL = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One ready Instance."""

    instance_id: str
    url: str  # "http://127.0.0.1:41234"
    api_key: str
    slots: int  # requests it serves at once
    device_id: str | None = None
    takes_priority: bool = False  # its engine orders by a "priority" in the body, lower first (vLLM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known of a model's weights and how they are served; None: not known."""

    engine: str | None = None
    format: str | None = None  # gguf | safetensors
    family: str | None = None  # of the architecture
    parameters: int | None = None
    quantization: str | None = None
    weights_bytes: int | None = None
    memory_bytes: int | None = None  # granted, all instances together
    context_tokens: int | None = None  # of one request
    embedding_length: int | None = None
    embeds: bool = False  # makes vectors, not text


_NO_CARD = ModelCard()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str  # what callers put into "model": the deployment's name
    model: str  # what it is made from
    state: str
    reason: str | None
    simulated: bool  # its Device is simulated
    backends: tuple[Backend, ...]
    created: int  # seconds since the epoch
    priority: Priority = Priority.MEDIUM
    objective: ServiceObjective | None = None
    card: ModelCard = _NO_CARD
    # Worked out once, because every request asks for them.
    first_byte_promise: float | None = field(init=False, compare=False)  # seconds, to a high request: the tightest
    looser_promises: tuple[float, ...] = field(init=False, compare=False)  # the others, ascending
    slow_token_ms: tuple[float | None, ...] = field(init=False, compare=False)  # by rank: slower than this is too slow
    promises_rate: bool = field(init=False, compare=False)  # of tokens, to any class

    def __post_init__(self) -> None:
        given = [self.objective.of_class(priority) if self.objective else _NOTHING for priority in _BY_RANK]
        promises = [milliseconds / 1000 for milliseconds in sorted(set(given[-1].percentiles_ms("ttft").values()))]
        object.__setattr__(self, "first_byte_promise", promises[0] if promises else None)
        object.__setattr__(self, "looser_promises", tuple(promises[1:]))
        object.__setattr__(self, "slow_token_ms", tuple(map(_slow_token_ms, given)))
        object.__setattr__(self, "promises_rate", any(each.tokens_per_second for each in given))


def _slow_token_ms(objective: ServiceObjective) -> float | None:
    """By what nearly all were promised; a promise to half of the requests says nothing about one of them."""
    return max((ms for percent, ms in objective.percentiles_ms("tpot").items() if percent >= _NEARLY_ALL), default=None)


class RouteTable(Protocol):
    def find(self, name: str) -> ServedModel | None: ...

    def list(self) -> tuple[ServedModel, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """A model that is on its way back."""

    expected_seconds: float | None  # from wakes measured before; None: not known


class Waker(Protocol):
    def wake(self, model: str) -> Wake | None:
        """Begin to bring a sleeping or unloaded model back, without blocking; harmless to repeat while it is on its way.

        None: it is not asleep, so waiting for it would be waiting for nothing.
        """


class ModelSleeper(Protocol):
    def sleep(self, model: str) -> None:
        """Begin to unload a model, without blocking; one that is busy stays. A request wakes it again."""


class RequestSignals(Protocol):
    """Is told when an instance begins and ends a request, so that others on its GPU can make way. Must not block or raise."""

    def begin(self, instance_id: str) -> None: ...

    def end(self, instance_id: str) -> None: ...
