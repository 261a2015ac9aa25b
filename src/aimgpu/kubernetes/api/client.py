"""The one door to the Kubernetes API server: plain objects over aiohttp.

A client library would cost the node agent 60 MB and two seconds at start; what is needed are six verbs and a watch.
`Client.from_environment` finds the API server as kubectl and pods do.
"""

import asyncio
import json
import logging
import random
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import aiohttp

from aimgpu.errors import ClusterConflict, ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.api.access import Access, read_access
from aimgpu.kubernetes.api.foreign_objects import leaving_out

log = logging.getLogger(__name__)

Object = dict[str, Any]
Keep = Callable[[Object], bool]
PatchKind = Literal["merge", "strategic", "json", "apply"]
_PATCH_TYPES: Mapping[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}
_UNAUTHORIZED, _NOT_FOUND, _CONFLICT, _GONE, _TIMEOUT = 401, 404, 409, 410, 504
# Answers to a watch after which its version is of no use: the kind was removed and may be made again, the version is forgotten,
# or it is of the future, as after etcd was restored from a backup.
_LIST_AGAIN = (_NOT_FOUND, _GONE, _TIMEOUT)
_REQUEST_SECONDS = 30.0
_WATCH_SECONDS = 300  # the server ends a watch after so long, at most twice that, and it is begun again
_SILENT_SECONDS = 60.0 + 2 * _WATCH_SECONDS
_PAGE = 500
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_LONGEST_ABSENCE_SECONDS = 60.0  # between two looks for a kind that the server does not have
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a watch without news looks like a lost connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind of object: ``Resource(group="resource.k8s.io", version="v1", plural="resourceclaims", namespaced=True)``."""

    version: str
    plural: str
    group: str = ""
    namespaced: bool = False

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return root + within + f"/{self.plural}" + (f"/{name}" if name else "") + (f"/{subresource}" if subresource else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """One change seen by a watch. SYNCED and ABSENT have no object: everything was listed; the server has no such kind."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "SYNCED", "ABSENT"]
    object: Object


class Client:
    """Requests raise ClusterFailed, NotFoundInCluster or ClusterConflict with the server's own message."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def from_environment(cls) -> Self:
        """By ``$KUBECONFIG``, as a pod, or by ``~/.kube/config``. Raises ClusterFailed where there is none of them."""
        return cls(read_access())

    @property
    def namespace(self) -> str | None:
        """That of the kubeconfig's context, where it names one."""
        return self._access.namespace

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def version(self) -> tuple[int, int, int]:
        """Major, minor and patch version of the API server's program; 0 for a patch that it does not report."""
        reported = await self.request("GET", "/version")
        release = re.match(r"v\d+\.\d+\.(\d+)", reported.get("gitVersion") or "")
        minor = int("".join(char for char in reported["minor"] if char.isdigit()) or 0)
        return int(reported["major"]), minor, int(release[1]) if release else 0

    async def serves(self, group_version: str) -> bool:
        """Whether the API server has this group and version, such as ``resource.k8s.io/v1``."""
        try:
            await self.request("GET", f"/apis/{group_version}")
        except NotFoundInCluster:
            return False
        return True

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        return await self.request("GET", resource.path(namespace, name))

    async def find(self, resource: Resource, name: str, namespace: str | None = None) -> Object | None:
        """None where there is no such object."""
        try:
            return await self.get(resource, name, namespace)
        except NotFoundInCluster:
            return None

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        keep: Keep | None = None,
    ) -> tuple[list[Object], str]:
        """All objects and the resource version that a watch can start from. `keep`: only these, for what no selector says."""
        items: list[Object] = []
        query = {"limit": str(_PAGE)} | _selectors(labels, fields)
        while True:
            page = await self.request("GET", resource.path(namespace), query=query)
            items += (item for item in page.get("items") or () if _keeps(keep, item))
            if not page["metadata"].get("continue"):
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = page["metadata"]["continue"]

    async def create(self, resource: Resource, body: Object, namespace: str | None = None) -> Object:
        return await self.request("POST", resource.path(namespace), body=body)

    async def replace(
        self, resource: Resource, body: Object, namespace: str | None = None, *, subresource: str | None = None
    ) -> Object:
        path = resource.path(namespace, body["metadata"]["name"], subresource)
        return await self.request("PUT", path, body=body)

    async def patch(  # noqa: PLR0913 - what a patch is made of
        self,
        resource: Resource,
        name: str,
        body: object,
        namespace: str | None = None,
        *,
        kind: PatchKind = "merge",
        subresource: str | None = None,
        manager: str = "aimgpu",
        dry_run: bool = False,
    ) -> Object:
        """``kind="apply"`` is server-side apply, which creates what is not there and takes fields from other managers."""
        query = {"fieldManager": manager} | ({"force": "true"} if kind == "apply" else {})
        if dry_run:
            query["dryRun"] = "All"
        path = resource.path(namespace, name, subresource)
        return await self.request("PATCH", path, body=body, query=query, content_type=_PATCH_TYPES[kind])

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        version: str | None = None,
        propagation: str | None = None,
    ) -> bool:
        """Whether there was one. `version`: only as it was then; raises ClusterConflict where it has changed since.

        `propagation`: what becomes of what it owns, such as "Background"; None: what is usual for its kind.
        """
        options: Object = {"preconditions": {"resourceVersion": version}} if version else {}
        options |= {"propagationPolicy": propagation} if propagation else {}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options} if options else None
        try:
            await self.request("DELETE", resource.path(namespace, name), body=body)
        except NotFoundInCluster:
            return False
        return True

    async def delete_all(self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = "") -> None:
        """In one request, without reading them."""
        await self.request("DELETE", resource.path(namespace), query=_selectors(labels, fields))

    async def watch(  # noqa: PLR0913 - what is watched
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        keep: Keep | None = None,
        resync_seconds: float | None = None,
    ) -> AsyncIterator[WatchEvent]:
        """Every object as ADDED, then SYNCED, then changes, for ever; lost connections are taken up again.

        A kind that the server does not have is ABSENT first, and is waited for.
        After a gap that the server cannot bridge everything is listed again: objects that went in the gap are reported as
        DELETED, so a consumer that keeps a map of what it saw stays right. `keep`: other objects are not reported, one that
        becomes another is DELETED. `resync_seconds`: what is older than that is listed again when a watch is next renewed.
        """
        clock = asyncio.get_running_loop().time
        seen: dict[tuple[str, str], Object] = {}
        pause, version, listed, refusal, absent = _FIRST_PAUSE_SECONDS, None, clock(), None, False
        while True:
            begun = clock()
            try:
                if version is None:
                    items, version = await self.list(resource, namespace, labels=labels, fields=fields, keep=keep)
                    listed, absent = clock(), False
                    for event in _differences(seen, items):
                        yield event
                    yield WatchEvent(type="SYNCED", object={})
                async for change, latest in self._stream(resource, namespace, version, _selectors(labels, fields)):
                    pause, version = _FIRST_PAUSE_SECONDS, latest
                    if change is not None and (kept := _kept(seen, change, keep)) is not None:
                        _remember(seen, kept)
                        yield kept
            except ClusterFailed as error:
                if error.status == _NOT_FOUND and version is None and not absent:
                    absent = True
                    yield WatchEvent(type="ABSENT", object={})
                if error.status in _LIST_AGAIN:
                    version = None
                if error.status != refusal:  # a server that is back refuses what its caches do not know yet, for a moment
                    pause, refusal = _FIRST_PAUSE_SECONDS, error.status
                _log_loss(resource, error)
            if resync_seconds is not None and clock() - listed >= resync_seconds:
                version = None
            if clock() - begun > _LONGEST_PAUSE_SECONDS:  # it went well for a while
                pause = _FIRST_PAUSE_SECONDS
            await asyncio.sleep(_spread(pause / 2, pause))
            pause = min(pause * 2, _LONGEST_ABSENCE_SECONDS if absent else _LONGEST_PAUSE_SECONDS)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        data = None if body is None else _encode(body)
        headers = {"Content-Type": content_type} if data is not None else {}
        options = {"data": data, "headers": headers, "params": query}
        login = self._access.login
        try:
            return await self._ask(method, path, **options)
        except ClusterFailed as error:
            if error.status != _UNAUTHORIZED or login is None:
                raise
        await login.refresh(refused=login.token)  # withdrawn before it expired
        return await self._ask(method, path, **options)

    async def _ask(self, method: str, path: str, **options: Any) -> Object:  # noqa: ANN401 - aiohttp's own
        async with self._send(method, path, timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS), **options) as response:
            answer: Object = await response.json(content_type=None)
            return answer

    async def read_lines(self, path: str, query: Mapping[str, str] | None = None) -> AsyncIterator[str]:
        """An answer that is text, line by line as it comes: logs."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_SECONDS)
        async with self._send("GET", path, params=query, timeout=timeout) as response:
            async for line in _lines(response.content, keep_rest=True):
                yield line.decode(errors="replace")

    @asynccontextmanager
    async def open_proxied(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[int, Mapping[str, str], AsyncIterator[bytes]]]:
        """POST to a pod through the API server: status, headers and the body as it comes. What a pod refuses is its answer."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_SECONDS)
        async with self._send("POST", path, data=body, headers=dict(headers), timeout=timeout, refusals=True) as response:
            if response.status >= 400:  # noqa: PLR2004 - HTTP
                reported = await _status_of(response)
                if reported.get("kind") == "Status":
                    raise _failure(response.status, reported)
                yield response.status, response.headers, _whole(json.dumps(reported).encode())
            else:
                yield response.status, response.headers, response.content.iter_any()

    def with_token(self, token: str) -> "Client":
        """A client of the same server for someone else, who has this token; close it after use."""
        return Client(replace(self._access, token=token, token_file=None, login=None))

    async def _stream(
        self, resource: Resource, namespace: str | None, version: str, selectors: Mapping[str, str]
    ) -> AsyncIterator[tuple[WatchEvent | None, str]]:
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true", **selectors}
        query["timeoutSeconds"] = str(round(_spread(_WATCH_SECONDS, 2 * _WATCH_SECONDS)))
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENT_SECONDS)
        async with self._send("GET", resource.path(namespace), params=query, timeout=timeout) as response:
            async for line in _lines(response.content):
                message = json.loads(line)
                if message["type"] == "ERROR":
                    raise _failure(message["object"].get("code", 0), message["object"])
                version = message["object"]["metadata"]["resourceVersion"]
                bookmark = message["type"] == "BOOKMARK"
                yield (None if bookmark else WatchEvent(type=message["type"], object=message["object"])), version

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        *,
        refusals: bool = False,
        **options: Any,  # noqa: ANN401 - aiohttp's own
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """`refusals`: they are yielded too."""
        login = self._access.login
        if login is not None:
            await login.refresh()
        headers = {**options.pop("headers", {}), **self._access.headers()}
        try:
            async with self._opened().request(method, self._access.server + path, headers=headers, **options) as response:
                if response.status >= 400 and not refusals:  # noqa: PLR2004 - HTTP
                    raise _failure(response.status, await _status_of(response))
                yield response
        except (aiohttp.ClientError, ssl.SSLError, TimeoutError) as error:
            raise ClusterFailed(
                f"cannot reach the Kubernetes API server at {self._access.server}: {error or type(error).__name__}",
                hint="Check the network and the kubeconfig.",
            ) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._access.context, limit=32, socket_factory=_make_socket)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


def _log_loss(resource: Resource, error: ClusterFailed) -> None:
    if error.status not in (_GONE, _NOT_FOUND):
        log.warning("watch.lost", extra={"data": {"resource": resource.plural, "reason": error.message}})


def _spread(least: float, most: float) -> float:
    """So that the programs of many nodes do not ask in the same moment, as after a restart of the server."""
    return random.uniform(least, most)  # noqa: S311 - a moment, not a secret


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One whose other end is asked for a sign of life: without it, a watch would wait for minutes for a server that is gone."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _encode(body: object) -> bytes:
    """As the API server itself writes JSON: sorted and without spaces.

    It keeps the parameters of a claim byte by byte, but writes them its own way when the claim's status is patched. If the two
    differ it takes that for a change of the allocation, and refuses every later status of the claim.
    """
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _key(found: Object) -> tuple[str, str]:
    return found["metadata"].get("namespace", ""), found["metadata"]["name"]


def _kept(seen: dict[tuple[str, str], Object], event: WatchEvent, keep: Keep | None) -> WatchEvent | None:
    """The event for a consumer that keeps some objects: None for one that it never saw and does not keep."""
    if keep is None or (event.type != "DELETED" and _keeps(keep, event.object)):
        return event
    return replace(event, type="DELETED") if _key(event.object) in seen else None


def _keeps(keep: Keep | None, item: Object) -> bool:
    """An object that cannot be looked at is not kept."""
    with leaving_out(item):
        return keep is None or keep(item)
    return False


def _remember(seen: dict[tuple[str, str], Object], event: WatchEvent) -> None:
    """Names and versions only: a consumer that wants the objects keeps them itself."""
    metadata = {name: event.object["metadata"].get(name) for name in ("name", "namespace", "resourceVersion", "uid")}
    if event.type == "DELETED":
        seen.pop(_key(event.object), None)
    else:
        seen[_key(event.object)] = {"metadata": {key: value for key, value in metadata.items() if value is not None}}


def _differences(seen: dict[tuple[str, str], Object], items: list[Object]) -> list[WatchEvent]:
    """Events for the differences between a new list and what was seen before."""
    present = {_key(item) for item in items}
    events = [WatchEvent(type="DELETED", object=old) for key, old in list(seen.items()) if key not in present]
    for item in items:
        old = seen.get(_key(item))
        if old is None:
            events.append(WatchEvent(type="ADDED", object=item))
        elif old["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion"):
            events.append(WatchEvent(type="MODIFIED", object=item))
    for event in events:
        _remember(seen, event)
    return events


async def _lines(stream: aiohttp.StreamReader, *, keep_rest: bool = False) -> AsyncIterator[bytes]:
    """Whole lines of any length; aiohttp's own reader refuses those above its buffer.

    `keep_rest`: empty ones too, and one that does not end.
    """
    rest = b""
    async for chunk in stream.iter_any():
        rest += chunk
        *whole, rest = rest.split(b"\n")
        for line in whole:
            if keep_rest or line.strip():
                yield line
    if keep_rest and rest:
        yield rest


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _status_of(response: aiohttp.ClientResponse) -> Object:
    text = await response.text()
    try:
        parsed = json.loads(text)
    except ValueError:
        return {"message": text[:500]}
    return parsed if isinstance(parsed, dict) else {"message": text[:500]}


def _failure(status: int, reported: Object) -> ClusterFailed:
    kind = {_NOT_FOUND: NotFoundInCluster, _CONFLICT: ClusterConflict}.get(status, ClusterFailed)
    message = reported.get("message") or f"the API server answered with status {status}"
    causes = (reported.get("details") or {}).get("causes") or ()
    budgets = [cause["message"] for cause in causes if cause.get("reason") == "DisruptionBudget" and cause.get("message")]
    return kind(" ".join([message, *budgets]), status=status, reason=reported.get("reason"))
