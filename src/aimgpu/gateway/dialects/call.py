"""One request in a dialect, and what a dialect may ask of the gateway."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from aimgpu.gateway.auth import Caller
from aimgpu.gateway.body import parse_apart
from aimgpu.gateway.dialects.response_store import ResponseStore
from aimgpu.gateway.heartbeat import Heartbeat
from aimgpu.gateway.http.asgi import JSON, Head, Header, Send
from aimgpu.gateway.routes import Backend, ServedModel
from aimgpu.pools import SmallPool

Fields = dict[str, Any]


@dataclass(slots=True)
class EngineRequest:
    """What is posted to an engine; `fields` is what the gateway checks and routes by. Not frozen: one is made per request."""

    path: str
    fields: Fields
    body: bytes
    content_type: bytes = JSON[1]
    size: int = 0  # of what was parsed, if that is more than the body


class Serve(Protocol):
    """One request to an engine: checked, queued, sent, answered into `send` in OpenAI's shape, and recorded.

    `path` is the engine's. What fails before an engine has answered goes into `send` as an error in OpenAI's shape, or is
    raised. `upload` is a body that is passed on as it came, with its content type, such as a form with a file.
    """

    async def __call__(self, path: str, fields: Fields, send: Send, upload: tuple[bytes, bytes] | None = None) -> None: ...


class ModelSleeper(Protocol):
    """Unloads idle models."""

    def sleep(self, model: str) -> None:
        """Begin to unload a model, without blocking; one that is busy stays. A request wakes it again."""


FetchProgress = Callable[[str, int, int | None], None]  # what is fetched, bytes so far, bytes in all where known


class ModelFetcher(Protocol):
    """Brings models onto this machine."""

    def pull(self, model: str, progress: FetchProgress) -> object:
        """Blocks until its files are here. Raises ModelUnavailable."""


Ask = Callable[[Backend, str, Fields], Awaitable[bytes]]
Load = Callable[[ServedModel, Heartbeat | None], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectServices:
    """What the gateway lends to every dialect."""

    version: str
    load: Load  # returns once the model could answer; raises a RequestRefused
    sleeper: ModelSleeper
    ask: Ask  # a question that needs no slot: the body of the answer
    fetcher: ModelFetcher | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)
    pulls: SmallPool = field(default_factory=lambda: SmallPool("pulls", at_once=2, waiting=8))
    template_has_tools: dict[str, bool] = field(default_factory=dict)  # by instance, if it was looked at


@dataclass(slots=True, kw_only=True)
class Call:
    method: str
    path: str
    head: Head
    body: bytes
    size: int  # of the body and of what is read beside it: whether it is worked on beside the event loop
    caller: Caller
    send: Send
    serve: Serve
    find: Callable[[str], ServedModel]  # raises ModelNotFound, ModelForbidden
    visible: Callable[[], tuple[ServedModel, ...]]  # what this caller may use
    services: DialectServices
    make_heartbeat: Callable[[Fields], Heartbeat | None]
    heartbeat: Heartbeat | None = None  # where the answer is a stream of events, and its model is not up

    async def read_fields(self) -> Fields:
        """The JSON object in the body. From then on `send` may be a heartbeat."""
        fields = await parse_apart(self.body)
        self.heartbeat = self.make_heartbeat(fields)
        self.send = self.heartbeat or self.send
        return fields


Handle = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one method of one path does. `{id}` in a path stands for one part of it."""

    method: str
    path: str
    handle: Handle
    summary: str
    reads_body: bool = True


def simulated_header(models: tuple[ServedModel, ...]) -> tuple[Header, ...]:
    """Answers about a simulated device name it as such."""
    return ((b"x-aimgpu-simulated", b"true"),) if any(model.simulated for model in models) else ()
