"""The page of a cluster over HTTP, against an API server in this process: whose rights a change has, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from tests.kubernetes.applied_objects import applied, rendered
from tests.kubernetes.page_objects import model, node, pod, share
from tests.kubernetes.small_api_server import OWN, SmallApiServer
from tests.web.calling import HOST, PAGE, Browser

from aimgpu.hardware.simulated.products import find_product
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, INFERENCE_SERVICES, MUTATING_WEBHOOKS, NAMESPACES, PODS
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration
from aimgpu.kubernetes.cluster.placeable import refuse_unplaceable
from aimgpu.kubernetes.models.page import cluster_resize
from aimgpu.kubernetes.models.page.control_api import ApplySettings
from aimgpu.kubernetes.models.page.follower import ClusterFollower
from aimgpu.kubernetes.models.page.service import ClusterPage, PageSettings
from aimgpu.kubernetes.models.serving.cluster_view import GATEWAY_SELECTOR
from aimgpu.kubernetes.models.serving.share_rewrite import NEW_FIRST
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, GPU_SHARES, PARTITION_PLANS

EDITOR, VIEWER = "editor-token", "viewer-token"
MODEL = "/api/v1/models/chat"
FULL = find_product("MI300X").memory_bytes


@dataclass(slots=True)
class Scene:
    server: SmallApiServer
    follower: ClusterFollower
    browser: Browser

    @property
    def editor(self) -> Browser:
        return self.browser.with_token(EDITOR)

    async def until(self, what: Callable[[], Any]) -> None:
        while not what():
            await asyncio.to_thread(self.follower.wait_for_change, 0.05)


@asynccontextmanager
async def scene(
    *,
    own_rights: bool = False,
    groups: bool = True,
    ours: bool = True,
    more: Callable[[SmallApiServer], None] = lambda _server: None,
) -> AsyncIterator[Scene]:
    """One model with a pod on the only GPU. `ours`: made by aimgpu; `more`: what else is there before the page looks."""
    async with SmallApiServer() as server:
        server.rights |= {EDITOR: {"get", "create", "patch", "delete"}, VIEWER: {"get"}}
        if not groups:
            server.groups.clear()
        item = model()
        item["metadata"]["labels"] |= labels.MANAGED if ours else {}
        server.put(GPU_NODES, node(memoryBytes=FULL, layouts=["SPX/NPS1", "CPX/NPS1"], layout="SPX/NPS1"))
        server.put(DEPLOYMENTS, item)
        server.put(PODS, pod("chat-1"))
        server.put(GPU_SHARES, share("chat-1"))
        more(server)
        client = server.client()
        follower = ClusterFollower(client)
        applied = ApplySettings(image="own:1", namespace="team", check_shares=refuse_unplaceable)
        settings = PageSettings(host="127.0.0.1", port=8081, namespace=None, own_rights=own_rights, applied=applied)
        page = ClusterPage(client, follower, settings, "http://127.0.0.1:8081")
        following = asyncio.ensure_future(follower.run())
        found = Scene(server, follower, Browser(page))
        try:
            await found.until(lambda: follower.synced and (not groups or _is_placed(follower)))
            yield found
        finally:
            following.cancel()
            await asyncio.wait({following})
            await page.close()
            await client.close()


def _is_placed(follower: ClusterFollower) -> bool:
    seen = follower.look()
    return bool(seen.devices) and any(one.grants for one in seen.instances)


def run(work: Callable[[Scene], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with scene(**settings) as found:
            await work(found)

    asyncio.run(main())


def gateway(name: str = "gateway-1", *, ready: bool = True) -> dict[str, Any]:
    found = dict(part.split("=") for part in GATEWAY_SELECTOR.split(","))
    return {
        "metadata": {"name": name, "namespace": "gpu-sharing", "labels": found},
        "spec": {"containers": [{"name": "gateway"}]},
        "status": {"podIP": "10.0.0.9", "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/api/v1/partition/none", 404, "no_such_path"),
        ("POST", "/api/v1/models/chat/none", 405, "method_not_allowed"),
        ("POST", "/api/v1/instances/chat-1/log", 405, "method_not_allowed"),
        ("GET", "/api/v1/none", 404, "no_such_path"),
    ],
)
def test_what_is_not_there_is_answered_in_json(method: str, path: str, status: int, code: str) -> None:
    async def work(at: Scene) -> None:
        answer = await at.editor.send(method, path, {})
        assert (answer.status, answer.json["error"]["code"]) == (status, code)

    run(work)


def test_a_change_has_the_rights_of_the_one_who_makes_it() -> None:
    async def work(at: Scene) -> None:
        change = ("PATCH", MODEL, {"priority": "low"})
        for browser, status, words in (
            (at.browser, 401, "your own Kubernetes token"),
            (at.browser.with_token("expired"), 401, "does not know this token"),
            (at.browser.with_token(VIEWER), 403, "forbidden"),
        ):
            answer = await browser.send(*change)
            assert (answer.status, words in answer.error) == (status, True), answer.error
        assert at.server.patches == []
        answer = await at.editor.send(*change)
        assert (answer.status, answer.json["priority"]) == (200, "low")
        assert not any(method != "GET" and token == OWN for method, _, token in at.server.asked)

    run(work)


@pytest.mark.parametrize(
    ("body", "annotations"),
    [
        ({"priority": "high"}, {labels.PRIORITY: "high"}),
        ({"keep": "90s"}, {labels.KEEP: "90s"}),
        ({"pinned": True}, {labels.KEEP: None}),
        ({"pinned": False, "keep": "10m"}, {labels.KEEP: "10m"}),
    ],
)
def test_a_change_is_an_annotation_that_restarts_no_pod(body: dict[str, Any], annotations: dict[str, Any]) -> None:
    async def work(at: Scene) -> None:
        assert (await at.editor.send("PATCH", MODEL, body)).status == 200
        ((path, patch),) = at.server.patches
        assert (path, patch) == (DEPLOYMENTS.path("team", "chat"), {"metadata": {"annotations": annotations}})

    run(work)


def test_sleeping_scales_to_zero_and_waking_to_what_was_wanted() -> None:
    async def work(at: Scene) -> None:
        for action, replicas in (("sleep", 0), ("wake", 1)):
            assert (await at.editor.post(f"{MODEL}/{action}")).json == {"done": True}
            path, patch = at.server.patches[-1]
            assert (path, patch) == (DEPLOYMENTS.path("team", "chat", "scale"), {"spec": {"replicas": replicas}})
        gone = await at.editor.post("/api/v1/models/nobody/sleep")
        assert (gone.status, "Deployed: chat." in gone.error) == (404, True)

    run(work)


def test_a_resize_is_previewed_by_anyone_here_and_rolled_out_by_one_who_may() -> None:
    async def work(at: Scene) -> None:
        held = share("chat-1")
        held["status"]["replicas"][0]["partitionInfo"] |= {"partitionId": "gpu-0/spx-0", "partitionSizeGB": FULL / 10**9}
        at.server.put(GPU_SHARES, held)
        at.server.put(DEPLOYMENTS, applied(rendered("{model: org/Tiny-1B, engine: vllm, gpu: {memory: 10GiB}}")))
        await at.until(lambda: at.follower.look().instances[0].grants[0].partition_id == "n1/gpu-0/spx-0")
        await at.until(lambda: labels.ENTRY in dict(at.follower.models())["chat"]["metadata"]["annotations"])
        wish = {"model": "chat", "memory_bytes": 20 << 30}
        seen = await at.browser.post("/api/v1/resize?dry_run=1", wish)
        assert (seen.status, seen.json["rollout"]["old_serves"], seen.json["dry_run"]) == (200, True, True)
        assert (await at.browser.post("/api/v1/resize", wish)).status == 401
        assert (await at.browser.with_token(VIEWER).post("/api/v1/resize", wish)).status == 403
        assert at.server.patches == []
        done = await at.editor.post("/api/v1/resize", wish)
        assert (done.status, done.json["rollout"]["restarts"]) == (200, True), done.error
        ((_, body),) = at.server.patches
        assert body["spec"]["template"]["metadata"]["annotations"]["gpu-memory"] == str(20 << 10)
        assert body["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 1
        too_much = await at.editor.post("/api/v1/resize", {"model": "chat", "memory_bytes": 900 << 30})
        assert (too_much.status, "no GPU of the cluster has room" in too_much.error) == (409, True)
        assert len(at.server.patches) == 1

    run(work)


def test_after_a_resize_the_pods_are_replaced_as_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_resize, "_LOOK_SECONDS", 0.01)

    async def work(at: Scene) -> None:
        item = applied(rendered("{model: org/Tiny-1B, engine: vllm, gpu: {memory: 10GiB}}"))
        at.server.put(DEPLOYMENTS, item)
        await at.until(lambda: labels.ENTRY in dict(at.follower.models())["chat"]["metadata"]["annotations"])
        assert (await at.editor.post("/api/v1/resize", {"model": "chat", "memory_bytes": 20 << 30})).status == 200
        stored = at.server.objects(DEPLOYMENTS, "team")["chat"]
        stored["spec"]["strategy"] = NEW_FIRST  # where there was room for both
        stored["status"] = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}
        await at.until(lambda: len(at.server.patches) == 2)
        body = at.server.patches[1][1]
        assert body["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        assert body["spec"]["template"]["metadata"]["annotations"]["gpu-memory"] == str(20 << 10)

    run(work)


def test_the_inference_service_is_rolled_out_and_not_the_deployment_that_kserve_made_of_it() -> None:
    async def work(at: Scene) -> None:
        entry = "{model: org/Tiny-1B, engine: vllm, gpu: {memory: 10GiB}}"
        made = applied(rendered(entry))
        made["metadata"] |= {"name": "chat-predictor", "ownerReferences": [{"kind": "InferenceService", "name": "chat"}]}
        at.server.remove(DEPLOYMENTS, "chat", "team")
        at.server.put(DEPLOYMENTS, made)
        at.server.put(INFERENCE_SERVICES, applied(rendered(entry, "InferenceService")))
        await at.until(lambda: labels.ENTRY in dict(at.follower.models())["chat"]["metadata"]["annotations"])
        done = await at.editor.post("/api/v1/resize", {"model": "chat", "memory_bytes": 20 << 30})
        assert done.status == 200, done.error
        ((path, body),) = at.server.patches
        assert path.endswith("/inferenceservices/chat")
        assert body["metadata"]["annotations"]["gpu-memory"] == str(20 << 10)

    run(work)


def test_a_resize_that_is_none_is_refused() -> None:
    async def work(at: Scene) -> None:
        for body in ({"model": "chat"}, {"model": "chat", "memory_bytes": True}, {"model": 1, "memory_bytes": 5}):
            assert (await at.editor.post("/api/v1/resize", body)).status == 400
        assert (await at.editor.post("/api/v1/resize", {"model": "nobody", "memory_bytes": 5})).status == 404
        by_hand = await at.editor.post("/api/v1/resize?dry_run=1", {"model": "chat", "memory_bytes": 5})
        assert (by_hand.status, "gpu-memory (MiB)" in by_hand.error) == (403, True)
        away = Browser(at.browser.application, address="10.0.0.7").with_token(EDITOR)
        assert (await away.post("/api/v1/resize?dry_run=1", {"model": "chat", "memory_bytes": 5})).status == 401

    run(work)


def test_the_drawer_of_a_model_explains_where_its_pods_are() -> None:
    async def work(at: Scene) -> None:
        (one,) = (await at.browser.get(MODEL)).json["explanations"]
        assert one["facts"][0] == "kube-scheduler chose node n1."
        at.server.put(PODS, pod("chat-1", type="PodScheduled", status="False", message="no GPU has room"))
        await at.until(lambda: at.follower.look().instances[0].state.value == "queued")
        (one,) = (await at.browser.get(MODEL)).json["explanations"]
        assert one["facts"][0] == "kube-scheduler has no place for it: no GPU has room."

    run(work)


def test_what_was_not_made_by_aimgpu_is_not_removed() -> None:
    async def work(at: Scene) -> None:
        answer = await at.editor.post("/api/v1/release", {"names": ["chat"]})
        assert (answer.status, "team/chat was not made by aimgpu" in answer.error) == (403, True)
        assert "chat" in at.server.objects(DEPLOYMENTS, "team")

    run(work, ours=False)


def test_a_model_is_removed_with_the_rights_of_the_one_who_does_it() -> None:
    async def work(at: Scene) -> None:
        assert (await at.browser.with_token(VIEWER).post("/api/v1/release", {"names": ["chat"]})).status == 403
        assert "chat" in at.server.objects(DEPLOYMENTS, "team")
        assert (await at.editor.post("/api/v1/release", {"names": ["chat"]})).json == {"released": ["chat"]}
        assert at.server.objects(DEPLOYMENTS, "team") == {}
        for body in ({}, {"names": "chat"}, {"names": [1]}):
            assert (await at.editor.post("/api/v1/release", body)).status == 400

    run(work)


ENTRY = {"model": "Qwen/Qwen2.5-7B-Instruct", "engine": "vllm", "image": "vllm:1", "context": 2048}
STACK = json.dumps({"models": {"new": ENTRY}})


@pytest.mark.parametrize(
    ("body", "namespace", "installed", "word"),
    [
        ({"stack": STACK}, "", "yes", "no namespace 'team'"),
        ({"stack": STACK}, "yes", "", "not installed"),
        ({"stack": "models: {new: {}}"}, "yes", "yes", "model"),
        ({"stack": "programs: {t: {command: a, image: b, gpu: {memory: 1GiB}}}"}, "yes", "yes", "not programs"),
        ({"stack": 5}, "yes", "yes", "stack: text"),
        ({"stack": STACK, "namespace": 5}, "yes", "yes", "namespace: text"),
        (
            {"stack": STACK.replace('"context": 2048', '"env": {"KEY": {"from_file": "/etc/passwd"}}')},
            True,
            True,
            "machine that applies",
        ),
    ],
)
def test_what_cannot_be_applied_is_refused_before_anything_is_written(
    body: dict[str, Any], namespace: str, installed: str, word: str
) -> None:
    async def work(at: Scene) -> None:
        _prepare(at.server, namespace=bool(namespace), installed=bool(installed))
        answer = await at.editor.post("/api/v1/apply", body)
        assert (answer.status >= 400, word in answer.error) == (True, True), answer.error
        assert at.server.patches == []

    run(work)


def _prepare(server: SmallApiServer, *, namespace: bool = True, installed: bool = True) -> None:
    if namespace:
        server.put(NAMESPACES, {"metadata": {"name": "team"}})
    if installed:
        server.put(MUTATING_WEBHOOKS, mutating_configuration("system", "admission"))


def test_a_stack_is_applied_to_the_namespace_that_was_named_and_again_changes_nothing() -> None:
    async def work(at: Scene) -> None:
        _prepare(at.server)
        first = await at.editor.post("/api/v1/apply", {"stack": STACK, "namespace": "team"})
        assert first.status == 200, first.error
        events = [json.loads(line) for line in first.body.splitlines()]
        assert "deployment/new created" in [one.get("text") for one in events]
        assert events[-1]["event"] == "done"
        assert {path.split("/namespaces/")[1].split("/")[0] for path, _ in at.server.patches} == {"team"}
        await at.until(lambda: True)
        before = len(at.server.patches)
        again = await at.editor.post("/api/v1/apply", {"stack": STACK})
        assert all("unchanged" in json.loads(line)["text"] for line in again.body.splitlines()[:-1])
        assert len(at.server.patches) == before

    run(work)


def test_a_layout_is_previewed_by_anyone_here_and_planned_by_one_who_may() -> None:
    async def work(at: Scene) -> None:
        wish = {"device": "n1/gpu-0", "layout": "CPX/NPS1"}
        seen = await at.browser.post("/api/v1/partition?dry_run=1", wish)
        assert (seen.status, seen.json["stops"]) == (200, ["chat-1"])
        assert (await at.browser.post("/api/v1/partition", wish)).status == 401
        assert (await at.browser.with_token(VIEWER).post("/api/v1/partition", wish)).status == 403
        assert at.server.objects(PARTITION_PLANS) == {}
        made = await at.editor.post("/api/v1/partition", wish)
        (name,) = at.server.objects(PARTITION_PLANS)
        assert f"PartitionPlan {name} was made" in made.body.decode()
        for body, status in (({"device": "n1/gpu-0"}, 400), ({"device": "n9/gpu-0", "layout": "CPX/NPS1"}, 404)):
            assert (await at.editor.post("/api/v1/partition", body)).status == status

    run(work)


@pytest.mark.parametrize(("lines", "expected"), [("2", 2), ("999999", 5), ("many", 5), ("-1", 5)])
def test_a_log_is_read_with_the_callers_rights_and_so_many_lines(lines: str, expected: int) -> None:
    async def work(at: Scene) -> None:
        at.server.logs["chat-1"] = "\n".join(f"line {number}" for number in range(5))
        path = f"/api/v1/instances/chat-1/log?lines={lines}"
        assert (await at.browser.get(path)).status == 401
        answer = await at.browser.with_token(VIEWER).get(path)
        assert (answer.status, len(answer.body.splitlines()), answer.body.endswith(b"line 4\n")) == (200, expected, True)
        gone = await at.editor.get("/api/v1/instances/chat-9/log")
        assert (gone.status, "no pod 'chat-9'" in gone.error) == (404, True)

    run(work)


def test_an_empty_log_is_an_empty_answer() -> None:
    async def work(at: Scene) -> None:
        at.server.logs["chat-1"] = ""
        answer = await at.editor.get("/api/v1/instances/chat-1/log")
        assert (answer.status, answer.body) == (200, b"")

    run(work)


def test_a_chat_goes_to_a_ready_gateway_with_the_callers_key_and_comes_back_as_it_is_made() -> None:
    async def work(at: Scene) -> None:
        asked: list[web.Request] = []

        async def answer(request: web.Request) -> web.StreamResponse:
            asked.append(request)
            response = web.StreamResponse(
                headers={"content-type": "text/event-stream", "x-aimgpu-waited-ms": "7", "server": "x"}
            )
            await response.prepare(request)
            for word in (b"data: one\n\n", b"data: [DONE]\n\n"):
                await response.write(word)
            return response

        missing = await at.browser.with_token("key").post("/v1/chat/completions", {"model": "chat"})
        assert (missing.status, "no gateway" in missing.error) == (502, True)
        at.server.put(PODS, gateway("starting", ready=False))
        at.server.put(PODS, gateway())
        at.server.pods_answers["gateway-1:8080/v1/chat/completions"] = answer
        found = await at.browser.with_token("key").post("/v1/chat/completions", {"model": "chat"})
        assert (found.status, found.body) == (200, b"data: one\n\ndata: [DONE]\n\n")
        assert found.headers == {"content-type": "text/event-stream", "x-aimgpu-waited-ms": "7", "cache-control": "no-store"}
        assert (asked[0].headers["x-api-key"], asked[0].headers["Authorization"]) == ("key", f"Bearer {OWN}")

    run(work)


def test_what_a_gateway_refuses_is_its_own_answer() -> None:
    async def work(at: Scene) -> None:
        async def refuse(_request: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "This needs an API key.", "code": "not_authenticated"}}, status=401)

        at.server.put(PODS, gateway())
        at.server.pods_answers["gateway-1:8080/v1/chat/completions"] = refuse
        answer = await at.browser.post("/v1/chat/completions", {"model": "chat"})
        assert (answer.status, answer.json["error"]["message"]) == (401, "This needs an API key.")

    run(work)


def test_a_browser_that_leaves_a_chat_ends_it_at_the_gateway() -> None:
    async def work(at: Scene) -> None:
        ended = asyncio.Event()

        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                while True:
                    await response.write(b"data: more\n\n")
                    await asyncio.sleep(0.001)
            except (ConnectionError, asyncio.CancelledError):
                ended.set()
                raise

        at.server.put(PODS, gateway())
        at.server.pods_answers["gateway-1:8080/v1/chat/completions"] = endless
        answer = await at.browser.send("POST", "/v1/chat/completions", {"model": "chat"}, leave_after=3)
        assert answer.body.count(b"data: more") >= 3
        await ended.wait()

    run(work)


def test_a_chat_that_is_none_is_refused() -> None:
    async def work(at: Scene) -> None:
        assert (await at.browser.get("/v1/chat/completions")).status == 405
        assert (await at.browser.post("/v1/chat/completions", b"x" * ((8 << 20) + 1))).status == 413
        foreign = Browser(at.browser.application, headers=(HOST, PAGE, (b"origin", b"http://evil.example")))
        assert (await foreign.post("/v1/chat/completions", {})).status == 403

    run(work)


def test_the_page_answers_on_its_own_machine_and_by_its_own_name_only() -> None:
    async def work(at: Scene) -> None:
        assert (await at.browser.get("/api/v1/state")).status == 200
        assert (await Browser(at.browser.application, address="10.0.0.7").get("/api/v1/state")).status == 401
        rebound = Browser(at.browser.application, headers=((b"host", b"evil.example"), PAGE))
        assert (await rebound.get("/api/v1/state")).status == 403
        assert (await at.editor.get("/api/v1/nothing")).status == 404
        assert (await at.browser.get("/healthz")).body == b"ok\n"

    run(work)


def test_with_own_rights_a_browser_without_the_link_sees_and_changes_nothing() -> None:
    async def work(at: Scene) -> None:
        for path in ("state", "stack", "models/chat"):
            answer = await at.browser.get(f"/api/v1/{path}")
            assert (answer.status, "link that `aimgpu web" in answer.error) == (401, True)
        assert (await at.browser.send("PATCH", MODEL, {"priority": "low"})).status == 401
        assert (await at.editor.send("PATCH", MODEL, {"priority": "low"})).status in (401, 403), "nor with a cluster's token"
        assert at.server.patches == []

    run(work, own_rights=True)
