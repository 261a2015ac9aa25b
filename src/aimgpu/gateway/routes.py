"""Where a model answers: the table that requests read, replaced as a whole when something changes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aimgpu.domain import Priority, ServiceObjective

_NOTHING = ServiceObjective()
_BY_RANK = tuple(sorted(Priority, key=lambda priority: priority.rank))
_NEARLY_ALL = 90
LATEST = ":latest"  # Ollama's clients add it to a name that has no tag


class RequestSignal(Protocol):
    """Counts the requests in flight of one instance where others on its GPU can see it. Must not block or raise."""

    def begin(self) -> None:
        """A request goes to the engine."""

    def end(self) -> None:
        """Its last byte has come, or it was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One ready Instance."""

    instance_id: str
    url: str  # "http://127.0.0.1:41234"
    api_key: str
    slots: int  # requests it serves at once
    device_id: str | None = None
    takes_priority: bool = False  # its engine orders by a "priority" in the body, lower first (vLLM)
    cache_field: str | None = None  # of its requests, by which prefix caches are kept apart: cache_salt | cache_prompt
    signals: tuple[RequestSignal, ...] = field(default=(), compare=False)  # none where no gate watches its GPU
    name: str | None = None  # of the model at its engine, put into requests that came with another; None: it looks at no name
    other_names: Mapping[str, str] = field(default_factory=dict, hash=False)  # by alias: other models of the same server
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)  # put into every request

    def name_for(self, asked: str) -> str:
        """How its engine calls the model that a caller asks for by this name."""
        return self.other_names.get(asked.removesuffix(LATEST), self.name) or asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A model without a ready instance that is on its way, or would be after a request. Times are of the steady clock."""

    slots: int  # requests it will serve at once
    seconds: float | None  # what its last start or wake took; None: never seen
    since: float | None = None  # when the start or wake began; None: a request has to begin it
    problem: str | None = None  # why the last attempt failed; None: nothing has failed
    problem_since: float = 0.0
    retry_at: float | None = None  # when the next attempt begins, where one failed
    no_room: bool = False  # the problem is that it fits nowhere now: callers are not held
    room_may_come: bool = False  # the problem is that busy models hold the room: callers wait as long as their class may

    def seconds_left(self, now: float) -> float | None:
        """None: not known, or it takes longer than it did before."""
        if self.seconds is None:
            return None
        begins = self.since if self.retry_at is None else max(self.retry_at, now)
        left = self.seconds if begins is None else begins + self.seconds - now
        return left if left >= 0 else None


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
    ranks: bool = False  # scores documents for a query: its engine would answer a request for vectors with a score


_NO_CARD = ModelCard()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What callers can name: a deployment, where it answers, and what it promises."""

    name: str  # what callers put into "model": the deployment's name
    model: str  # what it is made from
    state: str
    reason: str | None
    simulated: bool  # its device is simulated
    backends: tuple[Backend, ...]
    created: int  # seconds since the epoch
    priority: Priority = Priority.MEDIUM
    objective: ServiceObjective | None = None
    card: ModelCard = _NO_CARD
    aliases: tuple[str, ...] = ()  # other names that find it
    default: bool = False  # also found by no name
    names_more: bool = False  # once it runs, its server names others, which are asked for as "NAME:OTHER"
    deployment: str | None = None  # whose instances serve it, if it is an adapter; None: its own
    arrival: Arrival | None = None  # where no instance is ready; None then: waiting for it would be in vain
    # Worked out once, because every request asks for them.
    first_byte_promise: float | None = field(init=False, compare=False)  # seconds, to a high request: the tightest
    looser_promises: tuple[float, ...] = field(init=False, compare=False)  # the others, ascending
    slow_token_ms: tuple[float | None, ...] = field(init=False, compare=False)  # by rank: slower than this is too slow
    promises_rate: bool = field(init=False, compare=False)  # of tokens, to any class

    @property
    def owner(self) -> str:
        """The deployment whose instances serve it."""
        return self.deployment or self.name

    def __post_init__(self) -> None:
        given = [self.objective.of_class(priority) if self.objective else _NOTHING for priority in _BY_RANK]
        promises = [milliseconds / 1000 for milliseconds in sorted(set(given[-1].percentiles_ms("ttft").values()))]
        object.__setattr__(self, "first_byte_promise", promises[0] if promises else None)
        object.__setattr__(self, "looser_promises", tuple(promises[1:]))
        object.__setattr__(self, "slow_token_ms", tuple(map(_slow_token_ms, given)))
        object.__setattr__(self, "promises_rate", any(each.tokens_per_second for each in given))


def _slow_token_ms(objective: ServiceObjective) -> float | None:
    """By what nearly all were promised; a promise to half of the requests says nothing about a single one."""
    return max((ms for percent, ms in objective.percentiles_ms("tpot").items() if percent >= _NEARLY_ALL), default=None)


class RouteTable:
    """Read by every request on the event loop; replaced from any thread. Readers see the old models or the new, never a mix."""

    def __init__(self, models: Iterable[ServedModel] = ()) -> None:
        self._models: Mapping[str, ServedModel] = {model.name: model for model in models}
        self._by_name = _by_every_name(self._models)
        self._listeners: list[Callable[[], None]] = []
        self.filled = bool(self._models)  # at least once

    def find(self, name: str) -> ServedModel | None:
        """The model of this name, or with this alias, with Ollama's `:latest` or without; "": the one for no name."""
        return self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST)) or self._find_server(name)

    def _find_server(self, name: str) -> ServedModel | None:
        server = self._models.get(name.partition(":")[0])
        return server if server is not None and server.names_more else None

    def list(self) -> tuple[ServedModel, ...]:
        """All models."""
        return tuple(self._models.values())

    def replace(self, models: Iterable[ServedModel]) -> None:
        """From now on these and no others. Listeners run in the calling thread, and only where something changed."""
        after = {model.name: model for model in models}
        self.filled = True
        if after != self._models:
            self._models, self._by_name = after, _by_every_name(after)
            for listener in self._listeners:
                listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change, in the thread that made it."""
        self._listeners.append(listener)


def _by_every_name(models: Mapping[str, ServedModel]) -> Mapping[str, ServedModel]:
    """A name comes before an alias of another model."""
    named = {alias: model for model in models.values() for alias in model.aliases} | dict(models)
    default = next((model for model in models.values() if model.default), None)
    return named if default is None else named | {"": default}
