"""What is recorded about a request once it is over: never its text, unless the operator switched keeping prompts on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from aimgpu.domain import Priority

_MOST_CHARACTERS = 2000
_MOST_PARTS = 20


@dataclass(slots=True)
class RequestRecord:
    """Written once; neither frozen nor by keyword only, which would cost three times as much as the record itself."""

    model: str  # the served name
    instance_id: str | None  # None: no engine saw it
    caller: str
    priority: Priority
    status: int  # of the HTTP answer; 499: the caller left first
    code: str | None  # of the error, if there was one
    streamed: bool
    queued_seconds: float
    first_byte_seconds: float | None  # from arrival
    seconds: float
    output_tokens: int | None  # None: not known
    recalls: int = 0  # times its slot was taken back for something more urgent, before it was answered
    trace_parent: bytes | None = None  # W3C trace context, where the caller sent one
    prompt: str | None = None  # an excerpt, only where prompts are kept; see `excerpt_prompt`

    @property
    def ttft_seconds(self) -> float | None:
        """To the first token; only a stream shows it: without one the first comes with the last."""
        return self.first_byte_seconds if self.streamed else None

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first; only a stream shows it."""
        if not self.streamed or self.first_byte_seconds is None or not self.output_tokens or self.output_tokens < 2:  # noqa: PLR2004
            return None
        return (self.seconds - self.first_byte_seconds) / (self.output_tokens - 1)


def excerpt_prompt(fields: Mapping[str, object]) -> str:
    """The last message of a chat, or the text of a completion or embedding; its first characters only."""
    messages = fields.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    found = last.get("content") if isinstance(last, dict) else fields.get("prompt", fields.get("input"))
    if isinstance(found, list):
        found = " ".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in found[:_MOST_PARTS])
    text = found if isinstance(found, str) else ""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


class Observer(Protocol):
    """Gets a record of every request."""

    def finished(self, record: RequestRecord) -> None:
        """Called once for every request that named a served model; must be quick and must not raise."""
