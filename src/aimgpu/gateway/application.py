"""The front door as an ASGI application: `create_gateway`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from time import monotonic

import orjson

from aimgpu.errors import AimGpuError, BodyTooLarge, MethodNotAllowed, ModelForbidden, ModelNotFound, NoSuchPath
from aimgpu.gateway.auth import Caller, Keys, identify
from aimgpu.gateway.body import BodyLimits, ClientGone, check_fields, check_media_type, parse_body, read_body
from aimgpu.gateway.caller_limits import CallerLimits, choose_priority, read_deadline
from aimgpu.gateway.dialects.call import Call, DialectServices, EngineRequest, Fields, Operation, simulated_header
from aimgpu.gateway.dialects.errors import send_dialect_error
from aimgpu.gateway.dialects.table import find_operation
from aimgpu.gateway.http.asgi import CLOSE, JSON, Head, Receive, Scope, Send, send_error, send_json
from aimgpu.gateway.http.upstream import PooledUpstream, Upstream
from aimgpu.gateway.openapi import describe_gateway
from aimgpu.gateway.proxy import ProxiedRequest, Proxy
from aimgpu.gateway.records import Observer, Observers, RequestRecord
from aimgpu.gateway.routes import ModelSleeper, RequestSignals, RouteTable, ServedModel, Waker
from aimgpu.gateway.slo_monitor import PressureListener, SloMonitor
from aimgpu.gateway.slots import Slots
from aimgpu.qos.queueing.policy import QueuePolicy

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
MODEL_PATHS = frozenset({CHAT_PATH, "/v1/completions", EMBEDDINGS_PATH})
_CLIENT_GONE = 499
_MAX_LISTED = 50
_Wire = tuple[Scope, Head, Receive, Send]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    body: BodyLimits = field(default_factory=BodyLimits)
    queue: QueuePolicy = field(default_factory=QueuePolicy)
    stall_seconds: float = 60.0  # a caller who reads nothing for so long is gone
    longest_wake_seconds: float = 300.0  # a request is held at most so long while its model wakes


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDependencies:
    """What a gateway works with beside its directory; all optional."""

    keys: Keys | None = None  # None lets everybody in: bind such a gateway to loopback only
    observer: Observer | None = None
    waker: Waker | None = None
    upstream: Upstream | None = None
    on_pressure: PressureListener | None = None
    announcer: RequestSignals | None = None
    sleeper: ModelSleeper | None = None


def create_gateway(
    directory: RouteTable,
    *,
    keys: Keys | None = None,
    observer: Observer | None = None,
    settings: GatewaySettings | None = None,
    parts: GatewayDependencies | None = None,
) -> "Gateway":
    """`keys` and `observer` may be given directly or as `parts`."""
    parts = parts or GatewayDependencies(keys=keys, observer=observer)
    return Gateway(directory, settings or GatewaySettings(), parts)


class Gateway:
    """Answers OpenAI's /v1 and Ollama's /api/chat and /api/tags. `close` ends the connections to the engines."""

    def __init__(self, directory: RouteTable, settings: GatewaySettings, parts: GatewayDependencies) -> None:
        self._directory = directory
        self._keys = parts.keys
        self._settings = settings
        self._upstream = parts.upstream or PooledUpstream()
        self.slots = Slots(directory, settings.queue, parts.waker, settings.longest_wake_seconds)
        self.slots.announcer = parts.announcer
        self.board = SloMonitor(directory, self.slots.dispatcher, parts.on_pressure)
        self._observer = Observers([self.board, *([parts.observer] if parts.observer else [])])
        self._limits = CallerLimits()
        self._services = DialectServices(
            version=metadata.version("aim-gpu-sharing"),
            waker=parts.waker,
            sleeper=parts.sleeper,
            longest_wake_seconds=settings.longest_wake_seconds,
        )
        self._relay = Proxy(self.slots, self._upstream, stall_seconds=settings.stall_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _run_lifespan(self, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except ClientGone:
            return
        except AimGpuError as error:
            closing = (CLOSE,) if isinstance(error, BodyTooLarge) else ()
            await send_dialect_error(scope["path"], send, error, closing)

    async def close(self) -> None:
        self.board.close()
        await self._upstream.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        head: Head = dict(scope["headers"])
        caller = identify(self._keys, head)
        if path in MODEL_PATHS:
            _demand_method(scope, "POST")
            check_media_type(head)
            body = await read_body(receive, head, self._settings.body)
            request = EngineRequest(path=path, fields=parse_body(body), body=body)
            await self._serve(request, caller, (scope, head, receive, send))
        elif path == "/v1/models":
            _demand_method(scope, "GET")
            models = self._visible(caller)
            await send_json(send, {"object": "list", "data": [_describe(m) for m in models]}, simulated_header(models))
        elif path.startswith("/v1/models/"):
            _demand_method(scope, "GET")
            model = self._find(path.removeprefix("/v1/models/"), caller)
            await send_json(send, _describe(model), simulated_header((model,)))
        elif path == "/v1/openapi.json":
            _demand_method(scope, "GET")
            names = tuple(model.name for model in self._visible(caller))
            await send_json(send, describe_gateway(self._services.version, names))
        elif (operation := find_operation(scope["method"], path)) is not None:
            await self._serve_operation(operation, caller, (scope, head, receive, send))
        else:
            raise NoSuchPath(f"There is nothing at {path[:100]}.", hint="Models answer under /v1.")

    async def _serve_operation(self, operation: Operation, caller: Caller, wire: _Wire) -> None:
        scope, head, receive, send = wire
        body = b""
        if operation.reads_body:
            check_media_type(head)
            body = await read_body(receive, head, self._settings.body)

        async def serve(path: str, fields: Fields, send: Send, upload: tuple[bytes, bytes] | None = None) -> None:
            sent, content_type = upload or (orjson.dumps(fields), JSON[1])
            request = EngineRequest(path=path, fields=fields, body=sent, content_type=content_type)
            await self._serve(request, caller, (scope, head, receive, send))

        call = Call(
            method=scope["method"],
            path=scope["path"],
            head=head,
            body=body,
            caller=caller,
            send=send,
            serve=serve,
            find=lambda name: self._find(name, caller),
            visible=lambda: self._visible(caller),
            services=self._services,
        )
        await operation.handle(call)

    async def _serve(self, request: EngineRequest, caller: Caller, wire: _Wire) -> None:
        scope, head, receive, send = wire
        path, fields = request.path, request.fields
        model = self._find(check_fields(path, fields), caller)
        arrived = monotonic()
        passage = ProxiedRequest(model, path, request.body, fields, caller.name, arrived)
        passage.content_type = request.content_type
        passage.streamed = fields.get("stream") is True
        passage.priority = choose_priority(caller, model.priority, head)
        passage.deadline_seconds = read_deadline(head)
        passage.exchange = scope.get("extensions", {}).get("aimgpu.exchange")
        self._limits.enter(caller, arrived)
        code: str | None = None
        flow = self.board.begin(passage) if model.promises_rate and path != EMBEDDINGS_PATH else None
        try:
            await self._relay.pass_on(passage, receive, send)
        except ClientGone:
            passage.status, code = _CLIENT_GONE, "client_gone"
        except AimGpuError as error:
            passage.status, code = error.http_status, error.code
            await send_error(send, error, tuple(passage.headers()))
        finally:
            self._limits.leave(caller)
            record = _to_record(passage, code)
            self._observer.finished(record)
            if flow is not None:
                self.board.end(flow, record)

    def _find(self, name: str, caller: Caller) -> ServedModel:
        model = self._directory.find(name)
        if model is None:
            names = ", ".join(sorted(m.name for m in self._visible(caller))[:_MAX_LISTED]) or "none yet"
            raise ModelNotFound(f"There is no model '{name[:100]}' here.", hint=f"Known models: {names}.")
        if not _may_use(caller, name):
            raise ModelForbidden(f"This API key may not use '{name}'.", param="model")
        return model

    def _visible(self, caller: Caller) -> tuple[ServedModel, ...]:
        return tuple(model for model in self._directory.list() if _may_use(caller, model.name))


def _to_record(passage: ProxiedRequest, code: str | None) -> RequestRecord:
    now = monotonic()
    arrived = passage.arrived
    return RequestRecord(
        passage.model.name,
        passage.backend.instance_id if passage.backend else None,
        passage.caller,
        passage.priority,
        passage.status,
        code,
        passage.streamed,
        (passage.sent or now) - arrived,
        passage.first_byte - arrived if passage.first_byte else None,
        now - arrived,
        passage.output_tokens,
        passage.recalls,
    )


def _may_use(caller: Caller, name: str) -> bool:
    return caller.models is None or name in caller.models


def _demand_method(scope: Scope, method: str) -> None:
    """The server leaves the body of an answer to HEAD out."""
    if scope["method"] != method and (scope["method"], method) != ("HEAD", "GET"):
        error = MethodNotAllowed(f"{scope['path'][:100]} takes {method}.")
        error.allowed = "GET, HEAD" if method == "GET" else method
        raise error


def _describe(model: ServedModel) -> Mapping[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "aimgpu",
        "root": model.model,
        "state": model.state,
        "simulated": model.simulated,
    }


async def _run_lifespan(gateway: Gateway, receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await gateway.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
