"""What the controller reports while it works: to a terminal, an HTTP stream, or nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EventKind(StrEnum):
    PLAN = "plan"
    STEP = "step"
    PROGRESS = "progress"
    STATE = "state"
    GRANTED = "granted"  # to a caller that becomes the program
    REFUSED = "refused"
    ERROR = "error"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: EventKind
    text: str
    deployment: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"event": self.kind.value, "text": self.text, "deployment": self.deployment, **self.data}


Emit = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """For callers that do not follow."""
