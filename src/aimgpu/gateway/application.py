"""The front door as an ASGI application: `create_gateway`."""

import asyncio
from dataclasses import dataclass, field

from aimgpu.errors import AimGpuError, BodyTooLarge, MethodNotAllowed, ModelForbidden, ModelNotFound, NoSuchPath
from aimgpu.gateway.asgi import CLOSE, Header, Receive, Scope, Send, send_error, send_json
from aimgpu.gateway.body import BodyLimits, ClientGone, check_fields, check_media_type, parse_body, read_body
from aimgpu.gateway.directory import Directory, ServedModel
from aimgpu.gateway.keys import Caller, Keys, identify
from aimgpu.gateway.records import NoObserver, Observer, RequestRecord
from aimgpu.gateway.relay import Passage, Relay
from aimgpu.gateway.slots import Slots
from aimgpu.gateway.upstream import PooledUpstream, Upstream

MODEL_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
_CLIENT_GONE = 499
_MAX_LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    body: BodyLimits = field(default_factory=BodyLimits)
    max_queued: int = 512  # per model


def create_gateway(
    directory: Directory,
    *,
    keys: Keys | None = None,
    observer: Observer | None = None,
    settings: GatewaySettings | None = None,
    upstream: Upstream | None = None,
) -> "Gateway":
    """`keys=None` lets everybody in: bind such a gateway to loopback only."""
    settings = settings or GatewaySettings()
    return Gateway(directory, keys, observer or NoObserver(), settings, upstream or PooledUpstream())


class Gateway:
    """Answers everything under /v1. `close` ends the connections to the engines."""

    def __init__(
        self, directory: Directory, keys: Keys | None, observer: Observer, settings: GatewaySettings, upstream: Upstream
    ) -> None:
        self._directory = directory
        self._keys = keys
        self._observer = observer
        self._settings = settings
        self._upstream = upstream
        self.slots = Slots(directory, max_queued=settings.max_queued)
        self._relay = Relay(self.slots, upstream)

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
            await send_error(send, error, (CLOSE,) if isinstance(error, BodyTooLarge) else ())

    async def close(self) -> None:
        await self._upstream.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        caller = identify(self._keys, scope["headers"])
        if path in MODEL_PATHS:
            _demand_method(scope, "POST")
            await self._serve(path, caller, scope["headers"], receive, send)
        elif path == "/v1/models":
            _demand_method(scope, "GET")
            models = [_describe(model) for model in self._directory.list() if _may_use(caller, model.name)]
            await send_json(send, {"object": "list", "data": models}, _any_simulated(self._directory.list()))
        elif path.startswith("/v1/models/"):
            _demand_method(scope, "GET")
            model = self._find(path.removeprefix("/v1/models/"), caller)
            await send_json(send, _describe(model), _any_simulated((model,)))
        else:
            raise NoSuchPath(f"There is nothing at {path[:100]}.", hint="Models answer under /v1.")

    async def _serve(self, path: str, caller: Caller, headers: list[Header], receive: Receive, send: Send) -> None:
        arrived = asyncio.get_running_loop().time()
        check_media_type(headers)
        body = await read_body(receive, headers, self._settings.body)
        fields = parse_body(body)
        model = self._find(check_fields(path, fields), caller)
        passage = Passage(
            model=model,
            path=path,
            body=body,
            streamed=fields.get("stream") is True,
            caller=caller.name,
            arrived=arrived,
        )
        code: str | None = None
        try:
            await self._relay.pass_on(passage, receive, send)
        except ClientGone:
            passage.status, code = _CLIENT_GONE, "client_gone"
        except AimGpuError as error:
            passage.status, code = error.http_status, error.code
            await send_error(send, error, passage.headers())
        finally:
            self._report(passage, code)

    def _find(self, name: str, caller: Caller) -> ServedModel:
        model = self._directory.find(name)
        if model is None:
            known = sorted(m.name for m in self._directory.list() if _may_use(caller, m.name))
            names = ", ".join(known[:_MAX_LISTED]) or "none yet"
            raise ModelNotFound(f"There is no model '{name[:100]}' here.", hint=f"Known models: {names}.")
        if not _may_use(caller, name):
            raise ModelForbidden(f"This API key may not use '{name}'.", param="model")
        return model

    def _report(self, passage: Passage, code: str | None) -> None:
        now = asyncio.get_running_loop().time()
        arrived = passage.arrived
        self._observer.finished(
            RequestRecord(
                model=passage.model.name,
                instance_id=passage.backend.instance_id if passage.backend else None,
                caller=passage.caller,
                status=passage.status,
                code=code,
                streamed=passage.streamed,
                queued_seconds=(passage.sent or now) - arrived,
                first_byte_seconds=passage.first_byte - arrived if passage.first_byte else None,
                seconds=now - arrived,
                output_tokens=passage.output_tokens,
            )
        )


def _may_use(caller: Caller, name: str) -> bool:
    return caller.models is None or name in caller.models


def _demand_method(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise MethodNotAllowed(f"{scope['path']} takes {method}.")


def _describe(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "aimgpu",
        "root": model.model,
        "state": model.state,
        "simulated": model.simulated,
    }


def _any_simulated(models: tuple[ServedModel, ...]) -> tuple[Header, ...]:
    return ((b"x-aimgpu-simulated", b"true"),) if any(model.simulated for model in models) else ()


async def _run_lifespan(gateway: Gateway, receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await gateway.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
