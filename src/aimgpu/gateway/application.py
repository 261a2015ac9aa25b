"""The gateway as an ASGI application: `create_gateway`."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from time import monotonic

import orjson

from aimgpu.errors import (
    AimGpuError,
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    ModelForbidden,
    ModelNotFound,
    NoSuchPath,
    suggest_nearest,
)
from aimgpu.gateway.answer_privacy import make_cache_salt
from aimgpu.gateway.auth import Caller, KeyTable, identify
from aimgpu.gateway.body import (
    BodyLimits,
    ClientGone,
    HeldBytes,
    check_fields,
    check_media_type,
    encode_fields,
    hold_body,
    nested_too_deep,
    parse_body,
    read_body,
)
from aimgpu.gateway.caller_limits import CallerLimits, choose_priority, read_deadline
from aimgpu.gateway.cors import allow_origin, answer_preflight
from aimgpu.gateway.dialects.call import Call, DialectServices, EngineRequest, Fields, ModelFetcher, Operation, simulated_header
from aimgpu.gateway.dialects.errors import send_dialect_error
from aimgpu.gateway.dialects.openai.chat import SPECIAL_FIELDS
from aimgpu.gateway.dialects.table import BEYOND_ENGINES, find_operation
from aimgpu.gateway.engine_faults import StuckLimits
from aimgpu.gateway.grammar_cost import FIELDS as GRAMMAR_FIELDS
from aimgpu.gateway.grammar_cost import GrammarPolicy, check_grammars
from aimgpu.gateway.hosts import check_host
from aimgpu.gateway.http.asgi import CLOSE, JSON, Application, Head, Receive, Scope, Send, send_error, send_json
from aimgpu.gateway.http.exchange import Exchange
from aimgpu.gateway.http.upstream import PooledUpstream, Upstream
from aimgpu.gateway.openapi import describe_gateway
from aimgpu.gateway.proxy import ProxiedRequest, Proxy, engine_target
from aimgpu.gateway.public_paths import answer_public
from aimgpu.gateway.records import Observer, RequestRecord, excerpt_prompt
from aimgpu.gateway.routes import Backend, RouteTable, ServedModel
from aimgpu.gateway.slo_monitor import PressureListener, SloMonitor
from aimgpu.gateway.slots import HoldingLimits, Lease, Slots
from aimgpu.gateway.token_pace import TokenPace
from aimgpu.qos.queueing.dispatcher import RequestOutcome
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.rate import TokenBucket

log = logging.getLogger(__name__)

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
MODEL_PATHS = frozenset({CHAT_PATH, "/v1/completions", EMBEDDINGS_PATH})
_CLIENT_GONE = 499
_SERVER_ERROR = 500
_LOGGED_PER_SECOND = 10.0
_MAX_LISTED = 50
_Wire = tuple[Scope, Head, Receive, Send, Exchange | None]
_OWN_HEADERS = frozenset({b"x-aimgpu-priority", b"x-aimgpu-deadline-ms", b"traceparent"})
_ServeBody = Callable[[bytes, Caller, _Wire], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The bounds of a gateway."""

    body: BodyLimits = field(default_factory=BodyLimits)
    queue: QueuePolicy = field(default_factory=QueuePolicy)
    holding: HoldingLimits = field(default_factory=HoldingLimits)
    stall_seconds: float = 60.0  # a caller that reads nothing for so long is gone
    stuck: StuckLimits = field(default_factory=StuckLimits)
    separate_caches: bool = False  # engines reuse nothing of one key's prompts for another's
    grammars: GrammarPolicy = GrammarPolicy.CHECKED  # of callers' own
    keep_prompts: bool = False  # hand the beginning of each prompt to the observer
    origins: frozenset[bytes] = frozenset()  # web pages of these may call; see `cors.parse_origins`


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDependencies:
    """What a gateway works with beside its route table; all optional."""

    keys: KeyTable | None = None  # None lets everybody in: something else guards the door
    observer: Observer | None = None
    upstream: Upstream | None = None
    on_pressure: PressureListener | None = None
    fetcher: ModelFetcher | None = None
    fallback: Application | None = None  # answers every path that is not the gateway's own


def create_gateway(
    routes: RouteTable,
    *,
    keys: KeyTable | None = None,
    observer: Observer | None = None,
    settings: GatewaySettings | None = None,
    dependencies: GatewayDependencies | None = None,
) -> "Gateway":
    """`keys` and `observer` may be given directly or as `dependencies`."""
    dependencies = dependencies or GatewayDependencies(keys=keys, observer=observer)
    return Gateway(routes, settings or GatewaySettings(), dependencies)


class Gateway:
    """Answers OpenAI's /v1 and Ollama's /api; every other path goes to the fallback application.

    What a request needs is read from objects that this room owns and others keep up to date in the background: `routes`, the
    key table, `slots.wake_requests` and `slo_monitor`. `close` ends the connections to the engines.
    """

    def __init__(self, routes: RouteTable, settings: GatewaySettings, dependencies: GatewayDependencies) -> None:
        self.fallback = dependencies.fallback
        self._routes = routes
        self._keys = dependencies.keys
        self._settings = settings
        self._upstream = dependencies.upstream or PooledUpstream()
        self.slots = Slots(routes, settings.queue, settings.holding)
        self.slo_monitor = SloMonitor(routes, self.slots.dispatcher, dependencies.on_pressure)
        self._observer = dependencies.observer
        self._limits = CallerLimits()
        self._held = HeldBytes(settings.body.max_held_bytes)
        self._failure_log = TokenBucket.full(_LOGGED_PER_SECOND, _LOGGED_PER_SECOND, monotonic())
        self._services = DialectServices(
            version=metadata.version("aim-gpu-sharing"),
            load=self._load,
            sleeper=self.slots.wake_requests,
            ask=self._ask_engine,
            fetcher=dependencies.fetcher,
        )
        self._proxy = Proxy(self.slots, self._upstream, stall_seconds=settings.stall_seconds, stuck=settings.stuck)
        self.pace = TokenPace(self._proxy.streams)
        self._loop: asyncio.AbstractEventLoop | None = None
        routes.on_change(self._routes_changed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if scope["type"] == "lifespan":
            await _run_lifespan(self, receive, send)
            return
        if scope["type"] != "http":
            return
        if self._settings.origins:
            if await answer_preflight(scope, send, self._settings.origins):
                return
            send = allow_origin(send, dict(scope["headers"]), self._settings.origins)
        try:
            await self._answer(scope, receive, send)
        except ClientGone:
            return
        except AimGpuError as error:
            closing = (CLOSE,) if isinstance(error, BodyTooLarge) else ()
            await send_dialect_error(scope["path"], send, error, closing)

    async def close(self) -> None:
        """No request may be under way."""
        self._loop = None
        self.slo_monitor.close()
        self._proxy.stuck_engines.close()
        await self._upstream.close()

    def _routes_changed(self) -> None:
        """In any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.slots.routes_changed)

    def _identify(self, head: Head) -> Caller:
        """Raises NotAuthenticated, or NotAllowed where no key is needed and the request names another machine."""
        if self._keys is not None and not self._keys.required:
            check_host(head)
        return identify(self._keys, head)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path in MODEL_PATHS:
            exchange = _exchange_of(scope)
            head: Head = dict(scope["headers"]) if exchange is None else exchange.head
            keys = self._keys
            caller = identify(keys, head) if keys is not None and keys.required else self._identify(head)
            if scope["method"] != "POST":
                _demand_method(scope, "POST")
            check_media_type(head)
            await self._read_body(self._serve_model, caller, (scope, head, receive, send, exchange))
        elif not path.startswith(("/v1/", "/api/")) or path.startswith("/api/v1/"):
            await self._answer_other(scope, receive, send)
        else:
            await self._answer_path(path, scope, receive, send)

    async def _answer_path(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Under /v1 and /api, other than what goes to a model as it is."""
        head: Head = dict(scope["headers"])
        caller = self._identify(head)
        if path == "/v1/models":
            _demand_method(scope, "GET")
            models = self._visible(caller)
            await send_json(
                send, {"object": "list", "data": [_describe(m) for m in models], "has_more": False}, simulated_header(models)
            )
        elif path.startswith("/v1/models/"):
            _demand_method(scope, "GET")
            model = self._find(path.removeprefix("/v1/models/"), caller)
            await send_json(send, _describe(model), simulated_header((model,)))
        elif path == "/v1/openapi.json":
            _demand_method(scope, "GET")
            await self._send_description(caller, send)
        elif (operation := find_operation(scope["method"], path)) is not None:
            wire = (scope, head, receive, send, _exchange_of(scope))
            if operation.reads_body:
                check_media_type(head)
                await self._read_body(functools.partial(self._serve_operation, operation), caller, wire)
            else:
                await self._serve_operation(operation, b"", caller, wire)
        else:
            raise NoSuchPath(f"There is nothing at {path[:100]}.", hint="Models answer under /v1.")

    async def _answer_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await answer_public(scope, send, ready=self._routes.filled):
            return
        if scope["path"] == "/openapi.json":
            _demand_method(scope, "GET")
            await self._send_description(self._identify(dict(scope["headers"])), send)
            return
        if self.fallback is None:
            raise NoSuchPath(f"There is nothing at {scope['path'][:100]}.", hint="Models answer under /v1.")
        await self.fallback(scope, receive, send)

    async def _send_description(self, caller: Caller, send: Send) -> None:
        names = tuple(model.name for model in self._visible(caller))
        await send_json(send, describe_gateway(self._services.version, names))

    async def _load(self, model: ServedModel) -> None:
        """Returns once the model could answer a request. Raises a RequestRefused where it will not."""
        waiting = ProxiedRequest(model, "", b"", {}, "", monotonic())
        waiting.priority = model.priority
        taken = self.slots.take(waiting, waiting.arrived)
        lease = taken if isinstance(taken, Lease) else await taken
        lease.release(RequestOutcome.UNKNOWN)

    async def _read_body(self, serve: _ServeBody, caller: Caller, wire: _Wire) -> None:
        """The caller's limits count from here on: before the body is read, and until it is answered."""
        self._limits.enter(caller, monotonic())
        body = b""
        try:
            exchange = wire[4]
            came = None if exchange is None else exchange.take_body()
            if came is None:
                body = await read_body(wire[2], wire[1], self._settings.body, self._held)
            else:
                body = hold_body(came, self._settings.body, self._held)
            await serve(body, caller, wire)
        finally:
            self._held.drop(len(body))
            self._limits.leave(caller)

    def _serve_model(self, body: bytes, caller: Caller, wire: _Wire) -> Awaitable[None]:
        path, fields = wire[0]["path"], parse_body(body)
        if not SPECIAL_FIELDS.isdisjoint(fields) and path in BEYOND_ENGINES:
            return self._serve_operation(BEYOND_ENGINES[path], body, caller, wire)
        return self._serve(EngineRequest(path, fields, body), caller, wire)

    async def _serve_operation(self, operation: Operation, body: bytes, caller: Caller, wire: _Wire) -> None:
        scope, head, receive, send, exchange = wire

        async def serve(path: str, fields: Fields, send: Send, upload: tuple[bytes, bytes] | None = None) -> None:
            sent, content_type = upload or (encode_fields(fields), JSON[1])
            request = EngineRequest(path=path, fields=fields, body=sent, content_type=content_type)
            await self._serve(request, caller, (scope, head, receive, send, exchange))

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
        try:
            await operation.handle(call)
        except (orjson.JSONEncodeError, RecursionError):
            if exchange is None or exchange.started:
                raise
            raise nested_too_deep() from None

    async def _ask_engine(self, backend: Backend, path: str, fields: Fields) -> bytes:
        answer = await self._upstream.send(engine_target(backend.url, path, backend.api_key), encode_fields(fields))
        try:
            return await answer.read(self._settings.body.max_bytes)
        finally:
            answer.cancel()

    async def _serve(self, wanted: EngineRequest, caller: Caller, wire: _Wire) -> None:
        scope, head, receive, send, exchange = wire
        path, fields = wanted.path, wanted.fields
        model = self._find(check_fields(path, fields), caller)
        if path == EMBEDDINGS_PATH and model.card.ranks:
            hint = "It ranks documents: use /v1/rerank."
            raise InvalidRequest(f"{model.name!r} does not offer {path}.", hint=hint, param="model")
        if not GRAMMAR_FIELDS.isdisjoint(fields):
            check_grammars(fields, self._settings.grammars)
        arrived = monotonic()
        request = ProxiedRequest(model, path, wanted.body, fields, caller.name, arrived)
        if wanted.content_type is not JSON[1]:
            request.content_type = wanted.content_type
        request.streamed = fields.get("stream") is True
        request.priority = caller.priority or model.priority
        if not _OWN_HEADERS.isdisjoint(head):
            request.priority = choose_priority(caller, model.priority, head)
            request.deadline_seconds = read_deadline(head)
            request.trace_parent = head.get(b"traceparent")
        request.exchange = exchange
        request.sends_directly = exchange is not None and getattr(send, "__self__", None) is exchange
        request.hides_cache_use = self._keys is not None and self._keys.required
        if self._settings.separate_caches and request.hides_cache_use:
            request.cache_salt = make_cache_salt(caller.name)
        code: str | None = None
        flow = self.slo_monitor.begin(request) if model.promises_rate and path != EMBEDDINGS_PATH else None
        try:
            await self._proxy.pass_on(request, receive, send)
        except ClientGone:
            request.status, code = _CLIENT_GONE, "client_gone"
        except AimGpuError as error:
            request.status, code = error.http_status, error.code
            await send_error(send, error, tuple(request.headers()))
        finally:
            record = _to_record(request, code)
            if request.status >= _SERVER_ERROR:
                self._log_failure(record, scope)
            self.slo_monitor.finished(record)
            self.pace.finished(record)
            if self._observer is not None:
                record.prompt = excerpt_prompt(fields) if self._settings.keep_prompts else None
                self._observer.finished(record)
            if flow is not None:
                self.slo_monitor.end(flow, record)

    def _log_failure(self, record: RequestRecord, scope: Scope) -> None:
        """With the id that its caller got, at most ten a second; never with anything of its text."""
        if self._failure_log.take(monotonic()):
            return
        exchange = _exchange_of(scope)
        data = {
            "request_id": exchange.request_id.decode() if exchange is not None else None,
            "model": record.model,
            "instance": record.instance_id,
            "caller": record.caller,
            "status": record.status,
            "code": record.code,
            "seconds": round(record.seconds, 3),
        }
        log.warning("request.failed", extra={"data": data})

    def _find(self, name: str, caller: Caller) -> ServedModel:
        model = self._routes.find(name)
        if model is None:
            names = sorted(m.name for m in self._visible(caller))
            near = suggest_nearest([name], names)
            listed = ", ".join(names[:_MAX_LISTED]) or "none yet"
            raise ModelNotFound(f"There is no model '{name[:100]}' here.", hint=f"{near}Known models: {listed}.")
        if not caller.may_use(name):
            raise ModelForbidden(f"This API key may not use '{name}'.", param="model")
        return model

    def _visible(self, caller: Caller) -> tuple[ServedModel, ...]:
        return tuple(model for model in self._routes.list() if caller.may_use(model.name))


def _exchange_of(scope: Scope) -> Exchange | None:
    """Our own server's, which saves a request several turns of the loop; another server has none."""
    extensions = scope.get("extensions")
    return extensions.get("aimgpu.exchange") if extensions else None


def _to_record(request: ProxiedRequest, code: str | None) -> RequestRecord:
    now = monotonic()
    arrived = request.arrived
    return RequestRecord(
        request.model.name,
        request.backend.instance_id if request.backend else None,
        request.caller,
        request.priority,
        request.status,
        code,
        request.streamed,
        (request.sent or now) - arrived,
        request.first_byte - arrived if request.first_byte else None,
        now - arrived,
        request.output_tokens,
        request.recalls,
        request.trace_parent,
    )


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
        "type": "model",  # with the next two, as Anthropic's clients read it
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
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
