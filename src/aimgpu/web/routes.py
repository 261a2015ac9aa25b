"""The page and its part of the API, as an ASGI application beside the control API.

GET  /                             the page, and its two files under /page/
GET  /api/v1/session               what this browser may do
GET  /api/v1/state                 every section at once
GET  /api/v1/events                server-sent events: sections, requests, journal, samples
GET  /api/v1/timeline?seconds=     who was served when, and who waited
GET  /api/v1/requests/NUMBER/prompt  what it asked, where prompts are kept; for the daemon's user
GET  /api/v1/models/NAME           the drawer: sizing, explanation, stack fields
GET  /api/v1/stack                 the stack file for what is deployed
GET  /api/v1/catalogue             models and engines to choose from
GET  /api/v1/models/search?q=      models with this in their name: size, on disk, runs here or why not
GET  /link/CODE                    opens the page in this browser for changes, once; see `authority`
POST /api/v1/links                 makes such a link
POST /api/v1/size                  what a model would need and where it would go
POST /api/v1/what-if               what a change would do
POST /api/v1/models/NAME/sleep     and /wake
PATCH /api/v1/models/NAME          priority, pinned, keep_seconds: without a restart
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from aimgpu.control.stack.stack_text import write_fields, write_stack
from aimgpu.domain import Priority
from aimgpu.domain.codec import encode
from aimgpu.errors import AimGpuError, InvalidInput, MethodNotAllowed, UnknownDeployment
from aimgpu.placement import decision_to_json
from aimgpu.placement.explain import explain
from aimgpu.placement.preemption.planner import ask_again
from aimgpu.pools import SmallPool
from aimgpu.sizing.surplus import spend_surplus
from aimgpu.units import parse_duration_ms
from aimgpu.web.assets import SAFETY_HEADERS, Asset, find_asset
from aimgpu.web.authority import LINK_SECONDS, Authority, header_of
from aimgpu.web.deploy_check import check_deployment, describe_footprint, find_models, read_deployment, refuse_path
from aimgpu.web.doors import Door, GuardedRoute
from aimgpu.web.error_answers import answer_error, make_error_handlers
from aimgpu.web.live import Broadcaster
from aimgpu.web.request_body import read_json, refuse_unknown
from aimgpu.web.sources import Actions, Change, Json
from aimgpu.web.what_if import Supposition, suppose

_LARGEST_BODY = 1 << 20
_LONGEST_TIMELINE = 3600.0
_OWN = ("/api/v1/session", "/api/v1/state", "/api/v1/events", "/api/v1/timeline", "/api/v1/stack", "/api/v1/catalogue")
_AS_IF_NEW = "Judged as if it were placed again now, beside everything else that runs."
_OWN_POSTS = ("/api/v1/size", "/api/v1/what-if", "/api/v1/links")
_LINK, _MODELS, _REQUESTS = "/link/", "/api/v1/models/", "/api/v1/requests/"

ROUTES = (  # the first that fits counts
    ("GET", "/link/{code}", "link", Door.PAGE),
    ("POST", "/api/v1/links", "make_link", Door.CHANGE),
    ("GET", "/api/v1/session", "session", Door.OPEN),
    ("GET", "/api/v1/state", "state", Door.LOOK),
    ("GET", "/api/v1/events", "events", Door.LOOK),
    ("GET", "/api/v1/timeline", "timeline", Door.LOOK),
    ("GET", "/api/v1/stack", "stack", Door.LOOK),
    ("GET", "/api/v1/catalogue", "catalogue", Door.LOOK),
    ("POST", "/api/v1/size", "size", Door.JUDGE),
    ("POST", "/api/v1/what-if", "what_if", Door.JUDGE),
    ("GET", "/api/v1/requests/{number:int}/prompt", "prompt", Door.CHANGE),
    ("GET", "/api/v1/models/search", "search", Door.JUDGE),
    ("GET", "/api/v1/models/{name:path}", "model", Door.LOOK),
    ("PATCH", "/api/v1/models/{name}", "change", Door.CHANGE),
    ("POST", "/api/v1/models/{name}/sleep", "sleep", Door.CHANGE),
    ("POST", "/api/v1/models/{name}/wake", "wake", Door.CHANGE),
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class PageApplication:
    """`control_api` answers what is not the page's own; a browser that may write reaches it with the daemon's token."""

    def __init__(self, live: Broadcaster, actions: Actions, authority: Authority, control_api: Application) -> None:
        self._live = live
        self._authority = authority
        self._control_api = control_api
        self._own = _make_own(_Routes(live, actions, authority), authority)

    async def close(self) -> None:
        """End every open stream."""
        await self._live.close()

    @staticmethod
    def is_page(path: str) -> bool:
        """Whether it is a file of the page, or a link that opens it."""
        return find_asset(path) is not None or path.startswith(_LINK)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        asset = find_asset(path)
        if asset is not None:
            await _answer_asset(asset, scope)(scope, receive, send)
        elif path in _OWN or path in _OWN_POSTS or path.startswith((_LINK, _MODELS, _REQUESTS)):
            await self._own(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The control API knows one credential; a request that the page made and may make carries it from here on."""
        if header_of(scope, b"authorization") is not None and not self._authority.is_open_page(scope):
            await self._control_api(scope, receive, send)
            return
        try:
            self._authority.check_write(scope)  # logs and snapshots too: they are the daemon's user's alone
        except AimGpuError as error:
            await answer_error(error, SAFETY_HEADERS)(scope, receive, send)
            return
        token = (b"authorization", f"Bearer {self._authority.token}".encode())
        headers = [token, *((name, value) for name, value in scope["headers"] if name != b"authorization")]
        await self._control_api({**scope, "headers": headers}, receive, send)


def _make_own(routes: "_Routes", keeper: Authority) -> Starlette:
    return Starlette(
        routes=[GuardedRoute(path, getattr(routes, name), method, door, keeper) for method, path, name, door in ROUTES],
        exception_handlers=make_error_handlers(SAFETY_HEADERS),
    )


class _Routes:
    def __init__(self, live: Broadcaster, actions: Actions, authority: Authority) -> None:
        self._live = live
        self._state = live.state
        self._sources = live.state.sources
        self._actions = actions
        self._authority = authority
        self._pool = SmallPool("page", at_once=4, waiting=64)
        self._judging = SmallPool("size and what-if", at_once=2, waiting=8)
        self._changing = SmallPool("changes", at_once=8, waiting=32)

    async def link(self, request: Request) -> Response:
        if request.method != "GET":  # a HEAD of what previews links must not use it up
            raise MethodNotAllowed("A link is opened with GET.")
        cookie = self._authority.open_link(request.scope, request.path_params["code"])
        headers = {"cache-control": "no-store", "referrer-policy": "no-referrer", **SAFETY_HEADERS}
        return RedirectResponse("/", status_code=303, headers=headers | ({"set-cookie": cookie} if cookie else {}))

    async def make_link(self, _request: Request) -> Response:
        return _json({"url": f"{self._sources.url}{self._authority.make_link()}", "seconds": int(LINK_SECONDS)})

    async def session(self, request: Request) -> Response:
        access = self._authority.access(request.scope)
        return _json({**asdict(access), "keys_required": self._authority.keys_required})

    async def state(self, _request: Request) -> Response:
        return _json(await self._pool.run(self._state.read, self._sources.read_scores()))

    async def events(self, _request: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **SAFETY_HEADERS}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[bytes]:
        async for event in self._live.stream():
            yield event

    async def timeline(self, request: Request) -> Response:
        seconds = _number(request.query_params.get("seconds", "60"), "seconds", _LONGEST_TIMELINE)
        return _json(await self._pool.run(self._timeline, seconds))

    def _timeline(self, seconds: float) -> Json:
        now = time.time()
        since = now - seconds
        seen = self._sources.look(max_age_seconds=1.0)
        gpus = {one.id: [grant.device_id for grant in one.grants] for one in seen.instances}
        activity = self._state.activity
        served = {entry.record.instance_id: entry.record.model for entry in activity.requests()}
        served |= {one.id: one.deployment for one in seen.instances}
        turns = [
            {
                "instance": turn.instance_id,
                "began": max(turn.began, since),
                "ended": turn.ended,
                "model": served[turn.instance_id],
                "gpus": gpus.get(turn.instance_id, []),
            }
            for turn in activity.turns(since)
            if turn.instance_id in served
        ]
        waits = [
            {
                "number": entry.number,
                "model": entry.record.model,
                "priority": str(entry.record.priority),
                "began": max(entry.arrived, since),
                "ended": entry.sent or entry.ended,
                "recalls": entry.record.recalls,
                "sent": entry.sent is not None,
            }
            for entry in activity.waits(since)
        ]
        gate = [{"at": one["at"], "gate": one["gate"]} for one in self._state.history.samples() if one["at"] >= since]
        return {"now": now, "since": since, "turns": turns, "waits": waits, "gate": gate}

    async def prompt(self, request: Request) -> Response:
        return _json({"prompt": self._state.activity.prompt(request.path_params["number"])})

    async def stack(self, _request: Request) -> Response:
        seen = await self._pool.run(self._sources.look, max_age_seconds=1.0)
        headers = {"content-disposition": 'inline; filename="stack.yaml"', **SAFETY_HEADERS}
        devices = () if self._sources.cluster else seen.devices  # those of a cluster are nothing that a stack file asks for
        return Response(write_stack(seen.deployments, devices), media_type="application/yaml", headers=headers)

    async def catalogue(self, _request: Request) -> Response:
        sources = self._sources
        return _json(await self._pool.run(lambda: {"models": list(sources.catalogue()), "engines": list(sources.engines())}))

    async def search(self, request: Request) -> Response:
        """Without `q`: the model that is called "search"."""
        text = request.query_params.get("q")
        if text is None:
            return _json(await self._pool.run(self._model, "search"))
        return _json({"models": await self._judging.run(find_models, self._sources, text)})

    async def size(self, request: Request) -> Response:
        body = await read_json(request, most_bytes=_LARGEST_BODY)
        refuse_unknown(body, ("name", "fields"))
        deployment = read_deployment(body.get("name"), body.get("fields"))
        if not self._authority.may_change(request.scope):
            refuse_path(deployment)
        return _json(await self._judging.run(check_deployment, self._sources, deployment))

    async def what_if(self, request: Request) -> Response:
        given = Supposition.read(await read_json(request, most_bytes=_LARGEST_BODY))
        check = (lambda _: None) if self._authority.may_change(request.scope) else refuse_path
        return _json(await self._judging.run(suppose, self._sources, given, check))

    async def model(self, request: Request) -> Response:
        return _json(await self._pool.run(self._model, request.path_params["name"]))

    def _model(self, name: str) -> Json:
        seen = self._sources.look(max_age_seconds=1.0)
        deployment = next((one for one in seen.deployments if one.name == name), None)
        if deployment is None:
            raise UnknownDeployment.of(name, known=(one.name for one in seen.deployments))
        footprint = self._state.footprint(name)
        held = [one.grants for one in seen.instances if one.deployment == name and one.grants and one.sized_bytes is not None]
        if footprint is not None and held:
            footprint = spend_surplus(footprint, min(grant.memory_bytes for grant in held[0]))
        explained = self._sources.explain(name) if self._sources.explain else self._explain(name)
        return {
            "name": name,
            "stack": write_stack([deployment]),
            "fields": write_fields(deployment, masked=True),
            "footprint": describe_footprint(footprint) if footprint else None,
            "explanations": list(explained),
        }

    def _explain(self, name: str) -> list[Json]:
        snapshot = self._sources.take_snapshot()
        explained = []
        for instance_id, ask in sorted(snapshot.running.items()):
            if ask.deployment == name:
                found = explain(snapshot.without_instance(instance_id), ask_again(snapshot, instance_id))
                explained.append(
                    {
                        "instance": instance_id,
                        "facts": [],
                        "decision": decision_to_json(found.decision),
                        "devices": encode(found.devices),
                        "note": _AS_IF_NEW,
                    }
                )
        return explained

    async def sleep(self, request: Request) -> Response:
        done = await self._changing.run(self._actions.sleep, request.path_params["name"])
        return _json({"done": done})

    async def wake(self, request: Request) -> Response:
        done = await self._changing.run(self._actions.wake, request.path_params["name"])
        return _json({"done": done})

    async def change(self, request: Request) -> Response:
        change = read_change(await read_json(request, most_bytes=_LARGEST_BODY))
        changed = await self._changing.run(self._actions.change, request.path_params["name"], change)
        return _json({"name": changed.name, "priority": changed.ask.priority.value, "keep_seconds": changed.keep_seconds})


def read_change(body: Mapping[str, Any]) -> Change:
    """Of a PATCH of a model. Raises InvalidInput."""
    refuse_unknown(body, ("priority", "pinned", "keep"))
    priority, pinned, keep = body.get("priority"), body.get("pinned"), body.get("keep")
    if priority is not None and priority not in [one.value for one in Priority]:
        raise InvalidInput(f"priority {priority!r} is not high, medium or low")
    if pinned is not None and not isinstance(pinned, bool):
        raise InvalidInput("pinned is true or false")
    if keep is not None and not isinstance(keep, str):
        raise InvalidInput("keep is a duration such as 10m")
    if pinned is not None and pinned == (keep is not None):
        text = "a pinned model has no keep" if pinned else "a model that is not pinned needs a keep"
        raise InvalidInput(text, hint='Send {"pinned": true}, or {"keep": "10m"}.')
    if priority is None and pinned is None and keep is None:
        raise InvalidInput("nothing to change", hint="Send priority, pinned or keep.")
    return Change(
        priority=Priority(priority) if priority else None,
        pinned=pinned,
        keep_seconds=parse_duration_ms(keep) // 1000 if keep else None,
    )


def _answer_asset(asset: Asset, scope: Scope) -> Response:
    headers = {name: value for name, value in scope["headers"] if name in (b"accept-encoding", b"if-none-match")}
    common = {**SAFETY_HEADERS, "etag": asset.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if scope["method"] not in ("GET", "HEAD"):
        return Response(status_code=405, headers={"allow": "GET, HEAD"})
    if headers.get(b"if-none-match") == asset.tag.encode():
        return Response(status_code=304, headers=common)
    if b"gzip" in headers.get(b"accept-encoding", b""):
        return Response(asset.packed, media_type=asset.media_type, headers={**common, "content-encoding": "gzip"})
    return Response(asset.body, media_type=asset.media_type, headers=common)


def _json(content: Json) -> Response:
    return JSONResponse(content, headers={"cache-control": "no-store", **SAFETY_HEADERS})


def _number(text: str, name: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise InvalidInput(f"{name}={text[:20]!r} is not a number") from error
    if not 0 < value <= most:
        raise InvalidInput(f"{name} is above 0 and at most {most:g}")
    return value
