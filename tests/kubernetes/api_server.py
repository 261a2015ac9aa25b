"""An API server in the process of a test, for programs that are otherwise real: our client talks HTTP to it.

For what a real one is too slow or too well to show: every crash point, refusals, gaps in watches, hundreds of objects.
"""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from queue import Queue
from threading import Thread
from typing import Any

from aiohttp import web
from tests.kubernetes.object_store import Object, ObjectStore, Place, Rejected

from aimgpu.kubernetes.api.access import Access
from aimgpu.kubernetes.api.client import Client

Fault = Callable[[str, str], int | None]  # method and path: a status to answer with; None: nothing is wrong
_READING = ("GET",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a path names."""

    collection: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def place(self) -> Place:
        return self.collection, self.namespace, self.name


def read_path(path: str) -> Target:
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    name, subresource = ([*rest[1:], "", ""])[:2]
    return Target(collection=rest[0] if rest else "", namespace=namespace, name=name, subresource=subresource)


@dataclass
class ApiServer:
    """`writes`: what was written, as "METHOD path"; `fault`: what to refuse."""

    store: ObjectStore = field(default_factory=ObjectStore)
    writes: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)  # without watches
    fault: Fault = field(default=lambda _method, _path: None)
    absent: set[str] = field(default_factory=lambda: {"nvidia.com/v1", "serving.kserve.io/v1beta1"})  # groups, not served
    minor: str = "36"  # of its version
    user: Object = field(default_factory=dict)  # who asks, as a SelfSubjectReview reports it
    budgets: set[str] = field(default_factory=set)  # pods that may not be evicted now
    logs: dict[str, str] = field(default_factory=dict)  # of pods, by name; with " before": of the container before a restart
    refuses_expired: bool = False  # a watch of an old version: refused by status; a real server reports it in the stream
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if (status := self.fault(request.method, request.path)) is not None:
            return _refusal(status, "Fault", "refused by the test")
        if request.path.removeprefix("/apis/").startswith(tuple(self.absent)):
            return _refusal(404, "NotFound", "the server could not find the requested resource")
        body = json.loads(await request.read() or b"null")
        if request.path.endswith("/log"):
            before = " before" if request.query.get("previous") == "true" else ""
            return web.Response(text=self.logs.get(read_path(request.path).name + before, ""))
        try:
            if request.query.get("watch"):
                return await self._watch(request)
            answer = self._answer(request, body)
        except Rejected as rejected:
            return _refusal(rejected.status, rejected.reason, str(rejected), rejected.causes)
        if request.method in _READING:
            self.reads.append(f"{request.method} {request.path}")
        else:
            self.writes.append(f"{request.method} {request.path}")
            self._wake()
        return web.json_response(answer)

    def put(self, path: str, body: Object, manager: str = "test") -> Object:
        """As if someone else had made or replaced it, status included."""
        target = read_path(path)
        try:
            made = self.store.create(target.collection, target.namespace, body, manager)
        except Rejected:
            place = (target.collection, target.namespace, body["metadata"]["name"])
            made = self.store.patch(place, body, manager=manager)
        if "status" in body:
            place = (target.collection, target.namespace, body["metadata"]["name"])
            made = self.store.write(place, {**made, "status": body["status"]}, manager=manager, subresource="status")
        self._wake()
        return made

    def patch(self, path: str, change: Object, manager: str = "kubectl") -> Object:
        """As if a person had done it; a change of a status goes to the subresource."""
        made = self.store.patch(
            read_path(path).place, change, manager=manager, subresource="status" if "status" in change else ""
        )
        self._wake()
        return made

    def remove(self, path: str) -> None:
        self.store.delete(read_path(path).place)
        self._wake()

    def find(self, path: str) -> Object | None:
        return self.store.objects.get(read_path(path).place)

    def versions(self) -> dict[Place, str]:
        """Of every object."""
        return {place: item["metadata"]["resourceVersion"] for place, item in self.store.objects.items()}

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _answer(self, request: web.Request, body: Any) -> Any:  # noqa: PLR0911 - one for each verb
        if request.path.endswith("selfsubjectreviews"):
            return {"status": {"userInfo": self.user}}
        if request.path == "/version":
            return {"major": "1", "minor": self.minor}
        if request.method == "GET" and request.path.count("/") == 3 and request.path.startswith("/apis/"):
            return {"kind": "APIResourceList"}
        target, manager = read_path(request.path), request.query.get("fieldManager", "test")
        if request.method == "GET":
            return self._read(target, request)
        if request.method == "POST":
            return self._post(target, body, manager)
        if request.method == "DELETE" and not target.name:
            for item in self._read(target, request)["items"]:
                self.store.delete((target.collection, item["metadata"].get("namespace", ""), item["metadata"]["name"]))
            return {"kind": "Status", "status": "Success"}
        if request.method == "DELETE":
            version = ((body or {}).get("preconditions") or {}).get("resourceVersion")
            gone = self.store.delete(target.place, version)
            if (body or {}).get("propagationPolicy") == "Background":
                self.store.delete_owned(gone)
            return gone
        if request.method == "PUT":
            return self.store.write(target.place, body, manager=manager, subresource=target.subresource)
        return self._patch(target, body, manager, request)

    def _read(self, target: Target, request: web.Request) -> Object:
        if target.name:
            return self.store.find(target.place)
        labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        items = self.store.select(target.collection, target.namespace, labels, fields)
        return {"metadata": {"resourceVersion": str(self.store.version)}, "items": items}

    def _post(self, target: Target, body: Object, manager: str) -> Object:
        if target.subresource == "eviction":
            if target.name in self.budgets:
                raise Rejected(
                    429,
                    "TooManyRequests",
                    "Cannot evict pod as it would violate the pod's disruption budget.",
                    causes=[{"reason": "DisruptionBudget", "message": "The disruption budget careful needs 1 healthy pods"}],
                )
            if (body.get("deleteOptions") or {}).get("dryRun"):
                return self.store.find(target.place)
            return self.store.delete(target.place)
        return self.store.create(target.collection, target.namespace, body, manager)

    def _patch(self, target: Target, body: Any, manager: str, request: web.Request) -> Object:
        kind = request.content_type
        if kind == "application/json-patch+json":
            return self.store.write(target.place, _apply_json(self.store.find(target.place), body), manager=manager)
        dry = request.query.get("dryRun") == "All"
        if kind == "application/apply-patch+yaml" and target.place not in self.store.objects:
            if dry:
                return {**body, "metadata": {**body["metadata"], "namespace": target.namespace}}
            return self.store.create(target.collection, target.namespace, body, manager)
        if dry:
            scratch = ObjectStore(objects=dict(self.store.objects))
            return scratch.patch(target.place, body, manager=manager, subresource=target.subresource)
        return self.store.patch(target.place, body, manager=manager, subresource=target.subresource)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        target, since = read_path(request.path), int(request.query["resourceVersion"])
        expired = since < self.store.oldest
        if expired and self.refuses_expired:
            raise Rejected(410, "Expired", "too old resource version")
        labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        response = web.StreamResponse()
        await response.prepare(request)
        if expired:
            await response.write(json.dumps({"type": "ERROR", "object": _status(410, "Expired", "too old")}).encode() + b"\n")
            return response
        while True:
            waiting, oldest = self.changed, self.store.oldest
            for line in self._lines(target, since, labels, fields):
                await response.write(line)
            since = self.store.version
            await waiting.wait()
            if self.store.oldest != oldest:  # compacted under it
                return response

    def _lines(self, target: Target, since: int, labels: str, fields: str) -> list[bytes]:
        events = [
            change.seen_by(labels, fields)
            for change in self.store.history
            if change.version > since
            and change.collection == target.collection
            and target.namespace in ("", change.object["metadata"].get("namespace", ""))
        ]
        return [json.dumps(event).encode() + b"\n" for event in events if event is not None]


@asynccontextmanager
async def listening(api: ApiServer) -> AsyncIterator[str]:
    """Its URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[ApiServer, Client]]:
    """A server and our own client of it."""
    api = ApiServer()
    async with listening(api) as url, Client(Access(server=url, context=ssl.create_default_context())) as client:
        yield api, client


@contextmanager
def serving_commands() -> Iterator[tuple[ApiServer, str]]:
    """A server in a thread of its own, for commands, which have a loop of their own; and its URL."""
    api, url = ApiServer(), Queue[str]()
    stopped = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with listening(api) as found:
            url.put(found)
            await stopped.wait()

    thread = Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    try:
        yield api, url.get()
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


def kubeconfig(**urls: str) -> str:
    """The text of one with a context for each server; the first is the current one."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": next(iter(urls)),
        "clusters": [{"name": name, "cluster": {"server": url}} for name, url in urls.items()],
        "contexts": [{"name": name, "context": {"cluster": name, "user": "me"}} for name in urls],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    return json.dumps(config)


async def until(holds: Callable[[], bool], seconds: float = float(os.environ.get("AIMGPU_TEST_PATIENCE", "300"))) -> None:
    """Let others run until it holds. The limit only ends a test that waits in vain."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - conditions of many kinds
            await asyncio.sleep(0.005)


def _apply_json(item: Object, operations: list[Object]) -> Object:
    found: Object = json.loads(json.dumps(item))
    for operation in operations:
        *path, last = operation["path"].strip("/").split("/")
        at: Any = found
        for name in path:
            at = at[int(name)] if isinstance(at, list) else at[name]
        at[int(last) if isinstance(at, list) else last] = operation["value"]
    return found


def _refusal(status: int, reason: str, message: str, causes: Sequence[Object] = ()) -> web.Response:
    body = {**_status(status, reason, message), **({"details": {"causes": list(causes)}} if causes else {})}
    return web.json_response(body, status=status)


def _status(status: int, reason: str, message: str) -> Object:
    return {"kind": "Status", "code": status, "reason": reason, "message": message}
