"""How the gateway learns where a model answers; the daemon keeps it up to date from the controller's events."""

from dataclasses import dataclass
from typing import Protocol

from aimgpu.domain import Priority, ServiceObjective


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


class Directory(Protocol):
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


class Announcer(Protocol):
    """Is told when an instance begins and ends a request, so that others on its GPU can make way. Must not block or raise."""

    def begin(self, instance_id: str) -> None: ...

    def end(self, instance_id: str) -> None: ...
