"""An API server in this process, as far as the page uses one: objects, watches, logs, pods behind a proxy, rights by token.

What a real one does beyond that is in `test_chart.py`, on a real cluster.
"""

import asyncio
import copy
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

from aiohttp import web

from aimgpu.kubernetes.api.access import Access
from aimgpu.kubernetes.api.client import Client, Object, Resource

OWN = "own-token"
_PLURALS = frozenset(
    (
        *(
            "pods",
            "deployments",
            "services",
            "secrets",
            "namespaces",
            "networkpolicies",
            "persistentvolumeclaims",
            "configmaps",
        ),
        *("gpunodes", "gpushares", "partitionplans", "resourceslices", "inferenceservices", "mutatingwebhookconfigurations"),
    )
)
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


class SmallApiServer:
    """`rights`: for each token the verbs that it has; a token that is not there is unknown."""

    def __init__(self) -> None:
        self.rights: dict[str, set[str]] = {OWN: {"get", "create"}}
        self.groups: set[str] = {"aim.amd.com/v1alpha1"}
        self.logs: dict[str, str] = {}  # by pod
        self.pods_answers: dict[str, Any] = {}  # by "POD:PORT/path" behind the proxy: text, JSON or a handler
        self.asked: list[tuple[str, str, str]] = []  # method, path, token
        self.patches: list[tuple[str, Any]] = []
        self._objects: dict[str, dict[str, Object]] = {}  # by collection of one namespace, then name
        self._version = 1
        self._changes: list[tuple[int, str, Object]] = []  # version, collection of one namespace, event
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def client(self, token: str = OWN) -> Client:
        return Client(Access(server=self.url, context=ssl.create_default_context(), token=token))

    def put(self, resource: Resource, item: Object, change: str | None = None) -> None:
        """Make or change it; those who watch are sent it."""
        namespace, name = item["metadata"].get("namespace"), item["metadata"]["name"]
        folder = self._objects.setdefault(resource.path(namespace), {})
        kind = change or ("MODIFIED" if name in folder else "ADDED")
        self._version += 1
        item = copy.deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self._version)
        if kind == "DELETED":
            folder.pop(name, None)
        else:
            folder[name] = item
        self._changes.append((self._version, resource.path(namespace), {"type": kind, "object": item}))

    def remove(self, resource: Resource, name: str, namespace: str | None = None) -> None:
        self.put(resource, self._objects[resource.path(namespace)][name], "DELETED")

    def objects(self, resource: Resource, namespace: str | None = None) -> dict[str, Object]:
        return self._objects.get(resource.path(namespace), {})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.asked.append((request.method, request.path, token))
        if token not in self.rights:
            return _status(401, "Unauthorized")
        path, verb = request.path, _VERBS[request.method]
        if "/proxy/" in path:
            return await self._proxied(request)
        if verb not in self.rights[token]:
            return _status(403, f"{path.rsplit('/', 1)[-1]} is forbidden: cannot {verb}")
        if path.removeprefix("/apis/") in self.groups:
            return web.json_response({"kind": "APIResourceList"})
        if path.startswith("/apis/aim.amd.com/v1alpha1") and not self.groups:
            return _status(404, "the server could not find the requested resource")
        stream = self._log if path.endswith("/log") else self._watch if request.query.get("watch") else self._object
        return await stream(request)

    async def _object(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if request.method == "POST":
            body = await request.json()
            self._objects.setdefault(path, {})[body["metadata"]["name"]] = body
            return web.json_response(body, status=201)
        if request.method == "GET" and (found := self._list(path, request.query.get("labelSelector", ""))) is not None:
            return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": found})
        path = path.removesuffix("/scale")
        folder, _, name = path.rpartition("/")
        if request.method == "PATCH":
            return await self._patch(request, folder, name)
        item = self._objects.get(folder, {}).get(name)
        if item is None:
            return _status(404, f"{name} not found")
        if request.method == "DELETE":
            del self._objects[folder][name]
        return web.json_response(item)

    async def _patch(self, request: web.Request, folder: str, name: str) -> web.StreamResponse:
        body = json.loads(await request.read())
        if not request.query.get("dryRun"):
            self.patches.append((request.path, body))
        found = _merge(self._objects.get(folder, {}).get(name) or {}, body)
        if not request.query.get("dryRun"):
            self._objects.setdefault(folder, {})[name] = found
        return web.json_response(found)

    def _list(self, path: str, selector: str) -> list[Object] | None:
        """Of one namespace, or of all; None where the path is that of one object."""
        plural = path.rpartition("/")[2]
        if plural not in _PLURALS:
            return None
        folders = [path] if "/namespaces/" in path else [one for one in self._objects if one.rpartition("/")[2] == plural]
        found = [one for folder in folders for one in self._objects.get(folder, {}).values()]
        return [one for one in found if _is_selected(one, selector)]

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """From the version that was listed on, so that nothing is missed in between."""
        response = web.StreamResponse()
        await response.prepare(request)
        at, selector = int(request.query["resourceVersion"]), request.query.get("labelSelector", "")
        while True:
            for version, folder, event in list(self._changes):
                if version > at and _is_in(folder, request.path) and _is_selected(event["object"], selector):
                    await response.write(json.dumps(event).encode() + b"\n")
            at = self._version
            await asyncio.sleep(0.005)

    async def _log(self, request: web.Request) -> web.StreamResponse:
        name = request.path.split("/")[-2]
        lines = self.logs[name].splitlines()[-int(request.query.get("tailLines", "100000")) :]
        return web.Response(text="".join(f"{line}\n" for line in lines))

    async def _proxied(self, request: web.Request) -> web.StreamResponse:
        place, _, path = request.path.partition("/proxy/")
        found = self.pods_answers.get(f"{place.rsplit('/', 1)[-1]}/{path}")
        if found is None:
            return _status(503, "no endpoints available")
        if callable(found):
            answered: web.StreamResponse = await found(request)
            return answered
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def _is_in(folder: str, path: str) -> bool:
    """Whether the objects of one namespace belong to a collection, which may be that of all."""
    everywhere = "/namespaces/" not in path and folder.rpartition("/")[2] == path.rpartition("/")[2]
    return folder == path or everywhere


def _is_selected(item: Object, selector: str) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = [part.partition("=") for part in selector.split(",") if part]
    return all(labels.get(key) == value if equals else key in labels for key, equals, value in wanted)


def _merge(before: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7386."""
    found = dict(before)
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping):
            found[key] = _merge(found.get(key) or {}, value)
        else:
            found[key] = value
    return found


@asynccontextmanager
async def small_cluster() -> AsyncIterator[SmallApiServer]:
    async with SmallApiServer() as server:
        yield server
