"""Serves the page of a cluster to browsers on the same machine; to a pod, `kubectl port-forward` is on the same machine."""

import asyncio
import importlib.metadata
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import uvicorn

from aimgpu.control.sizing_inputs.model_names import list_candidates
from aimgpu.engines.models.hub import GGUF
from aimgpu.errors import AimGpuError, NoSuchPath
from aimgpu.gateway.hosts import check_host
from aimgpu.gateway.http.asgi import Receive, Send, send_error
from aimgpu.gateway.http.server import caller_config
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.models.page.callers import Callers, ClusterAuthority
from aimgpu.kubernetes.models.page.chat_proxy import CHAT, ChatProxy
from aimgpu.kubernetes.models.page.cluster_sizing import size_in_cluster, snapshot_of
from aimgpu.kubernetes.models.page.control_api import ApplySettings, ClusterControl
from aimgpu.kubernetes.models.page.follower import ClusterFollower
from aimgpu.kubernetes.models.serving.cluster_view import ClusterView
from aimgpu.kubernetes.models.serving.manifests import DEFAULT_ENGINE
from aimgpu.sizing import built_in
from aimgpu.web.authority import check_site
from aimgpu.web.live import Broadcaster, PageState
from aimgpu.web.routes import PageApplication
from aimgpu.web.sources import Actions, ClusterFacts, FoundModel, Json, Sources

_PROBE = "/healthz"
_SHUTDOWN_SECONDS = 2
_ENGINES = ("llamacpp", "vllm", "ollama")
_READERS = {DEFAULT_ENGINE: frozenset({GGUF})}
_MOST_FOUND = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """`own_rights`: a browser of this process' user may change things with the rights that this process has."""

    host: str
    port: int
    namespace: str | None  # whose models are shown; None: all
    own_rights: bool
    applied: ApplySettings


class ClusterPage:
    """An ASGI application; make it on the event loop, and run `follower.run()` beside it."""

    def __init__(self, client: Client, follower: ClusterFollower, settings: PageSettings, url: str) -> None:
        authority = ClusterAuthority(own_rights=settings.own_rights)
        callers = Callers(client, authority)
        live = Broadcaster(PageState(_make_sources(follower, settings, url), follower.activity))
        live.start()
        actions = Actions(sleep=_elsewhere, wake=_elsewhere, change=lambda _name, _change: _elsewhere())
        self.authority = authority
        self._follower = follower
        self._control = ClusterControl(callers, follower, settings.applied)
        self._chat = ChatProxy(callers, ClusterView(client, settings.applied.namespace))
        self._page = PageApplication(live, actions, authority, _answer_nothing)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI."""
        path: str = scope["path"]
        try:
            if path == _PROBE:
                await _answer_probe(send, ready=self._follower.synced)
                return
            check_host(dict(scope["headers"]))
            if not self._page.is_page(path):
                check_site(scope)
            if path == CHAT:
                await self._chat(scope, receive, send)
            elif ClusterControl.handles(scope["method"], path):
                await self._control.application(scope, receive, send)
            else:
                await self._page(scope, receive, send)
        except AimGpuError as error:
            await send_error(send, error)

    async def close(self) -> None:
        """End every open stream, and what waits for pods."""
        await self._control.close()
        await self._page.close()


async def serve_page(client: Client, settings: PageSettings) -> None:
    """Until it is cancelled; prints the address first."""
    follower = ClusterFollower(client, settings.namespace)
    listener = socket.create_server((settings.host, settings.port))
    url = f"http://{settings.host}:{listener.getsockname()[1]}"
    page = ClusterPage(client, follower, settings, url)
    server = uvicorn.Server(caller_config(page, shutdown_seconds=_SHUTDOWN_SECONDS))
    path = page.authority.make_link() if settings.own_rights else "/"
    print(url + path, flush=True)  # noqa: T201 - for the one who started it
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(follower.run())
            await server.serve(sockets=[listener])
            raise asyncio.CancelledError  # a signal ended the server
    finally:
        await page.close()


def _make_sources(follower: ClusterFollower, settings: PageSettings, url: str) -> Sources:
    def facts() -> ClusterFacts:
        return ClusterFacts(
            models={name: str(item["metadata"]["namespace"]) for name, item in follower.models()},
            namespace=settings.applied.namespace,
            endpoint=follower.endpoint,
            own_rights=settings.own_rights,
        )

    return Sources(
        version=importlib.metadata.version("aimgpu"),
        url=url,
        look=follower.look,
        read_scores=follower.read_scores,
        read_residents=tuple,
        read_waiting=dict,
        wait_for_change=follower.wait_for_change,
        read_notes=follower.read_notes,
        take_snapshot=lambda: snapshot_of(follower.look()),
        size=lambda deployment: size_in_cluster(deployment, follower.look()),
        catalogue=_list_catalogue,
        search=lambda text: [FoundModel(candidate=one) for one in list_candidates(built_in(), text, _READERS, _MOST_FOUND)],
        engines=lambda: [{"name": name, "available": True, "reason": None} for name in _ENGINES],
        cluster=facts,
        explain=follower.explain,
    )


def _list_catalogue() -> Sequence[Json]:
    return [{"id": row.facts.name, "parameters": row.facts.parameters} for row in built_in().rows]


def _elsewhere(*_: object) -> NoReturn:
    raise NoSuchPath("Changes of a cluster are made by its control API.")


async def _answer_nothing(scope: MutableMapping[str, Any], _receive: Receive, send: Send) -> None:
    await send_error(send, NoSuchPath(f"The page of a cluster has nothing at {str(scope['path'])[:100]}."))


async def _answer_probe(send: Send, *, ready: bool) -> None:
    await send({"type": "http.response.start", "status": 200 if ready else 503, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"ok\n" if ready else b"not ready\n"})
