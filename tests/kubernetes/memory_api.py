"""A Kubernetes API server in memory, over HTTP: enough for programs that read, write and watch objects, and it can fail.

Objects have uids, resource versions and a status that is written apart from the rest; stale writes are conflicts. Fields of
features that are switched off are dropped without an error, as the real server does. What the real one checks beyond that
(schemas, admission, rights) is left to tests on a cluster.
"""

import asyncio
import copy
import json
import re
import ssl
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from aimgpu.kubernetes.api.access import Access
from aimgpu.kubernetes.api.client import Client, Object, Resource

_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>status))?"
)
Key = tuple[str, str, str]  # plural, namespace, name


@dataclass(slots=True, kw_only=True)
class _Fault:
    method: str
    plural: str
    status: int
    times: int


@dataclass(slots=True)
class MemoryApi:
    server: str = ""
    version: tuple[int, int, int] = (1, 36, 4)
    served: set[str] = field(default_factory=lambda: {"resource.k8s.io/v1"})
    dropped: set[str] = field(default_factory=set)  # names of fields that this server does not keep
    keeps_device_status: bool = True  # of claims
    away: bool = False  # every request fails
    objects: dict[Key, Object] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # methods and paths
    _number: int = 0
    _faults: list[_Fault] = field(default_factory=list)
    _watches: list[tuple[str, str, "asyncio.Queue[Object | None]"]] = field(default_factory=list)
    _history: list[tuple[int, Key, Object]] = field(default_factory=list)  # versions and events
    _oldest: int = 0  # versions before it are forgotten

    # What tests do with it.

    def client(self) -> Client:
        return Client(Access(server=self.server, context=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)))

    def add(self, resource: Resource, body: Object, namespace: str = "") -> Object:
        return self._store("ADDED", (resource.plural, namespace, body["metadata"]["name"]), copy.deepcopy(body))

    def change(self, resource: Resource, name: str, patch: Object, namespace: str = "") -> Object:
        key = (resource.plural, namespace, name)
        return self._store("MODIFIED", key, _merged(self.objects[key], patch))

    def remove(self, resource: Resource, name: str, namespace: str = "") -> None:
        key = (resource.plural, namespace, name)
        self._announce("DELETED", key, self.objects.pop(key))

    def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        return self.objects[resource.plural, namespace, name]

    def all(self, resource: Resource) -> list[Object]:
        return [found for (plural, _, _), found in sorted(self.objects.items()) if plural == resource.plural]

    def fail(self, method: str, resource: Resource, status: int = 503, times: int = 1) -> None:
        """Answer so many of these requests with an error."""
        self._faults.append(_Fault(method=method, plural=resource.plural, status=status, times=times))

    @property
    def faults_left(self) -> int:
        return sum(fault.times for fault in self._faults)

    def count(self, method: str, resource: Resource) -> int:
        return sum(one == method and f"/{resource.plural}" in path for one, path in self.requests)

    def close_watches(self) -> None:
        """As a server that restarts."""
        for _, _, queue in self._watches:
            queue.put_nowait(None)

    def watched(self, resource: Resource) -> int:
        """Watches of this kind that are open."""
        return sum(plural == resource.plural for plural, _, _ in self._watches)

    def compact(self) -> None:
        """Forget what was before: a watch that starts there gets 410 Gone."""
        self._oldest = self._number

    # How it answers.

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        return _error(503, "the server is away") if self.away else await self._answer(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/version":
            major, minor, patch = self.version
            return web.json_response(
                {"major": str(major), "minor": f"{minor}+", "gitVersion": f"v{major}.{minor}.{patch}-eks-1"}
            )
        if (group := path.removeprefix("/apis/")) in self.served:
            return web.json_response({"kind": "APIResourceList", "groupVersion": group})
        match = _PATH.fullmatch(path)
        if match is None or (path.startswith("/apis/") and "/".join(path.split("/")[2:4]) not in self.served):
            return _error(404, f"there is no {path}")
        for fault in self._faults:
            if fault.times and (fault.method, fault.plural) == (request.method, match["plural"]):
                fault.times -= 1
                return _error(fault.status, "the server is out of order")
        key = (match["plural"], match["namespace"] or "", match["name"] or "")
        if request.query.get("watch"):
            return await self._watch(request, key[0])
        body = await request.json() if request.can_read_body else {}
        act = getattr(self, f"_{request.method.lower()}")
        answer: web.Response = act(key, body, request, match["subresource"])
        return answer

    def _get(self, key: Key, _body: Object, request: web.Request, _subresource: str | None) -> web.Response:
        if key[2]:
            found = self.objects.get(key)
            return _error(404, f"{key[0]} {key[2]} not found") if found is None else web.json_response(found)
        selector = request.query.get("fieldSelector", "")
        items = [
            found
            for (plural, namespace, _), found in sorted(self.objects.items())
            if plural == key[0] and key[1] in ("", namespace) and _selected(found, selector)
        ]
        return web.json_response({"metadata": {"resourceVersion": str(self._number)}, "items": items})

    def _post(self, key: Key, body: Object, _request: web.Request, _subresource: str | None) -> web.Response:
        key = (key[0], key[1], body["metadata"]["name"])
        if key in self.objects:
            return _error(409, f"{key[2]} already exists", "AlreadyExists")
        return web.json_response(self._store("ADDED", key, body), status=201)

    def _put(self, key: Key, body: Object, _request: web.Request, _subresource: str | None) -> web.Response:
        old = self.objects.get(key)
        if old is None:
            return _error(404, f"{key[2]} not found")
        if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
            return _error(409, "the object has been modified", "Conflict")
        return web.json_response(self._store("MODIFIED", key, body))

    def _patch(self, key: Key, body: Object, _request: web.Request, subresource: str | None) -> web.Response:
        old = self.objects.get(key)
        if old is None:
            return _error(404, f"{key[2]} not found")
        if (uid := body.get("metadata", {}).get("uid")) not in (None, old["metadata"]["uid"]):
            return _error(409, f"the uid is {old['metadata']['uid']}, not {uid}", "Conflict")
        kept = {"status": body.get("status") or {}} if subresource else {name: body[name] for name in body if name != "status"}
        if key[0] == "resourceclaims" and not self.keeps_device_status:
            kept.get("status", {}).pop("devices", None)
        fresh = _merged(old, kept)
        if _without(fresh, self.dropped) == old:  # the real one neither stores nor announces it either
            return web.json_response(old)
        return web.json_response(self._store("MODIFIED", key, fresh))

    def _delete(self, key: Key, _body: Object, _request: web.Request, _subresource: str | None) -> web.Response:
        found = self.objects.pop(key, None)
        if found is None:
            return _error(404, f"{key[2]} not found")
        self._announce("DELETED", key, found)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        queue: asyncio.Queue[Object | None] = asyncio.Queue()
        since, selector = int(request.query["resourceVersion"]), request.query.get("fieldSelector", "")
        if since < self._oldest:
            queue.put_nowait({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
            queue.put_nowait(None)
        for version, key, past in self._history:
            if version > since and key[0] == plural and _selected(past["object"], selector):
                queue.put_nowait(past)
        entry = (plural, selector, queue)
        self._watches.append(entry)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watches.remove(entry)
        return response

    def _store(self, kind: str, key: Key, body: Object) -> Object:
        self._number += 1
        old = self.objects.get(key, {"metadata": {}})["metadata"]
        metadata = body["metadata"]
        metadata.setdefault("uid", old.get("uid") or str(uuid.uuid4()))
        metadata["resourceVersion"] = str(self._number)
        if key[1]:
            metadata["namespace"] = key[1]
        stored: Object = _without(body, self.dropped)
        self.objects[key] = stored
        self._announce(kind, key, stored)
        return stored

    def _announce(self, kind: str, key: Key, found: Object) -> None:
        if kind == "DELETED":
            self._number += 1
            found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._number)}}
        event = {"type": kind, "object": found}
        self._history.append((self._number, key, event))
        for plural, selector, queue in self._watches:
            if plural == key[0] and _selected(found, selector):
                queue.put_nowait(event)


@asynccontextmanager
async def memory_api() -> AsyncIterator[MemoryApi]:
    api = MemoryApi()
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    api.server = f"http://{host}:{port}"
    try:
        yield api
    finally:
        api.close_watches()
        await runner.cleanup()


def _selected(found: Object, selector: str) -> bool:
    for term in filter(None, selector.split(",")):
        path, _, value = term.partition("=")
        part: Any = found
        for name in path.split("."):
            part = part.get(name, {})
        if part != value:
            return False
    return True


def _merged(old: Any, patch: Any) -> Any:
    """A merge patch, RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result


def _without(value: Any, names: Iterable[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(each, names) for name, each in value.items() if name not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else copy.deepcopy(value)


def _error(status: int, message: str, reason: str = "") -> web.Response:
    return web.json_response({"kind": "Status", "code": status, "message": message, "reason": reason}, status=status)
