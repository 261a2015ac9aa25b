"""The cluster's gateway follows its objects: routes, sleeping models, callers' keys, bounds of the queue, rankers."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.kubernetes.api_server import ApiServer, kubeconfig, serving, serving_commands, until

from aimgpu.cli.main import run_command
from aimgpu.domain import ByClass, QueueSettings
from aimgpu.errors import ModelNotReady
from aimgpu.gateway.application import Gateway, GatewaySettings, create_gateway
from aimgpu.gateway.proxy import ProxiedRequest
from aimgpu.gateway.routes import RouteTable
from aimgpu.gateway.slots import Lease
from aimgpu.keyfile import KeyClass, KeyStore
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.models.gateway import cluster_models, followed_queue, model_scaler
from aimgpu.kubernetes.models.gateway.cluster_models import ClusterModels
from aimgpu.kubernetes.models.gateway.followed_queue import FollowedQueue
from aimgpu.kubernetes.models.gateway.model_scaler import ModelScaler
from aimgpu.kubernetes.models.gateway.options import ClusterGatewayOptions, parse_options
from aimgpu.kubernetes.models.gateway.secret_keys import SecretKeys
from aimgpu.kubernetes.models.gateway.served_models import ReplicaShare
from aimgpu.kubernetes.models.serving.engine_keys import ENGINE_KEYS
from aimgpu.kubernetes.models.serving.key_secret import KEYS_SECRET, KeySecret, find_gateway_namespace
from aimgpu.kubernetes.models.serving.queue_bounds import QUEUE_MAP, QueueBounds
from aimgpu.qos.queueing.dispatcher import RequestOutcome

DEPLOYMENTS = "/apis/apps/v1/namespaces/a/deployments"
PODS = "/api/v1/namespaces/a/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/system/leases"
SERVED = "aim.amd.com/served-model"


@dataclass
class Parts:
    """One gateway's parts that follow the cluster."""

    api: ApiServer
    client: Client
    routes: RouteTable = field(default_factory=RouteTable)
    options: ClusterGatewayOptions = field(default_factory=lambda: ClusterGatewayOptions(namespace="system", pod="gw-1"))
    gateway: Gateway = field(init=False)
    models: ClusterModels = field(init=False)

    def __post_init__(self) -> None:
        self.gateway = create_gateway(self.routes, settings=GatewaySettings())
        self.models = ClusterModels(self.client, self.options, self.routes)

    def add_model(self, name: str, replicas: int = 1, **annotations: str) -> None:
        found = {f"aim.amd.com/{key.replace('_', '-')}": value for key, value in annotations.items()}
        metadata = {"name": name, "labels": {SERVED: name}, "annotations": found}
        self.api.put(DEPLOYMENTS, {"metadata": metadata, "spec": {"replicas": replicas}})

    def add_endpoint(self, name: str, address: str = "10.0.0.1", port: int = 8000) -> None:
        metadata = {"name": f"{name}-x", "labels": {SERVED: name}}
        endpoint = {"addresses": [address], "conditions": {"ready": True}, "targetRef": {"name": f"{name}-pod"}}
        body = {"metadata": metadata, "addressType": "IPv4", "ports": [{"port": port}], "endpoints": [endpoint]}
        self.api.put(SLICES.format("a"), body)

    def state(self, name: str) -> str | None:
        route = self.routes.find(name)
        return route.state if route else None

    def replicas(self, name: str) -> int:
        found = self.api.find(f"{DEPLOYMENTS}/{name}")
        assert found is not None
        return int(found["spec"]["replicas"])


@asynccontextmanager
async def running(*works: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def play(scenario: Callable[[Parts], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            parts = Parts(api, client)
            try:
                await scenario(parts)
            finally:
                await parts.gateway.close()

    asyncio.run(main())


def test_routes_follow_deployments_and_endpoints() -> None:
    async def scenario(parts: Parts) -> None:
        async with running(parts.models.run()):
            await until(lambda: parts.routes.filled)
            assert parts.routes.list() == ()
            parts.add_model("chat", concurrency="4")
            await until(lambda: parts.state("chat") == "loading")
            parts.add_endpoint("chat")
            await until(lambda: parts.state("chat") == "ready")
            assert [backend.slots for backend in parts.routes.list()[0].backends] == [4]
            parts.api.put(SLICES.format("a"), {"metadata": {"name": "chat-x"}, "endpoints": []})
            await until(lambda: parts.state("chat") == "loading")
            parts.api.remove(f"{DEPLOYMENTS}/chat")
            await until(lambda: parts.state("chat") is None)

    play(scenario)


def test_callers_learn_why_the_pods_of_a_model_do_not_start() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "engine:none"'}

    def problem(parts: Parts) -> str | None:
        route = parts.routes.find("chat")
        return route.arrival.problem if route and route.arrival else None

    async def scenario(parts: Parts) -> None:
        def put_pod(name: str, **state: Any) -> None:
            statuses = [{"name": "engine", "state": state}]
            pod = {"metadata": {"name": name, "labels": {SERVED: "chat"}}, "status": {"containerStatuses": statuses}}
            parts.api.put("/api/v1/namespaces/a/pods", pod)

        parts.add_model("chat")
        async with running(parts.models.run()):
            await until(lambda: parts.state("chat") == "loading")
            assert problem(parts) is None
            put_pod("chat-1", waiting=waiting)
            await until(lambda: problem(parts) == 'chat-1: ImagePullBackOff: Back-off pulling image "engine:none"')
            put_pod("chat-2", running={})
            await until(lambda: problem(parts) is None)  # another may become ready
            parts.api.remove("/api/v1/namespaces/a/pods/chat-2")
            await until(lambda: problem(parts) is not None)
            parts.api.remove("/api/v1/namespaces/a/pods/chat-1")
            await until(lambda: problem(parts) is None)

    play(scenario)


def test_slots_are_divided_anew_when_a_gateway_comes_or_goes() -> None:
    async def scenario(parts: Parts) -> None:
        def others(*pods: str) -> None:
            metadata = {"name": "own", "labels": {"kubernetes.io/service-name": parts.options.service}}
            endpoints = [{"addresses": ["10.0.1.1"], "targetRef": {"name": pod}, "conditions": {"ready": True}} for pod in pods]
            parts.api.put(SLICES.format("system"), {"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints})

        def slots() -> int:
            return sum(backend.slots for route in parts.routes.list() for backend in route.backends)

        parts.add_model("chat", concurrency="9")
        parts.add_endpoint("chat")
        async with running(parts.models.run()):
            await until(lambda: slots() == 9)
            others("gw-0", "gw-1", "gw-2")
            await until(lambda: slots() == 3)
            others("gw-1")
            await until(lambda: slots() == 9)

    play(scenario)


def test_only_the_namespaces_of_the_options_are_served() -> None:
    async def scenario(parts: Parts) -> None:
        parts.options = ClusterGatewayOptions(namespace="system", pod="gw-1", namespaces=("b",))
        parts.models = ClusterModels(parts.client, parts.options, parts.routes)
        parts.add_model("chat")
        async with running(parts.models.run()):
            await until(lambda: parts.routes.filled)
            parts.api.put(
                "/apis/apps/v1/namespaces/b/deployments", {"metadata": {"name": "mine", "labels": {SERVED: "mine"}}, "spec": {}}
            )
            await until(lambda: parts.state("mine") is not None)
            assert parts.state("chat") is None

    play(scenario)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scaler's and the models' clock in the hands of the test."""
    now = [1000.0]
    monkeypatch.setattr(model_scaler, "_LOOK_SECONDS", 0.002)
    monkeypatch.setattr(cluster_models, "_now", lambda: now[0])
    monkeypatch.setattr(cluster_models, "_REFRESH_SECONDS", 0.002)
    monkeypatch.setattr(followed_queue, "_LOOK_SECONDS", 0.002)
    return now


def scaler(parts: Parts, now: list[float]) -> ModelScaler:
    made = ModelScaler(parts.client, parts.models, parts.gateway, parts.routes, "system")
    made._now = lambda: now[0]
    return made


def test_an_idle_model_falls_asleep_after_its_time_and_one_that_keeps_for_ever_does_not(hurried: list[float]) -> None:
    async def scenario(parts: Parts) -> None:
        parts.add_model("idle", replicas=2, keep="60s")
        parts.add_model("kept", replicas=1)
        for name in ("idle", "kept"):
            parts.add_endpoint(name)
        async with running(parts.models.run(), scaler(parts, hurried).run()):
            await until(lambda: parts.state("idle") == parts.state("kept") == "ready")
            hurried[0] += 60
            await asyncio.sleep(0.05)
            assert parts.replicas("idle") == 2  # notes of the last use may be on their way
            hurried[0] += 30
            await until(lambda: parts.replicas("idle") == 0)
            assert parts.replicas("kept") == 1

    play(scenario)


def test_use_that_another_gateway_noted_keeps_a_model_awake(hurried: list[float]) -> None:
    async def scenario(parts: Parts) -> None:
        parts.add_model("chat", keep="60s")
        parts.add_endpoint("chat")
        async with running(parts.models.run(), scaler(parts, hurried).run()):
            await until(lambda: parts.state("chat") == "ready")
            for number in range(4):
                hurried[0] += 50
                labels = {SERVED: "chat", "aim.amd.com/model-namespace": "a"}
                parts.api.put(LEASES, {"metadata": {"name": "note", "labels": labels}, "spec": {"renewTime": str(number)}})
                await until(lambda: parts.models.last_used.get(("a", "chat"), ("", 0.0))[1] == hurried[0])
            assert parts.replicas("chat") == 1
            hurried[0] += 100
            await until(lambda: parts.replicas("chat") == 0)

    play(scenario)


def pod_of(name: str, *, started: str = "", ready: str = "") -> dict[str, Any]:
    """On no node; or since `started` on one, and since `ready` ready."""
    metadata = {"name": f"{name}-pod", "labels": {SERVED: name}}
    scheduled = {"type": "PodScheduled", "status": "True"}
    if not started:
        message = "0/1 nodes are available: 1 cannot allocate all claims."
        scheduled |= {"status": "False", "reason": "Unschedulable", "message": message}
    up = {"type": "Ready", "status": str(bool(ready)), "lastTransitionTime": ready or started}
    running = [{"name": "engine", "state": {"running": {"startedAt": started}}}] if started else []
    return {"metadata": metadata, "status": {"conditions": [scheduled, up], "containerStatuses": running}}


async def ask(parts: Parts, name: str) -> str:
    """What a caller of a model gets to hear."""
    route = parts.routes.find(name)
    assert route is not None
    request = ProxiedRequest(route, "", b"", {}, "", time.monotonic())
    try:
        taken = parts.gateway.slots.take(request, request.arrived)
        lease = taken if isinstance(taken, Lease) else await taken
    except ModelNotReady as refused:
        return refused.message
    await asyncio.sleep(0)
    lease.release(RequestOutcome.OK)
    return "answered"


def test_a_model_that_once_waited_long_for_a_gpu_is_woken_again_once_for_a_hundred_requests(hurried: list[float]) -> None:
    async def scenario(parts: Parts) -> None:
        async def wake(requests: int, *, wait: float, day: int) -> list[str]:
            asked = [asyncio.ensure_future(ask(parts, "rare")) for _ in range(requests)]
            await until(lambda: parts.state("rare") == "loading")
            parts.api.put(PODS, pod_of("rare"))
            hurried[0] += wait
            parts.api.put(PODS, pod_of("rare", started=f"2026-01-{day:02}T00:00:00Z"))
            await until(lambda: parts.models._pods.is_starting(("a", "rare")))
            parts.api.put(PODS, pod_of("rare", started=f"2026-01-{day:02}T00:00:00Z", ready=f"2026-01-{day:02}T00:00:20Z"))
            parts.add_endpoint("rare")
            return await asyncio.gather(*asked)

        parts.add_model("rare", replicas=0, keep="60s", concurrency="4")
        async with running(parts.models.run(), scaler(parts, hurried).run()):
            await until(lambda: parts.state("rare") == "sleeping")
            assert await wake(1, wait=400.0, day=1) == ["answered"]
            hurried[0] += 100
            await until(lambda: parts.replicas("rare") == 0)
            parts.api.remove(f"{PODS}/rare-pod")
            parts.api.put(SLICES.format("a"), {"metadata": {"name": "rare-x"}, "endpoints": []})
            await until(lambda: parts.state("rare") == "sleeping")
            before = len(parts.api.writes)
            assert await wake(100, wait=1.0, day=2) == ["answered"] * 100
            scaled = [write for write in parts.api.writes[before:] if write.endswith("/scale")]
            assert len(scaled) == 1

    play(scenario)


def test_callers_hear_at_once_that_there_is_no_room_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_models, "_NO_ROOM_SECONDS", 0.0)

    async def scenario(parts: Parts) -> None:
        parts.add_model("rare", replicas=0, keep="60s")
        async with running(parts.models.run(), scaler(parts, [0.0]).run()):
            await until(lambda: parts.state("rare") == "sleeping")
            waits = asyncio.ensure_future(ask(parts, "rare"))
            await until(lambda: parts.replicas("rare") == 1)
            parts.api.put(PODS, pod_of("rare"))
            assert "cannot allocate all claims" in await waits
            assert "cannot allocate all claims" in await ask(parts, "rare")
            parts.api.put(PODS, pod_of("rare", started="2026-01-01T00:00:00Z"))
            await until(lambda: parts.routes.list()[0].reason is None)  # it got a GPU: callers are held again
            again = asyncio.ensure_future(ask(parts, "rare"))
            parts.add_endpoint("rare")
            assert await again == "answered"

    play(scenario)


def test_notes_of_models_that_are_gone_are_removed(hurried: list[float]) -> None:
    async def scenario(parts: Parts) -> None:
        parts.add_model("chat", keep="60s")
        for name in ("chat", "gone"):
            labels = {SERVED: name, "aim.amd.com/model-namespace": "a"}
            parts.api.put(LEASES, {"metadata": {"name": f"note-{name}", "labels": labels}, "spec": {"renewTime": "x"}})
        async with running(parts.models.run(), scaler(parts, hurried).run()):
            await until(lambda: parts.api.find(f"{LEASES}/note-gone") is None)
            assert parts.api.find(f"{LEASES}/note-chat") is not None

    play(scenario)


def test_a_scale_that_is_refused_is_tried_again_later_and_others_go_on(hurried: list[float]) -> None:
    async def scenario(parts: Parts) -> None:
        for name in ("first", "second"):
            parts.add_model(name, keep="60s")
            parts.add_endpoint(name)
        parts.api.fault = lambda method, path: 500 if method == "PATCH" and "first" in path else None
        async with running(parts.models.run(), scaler(parts, hurried).run()):
            await until(lambda: parts.state("first") == parts.state("second") == "ready")
            hurried[0] += 100
            await until(lambda: parts.replicas("second") == 0)
            assert parts.replicas("first") == 1
            parts.api.fault = lambda _method, _path: None
            hurried[0] += 10
            await until(lambda: parts.replicas("first") == 0)

    play(scenario)


def secret_path(name: str = KEYS_SECRET) -> str:
    return f"/api/v1/namespaces/system/secrets/{name}"


def test_the_limits_of_a_key_hold_over_all_gateways_and_follow_their_number() -> None:
    async def scenario(parts: Parts) -> None:
        share = [ReplicaShare(index=0, count=2)]
        keys = SecretKeys(parts.client, "system", KEYS_SECRET, lambda: share[0])
        secret = KeySecret(parts.client, "system")
        async with running(keys.run()):
            key = await secret.change(lambda store: store.add("ann", KeyClass(requests_per_second=1.0, concurrency=5)))
            free = await secret.change(lambda store: store.add("bob"))
            await until(lambda: keys.table.find(free.encode()) is not None)

            def limits(text: str) -> tuple[float | None, int | None]:
                found = keys.table.find(text.encode())
                assert found is not None
                return found.requests_per_second, found.concurrency

            assert (limits(key), limits(free)) == ((0.5, 3), (None, None))
            share[0] = ReplicaShare(index=1, count=2)
            await until(lambda: limits(key) == (0.5, 2))
            share[0] = ReplicaShare()
            await until(lambda: limits(key) == (1.0, 5))

    play(scenario)


def test_keys_count_from_the_moment_they_are_in_the_secret() -> None:
    async def scenario(parts: Parts) -> None:
        keys = SecretKeys(parts.client, "system", KEYS_SECRET)
        secret = KeySecret(parts.client, "system")
        async with running(keys.run()):
            key = await secret.change(lambda store: store.add("ann"))
            await until(lambda: keys.table.find(key.encode()) is not None)
            second = await secret.change(lambda store: store.add("bob"))
            await until(lambda: keys.table.find(second.encode()) is not None)
            await secret.change(lambda store: store.remove("ann"))
            await until(lambda: keys.table.find(key.encode()) is None)
            stored = parts.api.find(secret_path())
            assert stored is not None
            assert second not in base64.b64decode(stored["data"]["keys.json"]).decode()  # hashes only
            for damaged in ("!!!", base64.b64encode(b"{").decode(), base64.b64encode(b"\xff").decode()):
                parts.api.patch(secret_path(), {"data": {"keys.json": damaged}})
                await asyncio.sleep(0.02)
                assert keys.table.find(second.encode()) is not None  # as they were
            parts.api.remove(secret_path())
            await until(lambda: keys.table.find(second.encode()) is None)

    play(scenario)


def test_two_who_change_the_keys_at_once_both_have_their_way() -> None:
    async def scenario(parts: Parts) -> None:
        secret = KeySecret(parts.client, "system")
        names = [f"caller{number}" for number in range(4)]
        await secret.change(lambda store: store.add("first"))
        await asyncio.gather(*(secret.change(lambda store, name=name: store.add(name)) for name in names))  # type: ignore[misc]
        known: list[str] = await secret.change(_names)
        assert set(known) == {"first", *names}
        before = parts.api.versions()
        await secret.change(_names)
        assert parts.api.versions() == before  # looking writes nothing

    play(scenario)


@pytest.mark.parametrize(("concurrency", "note"), [("1", True), ("2", False), (None, False)])
def test_who_adds_a_key_that_may_do_less_than_the_gateways_each_allow_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], concurrency: str | None, *, note: bool
) -> None:
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "aim-gpu-sharing"}
    with serving_commands() as (api, url):
        (tmp_path / "config").write_text(kubeconfig(here=url))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        api.put("/api/v1/namespaces/system/services", {"metadata": {"name": "gateway", "labels": labels}})
        gateway = {"metadata": {"name": "gateway", "labels": labels}, "spec": {"replicas": 2}}
        api.put("/apis/apps/v1/namespaces/system/deployments", gateway)
        limit = ("--concurrency", concurrency) if concurrency else ()
        assert run_command(["keys", "add", "ann", *limit, "--on", "kubernetes"]) == 0
        assert ("it may have 2 at once" in capsys.readouterr().err) == note
        assert api.find(secret_path()) is not None


def _names(store: KeyStore) -> list[str]:
    return [one.name for one in store.read()]


@pytest.mark.parametrize(
    ("namespaces", "words"),
    [([], "no gateway of AIM GPU Sharing runs"), (["a", "b"], "gateways run in a, b"), (["a"], "")],
)
def test_the_gateways_namespace_is_found_where_there_is_one(namespaces: list[str], words: str) -> None:
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "aim-gpu-sharing"}

    async def main() -> str:
        async with serving() as (api, client):
            for namespace in namespaces:
                api.put(f"/api/v1/namespaces/{namespace}/services", {"metadata": {"name": "gateway", "labels": labels}})
            try:
                return await find_gateway_namespace(client)
            except Exception as error:  # noqa: BLE001 - its words are what is tested
                return str(error)

    found = asyncio.run(main())
    assert words in found if words else found == "a"


def test_bounds_of_the_queue_follow_the_config_map_and_belong_to_the_stack_that_set_them(hurried: list[float]) -> None:
    wanted = QueueSettings(per_gpu=6, most_queued=ByClass(low=12))

    async def scenario(parts: Parts) -> None:
        queue = FollowedQueue(parts.client, "system", parts.gateway, parts.models)
        bounds = QueueBounds(parts.client, "system", "a/one")
        path = f"/api/v1/namespaces/system/configmaps/{QUEUE_MAP}"
        async with running(queue.run()):
            assert await bounds.change(wanted, dry_run=True)
            assert parts.api.find(path) is None
            assert await bounds.change(wanted)
            assert not await bounds.change(wanted)
            await until(lambda: queue._in_force.per_gpu == 6)
            parts.api.patch(path, {"data": {"queue.json": "{"}})
            await asyncio.sleep(0.02)
            assert queue._in_force.per_gpu == 6
            assert not await QueueBounds(parts.client, "system", "b/other").reset()
            assert await bounds.reset()
            await until(lambda: queue._in_force == QueueSettings())
            assert not await bounds.reset()

    play(scenario)


def secret_of(**keys: str) -> dict[str, Any]:
    data = {model: base64.b64encode(key.encode()).decode() for model, key in keys.items()}
    return {"metadata": {"name": ENGINE_KEYS}, "data": data}


def test_an_engine_gets_the_key_of_its_own_namespace_and_no_other(hurried: list[float]) -> None:
    """Whatever address a namespace lists as its engine: only what that namespace knows goes there."""
    names = "chat", "small", "odd", "long"

    async def scenario(parts: Parts) -> None:
        def keys() -> dict[str, str]:
            return {route.name: backend.api_key for route in parts.routes.list() for backend in route.backends}

        parts.api.put("/api/v1/namespaces/b/secrets", secret_of(chat="of-b", small="of-b"))
        parts.api.put("/api/v1/namespaces/a/secrets", secret_of(chat="of-a", odd="x\r\nhost: evil", long="k" * 513))
        for name in names:
            parts.add_model(name, engine="vllm")
            parts.add_endpoint(name)
        async with running(parts.models.run()):
            await until(lambda: keys() == {"chat": "of-a", "small": "", "odd": "", "long": ""})
            parts.api.put("/api/v1/namespaces/a/secrets", secret_of(small="new"))
            await until(lambda: keys()["small"] == "new")
            parts.api.remove(f"/api/v1/namespaces/a/secrets/{ENGINE_KEYS}")
            await until(lambda: set(keys().values()) == {""})

    play(scenario)


@pytest.mark.parametrize(
    "answer", [b"[" * 100_000, b"{" * 60_000, b"a" * 10_000_000, b"\xff", b""], ids=["deep", "odd", "long", "bytes", "empty"]
)
def test_no_answer_of_an_engine_ends_the_gateway(hurried: list[float], answer: bytes) -> None:
    async def scenario(parts: Parts) -> None:
        async with engine(200, answer) as (host, port, asked):
            parts.add_model("hostile", engine="llamacpp")
            parts.add_endpoint("hostile", host, port)
            following = asyncio.ensure_future(parts.models.run())
            await until(lambda: len(asked) >= 3 or following.done())
            parts.add_model("chat")
            await until(lambda: parts.state("chat") == "loading" or following.done())
            assert not following.done()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    play(scenario)


@asynccontextmanager
async def engine(status: int, answer: object) -> AsyncIterator[tuple[str, int, list[Any]]]:
    """An engine that answers to /v1/rerank so; what it was asked."""
    asked: list[Any] = []

    async def rerank(request: web.Request) -> web.Response:
        asked.append((await request.json(), request.headers.get("authorization")))
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return web.Response(status=status, body=body, content_type="application/json")

    application = web.Application()
    application.router.add_post("/v1/rerank", rerank)
    async with TestServer(application) as server:
        yield str(server.host), int(server.port or 0), asked


@pytest.mark.parametrize(
    ("name", "status", "answer", "ranks"),
    [
        ("llamacpp", 200, {"results": [{"index": 0, "relevance_score": 0.1}]}, True),
        ("llamacpp", 501, {"error": {"message": "This server does not support reranking."}}, False),
        ("llamacpp", 200, ["odd"], False),
    ],
)
def test_an_engine_of_llama_cpp_is_asked_once_whether_it_ranks(
    hurried: list[float], name: str, status: int, answer: object, *, ranks: bool
) -> None:
    async def scenario(parts: Parts) -> None:
        async with engine(status, answer) as (host, port, asked), running(parts.models.run()):
            parts.api.put("/api/v1/namespaces/a/secrets", secret_of(model="its-key"))
            parts.add_model("model", engine=name)
            parts.add_endpoint("model", host, port)
            await until(lambda: len(asked) == 1)
            assert asked[0][1] == "Bearer its-key"
            if ranks:
                await until(lambda: parts.routes.list()[0].card.ranks)
            await asyncio.sleep(0.05)  # many looks later
            assert parts.routes.list()[0].card.ranks == ranks
            assert len(asked) == 1

    play(scenario)


def test_an_engine_that_loads_is_asked_again_and_others_are_not_asked(hurried: list[float]) -> None:
    async def scenario(parts: Parts) -> None:
        async with engine(503, {}) as (host, port, asked), engine(200, {"results": []}) as (other, other_port, not_asked):
            parts.add_model("loads", engine="llamacpp")
            parts.add_endpoint("loads", host, port)
            parts.add_model("large", engine="vllm")
            parts.add_endpoint("large", other, other_port)
            parts.add_model("away", engine="llamacpp")
            parts.add_endpoint("away", host, 1)
            async with running(parts.models.run()):
                await until(lambda: len(asked) > 3)
                assert not any(route.card.ranks for route in parts.routes.list())
                assert not_asked == []

    play(scenario)


def test_the_options_of_the_gateway_are_read_from_its_pod() -> None:
    environment = {"POD_NAMESPACE": "mine", "POD_NAME": "gw-7"}
    given = parse_options(["--watch-namespaces", "a, b,", "--without-keys", "--drain-seconds", "0"], environment)
    assert (given.namespace, given.pod, given.namespaces, given.keys_required) == ("mine", "gw-7", ("a", "b"), False)
    assert parse_options([], environment).keys_required
