"""How the gateway learns where a model answers; the daemon keeps it up to date from the controller's events."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One ready Instance."""

    instance_id: str
    url: str  # "http://127.0.0.1:41234"
    api_key: str
    slots: int  # requests it serves at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str  # what callers put into "model": the deployment's name
    model: str  # what it is made from
    state: str
    reason: str | None
    simulated: bool  # its Device is simulated
    backends: tuple[Backend, ...]
    created: int  # seconds since the epoch


class Directory(Protocol):
    def find(self, name: str) -> ServedModel | None: ...

    def list(self) -> tuple[ServedModel, ...]: ...
