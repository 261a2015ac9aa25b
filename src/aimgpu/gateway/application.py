"""The gateway as an ASGI application: `create_gateway`."""

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from time import monotonic

import orjson

from aimgpu.errors import (
    AimGpuError,
    BodyTooLarge,
    EngineFailed,
    InvalidRequest,
    MethodNotAllowed,
    ModelForbidden,
    ModelNotFound,
    ModelNotReady,
    NoSuchPath,
    suggest_nearest,
)
from aimgpu.gateway.answer_privacy import make_cache_salt
from aimgpu.gateway.apart import LARGE_BYTES, apart
from aimgpu.gateway.auth import Caller, KeyTable, identify
from aimgpu.gateway.body import (
    LONGEST_NAME,
    MOST_VALUES,
    BodyLimits,
    ClientGone,
    HeldBytes,
    check_fields,
    check_media_type,
    encode_fields,
    has_more_values,
    hold_body,
    nested_too_deep,
    parse_apart,
    parse_body,
    read_body,
)
from aimgpu.gateway.caller_limits import CallerLimits, choose_priority, read_deadline
from aimgpu.gateway.cors import allow_origin, answer_preflight
from aimgpu.gateway.dialects.call import Call, DialectServices, EngineRequest, Fields, ModelFetcher, Operation, simulated_header
from aimgpu.gateway.dialects.errors import send_dialect_error
from aimgpu.gateway.dialects.table import BEYOND_ENGINES, find_operation
from aimgpu.gateway.engine_faults import StuckLimits
from aimgpu.gateway.grammar_cost import FIELDS as GRAMMAR_FIELDS
from aimgpu.gateway.grammar_cost import GrammarPolicy, check_grammars
from aimgpu.gateway.heartbeat import EVENT_PATHS, Heartbeat
from aimgpu.gateway.hosts import check_forwarded, check_host, check_origin
from aimgpu.gateway.http.asgi import CLOSE, JSON, Application, Head, Receive, Scope, Send, send_error, send_json
from aimgpu.gateway.http.exchange import Exchange
from aimgpu.gateway.http.upstream import PooledUpstream, Upstream
from aimgpu.gateway.media import check_media, may_name_media
from aimgpu.gateway.openapi import describe_gateway
from aimgpu.gateway.proxy import ProxiedRequest, Proxy, ProxyLimits, engine_target
from aimgpu.gateway.public_paths import answer_public
from aimgpu.gateway.records import Observer, RequestRecord, excerpt_prompt
from aimgpu.gateway.routes import Backend, RouteTable, ServedModel
from aimgpu.gateway.slo_monitor import PressureListener, SloMonitor
from aimgpu.gateway.slots import HoldingLimits, Lease, Slots
from aimgpu.gateway.token_pace import TokenPace
from aimgpu.qos.queueing.dispatcher import RequestOutcome
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.rate import TokenBucket
from aimgpu.qos.slo.arbiter import Arbiter

log = logging.getLogger(__name__)

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
MODEL_PATHS = frozenset({CHAT_PATH, "/v1/completions", EMBEDDINGS_PATH})
LISTING_PATHS = ("/v1/models", "/v1/models/{id}", "/v1/openapi.json", "/openapi.json")  # read by GET
_CLIENT_GONE = 499
_SERVER_ERROR = 500
_LOGGED_PER_SECOND = 10.0
_MAX_LISTED = 50
_RETRY_SECONDS = 1
_Wire = tuple[Scope, Head, Receive, Send, Exchange | None]
_OWN_HEADERS = frozenset({b"x-aimgpu-priority", b"x-aimgpu-deadline-ms", b"traceparent"})
_ServeBody = Callable[[bytes, Caller, _Wire], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The bounds of a gateway."""

    body: BodyLimits = field(default_factory=BodyLimits)
    queue: QueuePolicy = field(default_factory=QueuePolicy)
    holding: HoldingLimits = field(default_factory=HoldingLimits)
    stall_seconds: float = 60.0  # a caller that reads nothing for this long is gone
    wake_heartbeat_seconds: float = 5.0  # between the comments that a stream gets while its model wakes; 0: none
    stuck: StuckLimits = field(default_factory=StuckLimits)
    separate_caches: bool = True  # engines reuse nothing of one key's prompts for another's, but within its `cache_group`
    media_domains: frozenset[str] = frozenset()  # that URLs in requests may name: engines fetch them
    grammars: GrammarPolicy = GrammarPolicy.CHECKED  # of callers' own
    keep_prompts: bool = False  # hand the beginning of each prompt to the observer
    hosts: frozenset[str] = frozenset()  # names of this machine beside its own; see `hosts.parse_hosts`
    origins: frozenset[bytes] = frozenset()  # web pages of these may call; see `cors.parse_origins`


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDependencies:
    """What a gateway works with beside its route table; all optional."""

    keys: KeyTable | None = None  # None lets everybody in: something else guards the door
    observer: Observer | None = None
    upstream: Upstream | None = None
    on_pressure: PressureListener | None = None
    arbiter: Arbiter | None = None  # of promises and pressure, where something else writes the shares of the launch gate
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
        self.slo_monitor = SloMonitor(routes, self.slots.dispatcher, dependencies.on_pressure, dependencies.arbiter)
        self._observer = dependencies.observer
        self._limits = CallerLimits()
        self._held = HeldBytes(settings.body.max_held_bytes)
        self._failure_log = TokenBucket.full(_LOGGED_PER_SECOND, _LOGGED_PER_SECOND, monotonic())
        self._services = DialectServices(
            version=metadata.version("aimgpu"),
            load=self._load,
            sleeper=self.slots.wake_requests,
            ask=self._ask_engine,
            fetcher=dependencies.fetcher,
        )
        limits = ProxyLimits(held=self._held, stall_seconds=settings.stall_seconds, stuck=settings.stuck)
        self._proxy = Proxy(self.slots, self._upstream, limits)
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
        """Raises NotAuthenticated, or NotAllowed where no key is needed and the request is another machine's or site's."""
        if self._keys is not None and not self._keys.required:
            check_forwarded(head)
            check_host(head, self._settings.hosts)
            check_origin(head, self._settings.origins)
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

    async def _load(self, model: ServedModel, heartbeat: Heartbeat | None) -> None:
        """Returns once the model could answer a request. Raises a RequestRefused where it will not."""
        waiting = ProxiedRequest(model, "", b"", {}, "", monotonic())
        waiting.priority = model.priority
        taken = self.slots.take(waiting, waiting.arrived)
        if isinstance(taken, Lease):
            lease = taken
        else:
            lease = await (taken if heartbeat is None else heartbeat.during(taken))
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

    async def _serve_large(self, body: bytes, caller: Caller, wire: _Wire) -> None:
        await self._serve_model(body, caller, wire, await parse_apart(body))

    def _serve_model(self, body: bytes, caller: Caller, wire: _Wire, fields: Fields | None = None) -> Awaitable[None]:
        """`fields`: what was parsed already."""
        if fields is None:
            if len(body) > LARGE_BYTES:
                return self._serve_large(body, caller, wire)
            fields = parse_body(body)
        path = wire[0]["path"]
        beyond = BEYOND_ENGINES.get(path)
        if beyond is not None and beyond[1](fields):
            return self._serve_operation(beyond[0], body, caller, wire)
        return self._serve(EngineRequest(path, fields, body), caller, wire)

    async def _serve_operation(self, operation: Operation, body: bytes, caller: Caller, wire: _Wire) -> None:
        scope, head, receive, send, exchange = wire

        async def serve(path: str, fields: Fields, send: Send, upload: tuple[bytes, bytes] | None = None) -> None:
            sent, content_type = upload or (await apart(call.size, encode_fields, fields), JSON[1])
            request = EngineRequest(path=path, fields=fields, body=sent, content_type=content_type)
            await self._serve(request, caller, (scope, head, receive, send, exchange), call.heartbeat)

        def make_heartbeat(fields: Fields) -> Heartbeat | None:
            name = fields.get("model") or ""
            model = self._routes.find(name) if isinstance(name, str) else None
            return self._make_heartbeat(model, scope["path"], fields, send) if model is not None else None

        call = Call(
            method=scope["method"],
            path=scope["path"],
            head=head,
            body=body,
            size=len(body),
            caller=caller,
            send=send,
            serve=serve,
            find=lambda name: self._find(name, caller),
            visible=lambda: self._visible(caller),
            services=self._services,
            make_heartbeat=make_heartbeat,
        )
        try:
            await operation.handle(call)
        except AimGpuError as error:
            if call.heartbeat is None or not call.heartbeat.begun:
                raise
            await send_dialect_error(call.path, call.heartbeat, error)
        except (orjson.JSONEncodeError, RecursionError):
            if exchange is None or exchange.started:
                raise
            raise nested_too_deep() from None

    async def _ask_engine(self, backend: Backend, path: str, fields: Fields) -> bytes:
        sent = encode_fields(fields)
        if may_name_media(sent):
            check_media(fields, self._settings.media_domains)
        answer = await self._upstream.send(engine_target(backend.url, path, backend.api_key), sent)
        try:
            found = await answer.read(self._settings.body.max_bytes)
        finally:
            answer.cancel()
        if len(found) > LARGE_BYTES and has_more_values(found, MOST_VALUES):
            raise EngineFailed(f"The engine's answer has more than {MOST_VALUES} values.")
        return found

    def _check(self, wanted: EngineRequest, caller: Caller) -> ServedModel:
        """The model that is asked. In any thread."""
        path, fields = wanted.path, wanted.fields
        name = check_fields(path, fields)
        model = self._find(name, caller)
        if path == EMBEDDINGS_PATH and model.card.ranks:
            hint = "It ranks documents: use /v1/rerank."
            raise InvalidRequest(f"{model.name!r} does not offer {path}.", hint=hint, param="model")
        if may_name_media(wanted.body):
            check_media(fields, self._settings.media_domains)
        if not GRAMMAR_FIELDS.isdisjoint(fields):
            check_grammars(fields, self._settings.grammars)
        return model

    async def _serve(self, wanted: EngineRequest, caller: Caller, wire: _Wire, heartbeat: Heartbeat | None = None) -> None:
        """`heartbeat`: the caller's, where its dialect has made one."""
        scope, head, receive, send, exchange = wire
        size = max(len(wanted.body), wanted.size)
        model = self._check(wanted, caller) if size <= LARGE_BYTES else await apart(size, self._check, wanted, caller)
        path, fields = wanted.path, wanted.fields
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
        if caller.answer_bytes:
            request.most_answer_bytes = caller.answer_bytes
        if not model.backends:
            request.heartbeat = heartbeat
            send = self._beat(request, scope["path"], send)
        request.hides_cache_use = self._keys is not None and self._keys.required
        if self._settings.separate_caches and self._keys is not None and self._keys.cache_groups > 1:
            request.cache_salt = make_cache_salt(caller.cache)
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

    def _beat(self, request: ProxiedRequest, path: str, send: Send) -> Send:
        """Gives the request a heartbeat, where its caller's dialect has not; returns what to send its answer by."""
        if request.heartbeat is not None or request.path != path:
            return send
        request.heartbeat = self._make_heartbeat(request.model, path, request.fields, send)
        if request.heartbeat is None:
            return send
        request.sends_directly = False
        return request.heartbeat

    def _make_heartbeat(self, model: ServedModel, path: str, fields: Fields, send: Send) -> Heartbeat | None:
        """None: this caller waits for nothing, or could make nothing of comments."""
        seconds = self._settings.wake_heartbeat_seconds
        if model.backends or not seconds or path not in EVENT_PATHS or fields.get("stream") is not True:
            return None
        return Heartbeat(send, path, simulated_header((model,)), seconds, functools.partial(self._describe_wait, model))

    def _describe_wait(self, model: ServedModel) -> str:
        model = self.slots.find_current(model)
        left = model.arrival.seconds_left(monotonic()) if model.arrival is not None else None
        return f"waking {model.name}" + (f", about {math.ceil(left)} s" if left is not None else "")

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
        if model is None and not name:
            raise InvalidRequest("'model' must name a model.", hint="GET /v1/models lists them.", param="model")
        if model is None and len(name) > LONGEST_NAME:
            raise ModelNotFound("There is no model here with a name of this length.", hint="GET /v1/models lists them.")
        if model is None and not self._routes.list():  # in the first moments of `aimgpu up`
            hint = "Ask again in a moment, or start some with `aimgpu up`."
            raise ModelNotReady("No model is served here yet.", hint=hint, retry_after_seconds=_RETRY_SECONDS)
        if model is None:
            names = sorted(m.name for m in self._visible(caller))
            near = suggest_nearest([name], [*names, *(alias for m in self._visible(caller) for alias in m.aliases)])
            listed = ", ".join(names[:_MAX_LISTED]) or "none that this key may use"
            raise ModelNotFound(f"There is no model '{name[:100]}' here.", hint=f"{near}Known models: {listed}.")
        if caller.models is not None and not _may_use(caller, model):
            raise ModelForbidden(f"This API key may not use '{name or model.name}'.", param="model")
        return model

    def _visible(self, caller: Caller) -> tuple[ServedModel, ...]:
        return tuple(model for model in self._routes.list() if _may_use(caller, model))


def _may_use(caller: Caller, model: ServedModel) -> bool:
    """A key names a model by any of its names."""
    return caller.models is None or any(map(caller.may_use, (model.name, *model.aliases)))


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
        "reason": model.arrival.problem if model.arrival is not None and model.arrival.problem else model.reason,
        "simulated": model.simulated,
        "parent": model.deployment,
        "aliases": list(model.aliases),
        "default": model.default,
        **({"start_seconds": round(model.arrival.seconds)} if model.arrival and model.arrival.seconds else {}),
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
