"""What the page of a cluster follows: objects as they come and go, the gateways' scores and requests, the agents' measures."""

import asyncio
from typing import Any

from aiohttp import web
from tests.kubernetes.page_objects import GB, finished, model, node, pod, share
from tests.kubernetes.small_api_server import SmallApiServer
from tests.kubernetes.test_page_requests import FULL, Scene, gateway, run

from aimgpu.kubernetes.api.resources import DEPLOYMENTS, PODS
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, GPU_SHARES, PARTITION_PLANS

SCORES = "gateway-1:9401/scores"
ACTIVITY = "gateway-1:9401/activity"


def agent(name: str = "agent-1", *, port: int | None = 9400) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": port}] if port else []
    return {
        "metadata": {"name": name, "namespace": "gpu-sharing", "labels": {"app.kubernetes.io/component": "agent"}},
        "spec": {"containers": [{"name": "agent", "ports": ports}]},
    }


def test_objects_that_change_or_go_are_followed() -> None:
    async def work(at: Scene) -> None:
        assert [one.deployment for one in at.follower.look().instances] == ["chat"]
        second = model("other", created="2026-03-01T00:00:00Z")
        at.server.put(DEPLOYMENTS, second)
        await at.until(lambda: len(at.follower.models()) == 2)
        at.server.put(GPU_NODES, node("n2", memoryBytes=FULL))
        await at.until(lambda: len(at.follower.look().devices) == 2)
        at.server.remove(DEPLOYMENTS, "other", "team")
        at.server.remove(GPU_NODES, "n2")
        await at.until(lambda: len(at.follower.models()) == 1 and len(at.follower.look().devices) == 1)
        at.server.remove(PODS, "chat-1", "team")
        await at.until(lambda: at.follower.pods() == ())
        assert at.follower.look().instances[0].state.value == "queued"

    run(work)


def test_a_plan_under_way_is_a_note_until_it_has_ended() -> None:
    async def work(at: Scene) -> None:
        plan = {"metadata": {"name": "p"}, "spec": {"layout": {"computeMode": "CPX"}}, "status": {"phase": "Draining"}}
        at.server.put(PARTITION_PLANS, plan)
        await at.until(lambda: any("PartitionPlan p: Draining" in note for note in at.follower.read_notes()))
        at.server.put(PARTITION_PLANS, plan | {"status": {"phase": "Succeeded"}})
        await at.until(lambda: not any("PartitionPlan" in note for note in at.follower.read_notes()))

    run(work)


def test_a_cluster_without_our_definitions_shows_its_models_and_what_is_missing() -> None:
    async def work(at: Scene) -> None:
        await at.until(lambda: any("install the chart" in note for note in at.follower.read_notes()))
        state = (await at.browser.get("/api/v1/state")).json
        assert [one["name"] for one in state["models"]] == ["chat"]
        assert state["gpus"] == []

    run(work, groups=False)


def test_without_a_gateway_the_page_names_what_it_cannot_show() -> None:
    async def work(at: Scene) -> None:
        await at.until(lambda: any("Requests and promises are not shown" in note for note in at.follower.read_notes()))
        assert at.follower.read_scores() == {}
        assert at.follower.endpoint is None

    run(work)


def test_a_gateway_of_another_version_does_not_end_the_page() -> None:
    def more(server: SmallApiServer) -> None:
        server.put(PODS, gateway())
        server.pods_answers[SCORES] = {"models": {"chat": {"in_flight": 1}}, "version": 9}

    async def work(at: Scene) -> None:
        await at.until(lambda: any("a gateway of another version" in note for note in at.follower.read_notes()))
        at.server.put(PODS, pod("chat-2"))
        await at.until(lambda: len(at.follower.pods()) == 2)

    run(work, more=more)


def test_the_requests_and_scores_of_a_gateway_are_read() -> None:
    def more(server: SmallApiServer) -> None:
        server.put(PODS, gateway())
        queue = {"running": {}, "per_gpu": None, "most_queued": {"low": 5}}
        server.pods_answers[SCORES] = {"models": {}, "queue": queue, "pressure": {}}
        server.pods_answers[ACTIVITY] = {"latest": 1, "requests": [finished()]}

    async def work(at: Scene) -> None:
        await at.until(lambda: at.follower.activity.last_used() == {"chat": 10.0} and at.follower.endpoint)
        assert at.follower.endpoint == "http://aim-gpu-sharing-gateway.gpu-sharing.svc"
        assert not any("Requests and promises" in note for note in at.follower.read_notes())
        assert at.follower.activity.read_up_to("gateway-1") == 1

    run(work, more=more)


METRICS = """
aim_gpu_utilization_ratio{node="n1",gpu="gpu-0"} 0.5
aim_gpu_partition_memory_measured_bytes{node="n1",gpu="gpu-0",partition="gpu-0/cpx-3"} 9000000000
aim_model_memory_used_bytes{node="n1",gpu="gpu-0",partition="gpu-0/cpx-3",model="chat",instance_id="team/claim-1.g"} 8000000000
aim_model_gate_wait_seconds_total{node="n1",gpu="gpu-0",partition="gpu-0/cpx-3",model="chat",instance_id="team/claim-1.g"} 1.5
"""


def test_what_a_live_agent_measured_stands_beside_what_was_granted() -> None:
    def more(server: SmallApiServer) -> None:
        held = share("chat-1")
        held["status"]["replicas"][0]["claim"] = "claim-1"
        server.put(GPU_SHARES, held)
        for one in (
            agent(),
            agent("agent-2"),
            agent("agent-3", port=None),
        ):
            server.put(PODS, one)
        server.pods_answers["agent-1:9400/metrics"] = METRICS

    async def work(at: Scene) -> None:
        await at.until(lambda: at.follower.look().tenants)
        state = (await at.browser.get("/api/v1/state")).json
        (chat,) = state["models"]
        assert (chat["granted_bytes"], chat["measured_bytes"]) == (10 << 30, 8 * GB)
        assert (state["gpus"][0]["measured_bytes"], state["gpus"][0]["utilization_percent"]) == (9 * GB, 50)
        assert at.follower.look().tenants["chat-1"].waited_seconds == 1.5

    run(work, more=more)


def test_why_nothing_is_measured_is_a_note_until_an_agent_answers() -> None:
    async def work(at: Scene) -> None:
        def noted(words: str) -> bool:
            return any("Measured memory is not shown" in note and words in note for note in at.follower.read_notes())

        assert not noted(""), "without agents there is nothing to miss"
        at.server.put(PODS, agent(port=None))
        assert await at.follower._read_agents() == ([], "the node agents have no metrics port (agent.metricsPort of the chart)")
        at.server.put(PODS, agent())
        texts, problem = await at.follower._read_agents()
        assert (texts, problem) == ([], "no endpoints available")
        at.server.pods_answers["agent-1:9400/metrics"] = METRICS
        texts, problem = await at.follower._read_agents()
        assert (len(texts), problem) == (1, None)

    run(work)


def test_an_agent_that_answers_nonsense_does_not_end_the_page() -> None:
    asked = asyncio.Event()

    async def nonsense(_request: web.Request) -> web.Response:
        asked.set()
        return web.Response(text='aim_gpu_utilization_ratio{node="n1",gpu="gpu-0"} NaN\naim_x{ 5\n<html>')

    def more(server: SmallApiServer) -> None:
        server.put(PODS, agent())
        server.pods_answers["agent-1:9400/metrics"] = nonsense

    async def work(at: Scene) -> None:
        await asked.wait()
        at.server.put(PODS, pod("chat-2"))
        await at.until(lambda: len(at.follower.pods()) == 2)
        assert at.follower.look().usage == {}

    run(work, more=more)
