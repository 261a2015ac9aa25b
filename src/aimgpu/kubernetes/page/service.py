"""Serves the page of a cluster to browsers on the same machine; to a pod, `kubectl port-forward` is on the same machine."""

import asyncio
import importlib.metadata
import secrets
import socket
import time
from collections.abc import MutableMapping
from typing import Any, NoReturn

import uvicorn

from aimgpu.errors import AimGpuError, NoSuchPath, NotAllowed
from aimgpu.gateway.hosts import check_host
from aimgpu.gateway.http.asgi import Receive, Send, send_error
from aimgpu.gateway.http.server import caller_config
from aimgpu.kubernetes.api_client import Client
from aimgpu.kubernetes.page.follower import ClusterFollower
from aimgpu.qos.slo.activity import ActivityLog
from aimgpu.web.authority import Authority, Scope
from aimgpu.web.live import Broadcaster, PageState
from aimgpu.web.routes import PageApplication
from aimgpu.web.sources import Actions, Sources

READ_ONLY = "This page shows a cluster and changes nothing. Use `aimgpu up --on kubernetes`, `down`, or kubectl."
_PROBE = "/healthz"
_SHUTDOWN_SECONDS = 2


class ReadOnlyAuthority(Authority):
    """Browsers on this machine may look; nobody may change anything here."""

    def __init__(self) -> None:
        super().__init__(secrets.token_hex(32), keys_required=lambda: False)

    def _why_not(self, scope: Scope) -> str | None:  # noqa: ARG002 - for everyone
        return READ_ONLY


class ClusterPage:
    """An ASGI application; make it on the event loop, and run `follower.run()` beside it."""

    def __init__(self, follower: ClusterFollower, url: str) -> None:
        live = Broadcaster(PageState(_make_sources(follower, url), ActivityLog(time.time)))
        live.start()
        actions = Actions(sleep=_refuse, wake=_refuse, change=lambda _name, _change: _refuse())
        self._follower = follower
        self._page = PageApplication(live, actions, ReadOnlyAuthority(), _answer_nothing)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            if scope["path"] == _PROBE:
                await _answer_probe(send, ready=self._follower.synced)
                return
            check_host(dict(scope["headers"]))
            await self._page(scope, receive, send)
        except AimGpuError as error:
            await send_error(send, error)

    async def close(self) -> None:
        """End every open stream."""
        await self._page.close()


async def serve_page(client: Client, *, host: str, port: int, namespace: str | None) -> None:
    """Until it is cancelled; prints the address first."""
    follower = ClusterFollower(client, namespace)
    listener = socket.create_server((host, port))
    url = f"http://{host}:{listener.getsockname()[1]}"
    page = ClusterPage(follower, url)
    server = uvicorn.Server(caller_config(page, shutdown_seconds=_SHUTDOWN_SECONDS))
    print(f"{url}/", flush=True)  # noqa: T201 - for the one who started it
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(follower.run())
            await server.serve(sockets=[listener])
            raise asyncio.CancelledError  # a signal ended the server
    finally:
        await page.close()


def _make_sources(follower: ClusterFollower, url: str) -> Sources:
    return Sources(
        version=importlib.metadata.version("aim-gpu-sharing"),
        url=url,
        look=follower.look,
        read_scores=follower.read_scores,
        read_residents=tuple,
        read_waiting=dict,
        wait_for_change=follower.wait_for_change,
        read_notes=follower.read_notes,
        take_snapshot=_refuse,
        size=_refuse,
        catalogue=tuple,
        engines=tuple,
        read_only=READ_ONLY,
    )


def _refuse(*_: object) -> NoReturn:
    raise NotAllowed(READ_ONLY, hint="Sizes and placements of a cluster: `aimgpu plan` with a snapshot, or `aimgpu size`.")


async def _answer_nothing(scope: MutableMapping[str, Any], _receive: Receive, send: Send) -> None:
    await send_error(send, NoSuchPath(f"There is nothing at {str(scope['path'])[:100]}.", hint=READ_ONLY))


async def _answer_probe(send: Send, *, ready: bool) -> None:
    await send({"type": "http.response.start", "status": 200 if ready else 503, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"ok\n" if ready else b"not ready\n"})
