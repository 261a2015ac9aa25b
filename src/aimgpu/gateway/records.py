"""What is told about a request once it is over: never its text."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    model: str  # the served name
    instance_id: str | None  # None: no engine saw it
    caller: str
    status: int  # of the HTTP answer; 499: the caller left first
    code: str | None  # of the error, where there was one
    streamed: bool
    queued_seconds: float
    first_byte_seconds: float | None  # from arrival
    seconds: float
    output_tokens: int | None  # None: not known


class Observer(Protocol):
    def finished(self, record: RequestRecord) -> None:
        """Called once for every request that named a served model; must be quick and must not raise."""


class NoObserver:
    def finished(self, record: RequestRecord) -> None:
        """Look away."""
