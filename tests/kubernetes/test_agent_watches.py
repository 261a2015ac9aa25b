"""The agent follows its own objects by watches: an idle one asks for nothing, and what happens in a gap is not missed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.kubernetes.agent_world import GPU, NODE, AgentWorld, add_claim, agent_world, log_data, result
from tests.kubernetes.recording_kubelet import recording_kubelet

from aimgpu.errors import Conflict
from aimgpu.kubernetes.api import client as api_client
from aimgpu.kubernetes.api.resources import CONFIG_MAPS, NODES, RESOURCE_SLICES
from aimgpu.kubernetes.node.agent.offers import DraOffer
from aimgpu.kubernetes.node.agent.survey import Survey
from aimgpu.kubernetes.node.grpc_server import SocketServer
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, VERSION
from aimgpu.kubernetes.vocabulary.names import GROUP, LABEL_MANAGED

FOLLOWED = (NODES, GPU_NODES, RESOURCE_SLICES)


def want(world: AgentWorld, layout: str) -> None:
    world.api.change(GPU_NODES, NODE, {"spec": {"layouts": [{"gpu": GPU, "layout": layout}]}})


def layout_name(world: AgentWorld) -> str:
    status = world.api.get(GPU_NODES, NODE).get("status") or {} if world.api.all(GPU_NODES) else {}
    return str(status.get("layoutNames"))


async def followed(world: AgentWorld, **options: Any) -> None:
    world.api.served.add(f"{GROUP}/{VERSION}")
    await world.start(**options)
    await world.watching(*FOLLOWED)


@pytest.mark.parametrize("options", [{}, {"dra": False}, {"dra": False, "device_plugin_config": "sharing", "namespace": "own"}])
def test_an_idle_agent_asks_the_api_server_for_nothing(options: dict[str, Any]) -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            world.api.add(CONFIG_MAPS, {"metadata": {"name": "sharing"}, "data": {"default": "version: v1"}}, "own")
            await followed(world, **options)
            await world.watching(*((CONFIG_MAPS,) if "device_plugin_config" in options else ()))
            await world.rounds(3)
            asked = list(world.api.requests)
            await world.rounds(20)
            assert world.api.requests[len(asked) :] == []

    asyncio.run(main())


def test_a_wanted_layout_is_applied_at_once_not_in_the_next_round() -> None:
    async def main() -> None:
        async with agent_world(running=False, interval_seconds=3600.0) as world:
            await followed(world)
            for layout in ("CPX/NPS1", "DPX/NPS1"):
                want(world, layout)
                await world.until(lambda: layout_name(world) == layout, layout)  # noqa: B023 - awaited

    asyncio.run(main())


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_changes_while_the_api_server_is_away_is_done_when_it_is_back(*, forgotten: bool) -> None:
    """Also where the server does not know the changes any more, and answers 410 Gone."""

    async def main() -> None:
        async with agent_world(running=False) as world:
            await followed(world)
            await world.until(lambda: LABEL_MANAGED in world.api.get(NODES, NODE)["metadata"]["labels"], "labels")
            world.api.away = True
            world.api.close_watches()
            want(world, "CPX/NPS1")
            world.api.change(NODES, NODE, {"metadata": {"labels": {LABEL_MANAGED: None}}})
            for found in world.slices():
                world.api.remove(RESOURCE_SLICES, found["metadata"]["name"])
            if forgotten:
                world.api.compact()
            await world.rounds(3)
            world.api.away = False
            await world.until(lambda: layout_name(world) == "CPX/NPS1", "the layout")
            await world.until(lambda: LABEL_MANAGED in world.api.get(NODES, NODE)["metadata"]["labels"], "the label")
            await world.until(lambda: f"{GPU}-cpx-0" in world.devices(), "the slices")

    asyncio.run(main())


def test_a_gpu_node_deleted_while_the_api_server_is_away_is_made_again() -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            await followed(world)
            world.api.away = True
            world.api.close_watches()
            world.api.remove(GPU_NODES, NODE)
            world.api.compact()
            await world.rounds(3)
            world.api.away = False
            await world.until(lambda: bool(world.api.all(GPU_NODES)), "a new one")

    asyncio.run(main())


def test_the_kubelet_is_served_while_the_api_server_is_away() -> None:
    """A new claim has to be read from it, and can be prepared once it is back; the agent goes on all the while."""

    async def main() -> None:
        async with agent_world(running=False) as world:
            await followed(world)
            held, later = add_claim(world, "held", result(gib=4)), add_claim(world, "later", result(gib=8))
            assert not (await world.prepare(held))["held"].error
            world.api.away = True
            world.api.close_watches()
            await world.rounds(3)
            assert await world.unprepare(held) == {"held": ""}
            assert not world.grants()
            assert "the server is away" in (await world.prepare(later))["later"].error
            world.api.away = False
            assert not (await world.prepare(later))["later"].error

    asyncio.run(main())


def test_a_kubelet_that_starts_again_while_the_api_server_is_away_finds_the_device_plugin() -> None:
    """Its configuration is chosen by the node's labels, which the agent has seen."""

    async def main() -> None:
        async with agent_world(running=False, dra=False, device_plugin_config="sharing", namespace="own") as world:
            world.api.add(CONFIG_MAPS, {"metadata": {"name": "sharing"}, "data": {"default": "version: v1"}}, "own")
            folder = world.kubelet / "device-plugins"
            folder.mkdir(parents=True)
            with recording_kubelet(folder) as kubelet:
                await followed(world)
                await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
                world.api.away = True
                world.api.close_watches()
                kubelet.registered.clear()
                for path in folder.glob("aimgpu-*.sock"):
                    path.unlink()
                await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registered again")

    asyncio.run(main())


def test_kinds_that_the_cluster_gets_later_are_followed_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "_LONGEST_ABSENCE_SECONDS", 0.05)

    async def main() -> None:
        async with agent_world(running=False, dra=False) as world:
            world.api.served.clear()
            await world.start()
            await world.rounds(8)
            assert not world.api.watched(GPU_NODES) + world.api.watched(RESOURCE_SLICES) + len(world.api.all(GPU_NODES))
            world.api.served |= {f"{GROUP}/{VERSION}", "resource.k8s.io/v1"}
            await world.watching(*FOLLOWED)
            await world.until(lambda: layout_name(world) == "SPX/NPS1", "a GpuNode")

    asyncio.run(main())


def test_a_node_that_is_deleted_and_comes_back_is_labelled_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            await followed(world)
            world.api.remove(NODES, NODE)
            expected = {"reason": f"the node {NODE} was deleted"}
            await world.until(lambda: expected in log_data(caplog.records, "agent.refresh_failed"), "the reason")
            world.api.add(NODES, {"metadata": {"name": NODE, "labels": {}}, "status": {"allocatable": {}}})
            await world.until(lambda: LABEL_MANAGED in world.api.get(NODES, NODE)["metadata"]["labels"], "labels")

    asyncio.run(main())


def test_an_agent_whose_watches_end_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would work for ever with what it saw last."""

    def fail(*_: object) -> bool:
        raise RuntimeError("broken")

    async def main() -> None:
        async with agent_world(running=False) as world:
            await followed(world)
            monkeypatch.setattr(api_client, "_remember", fail)  # the watch itself, not what it reports
            world.api.add(RESOURCE_SLICES, {"metadata": {"name": "some"}, "spec": {"nodeName": NODE, "driver": "other"}})
            with pytest.raises(ExceptionGroup):
                await world.until(lambda: False, "its end")
            world._task = None

    asyncio.run(main())


def test_a_cancellation_while_a_server_stops_is_not_lost(tmp_path: Path) -> None:
    """Else the agent goes on: gRPC waits with `wait_for`, which loses one that comes together with the end."""

    async def main() -> None:
        for turns in range(12):
            for _ in range(20):
                server = SocketServer(tmp_path / "server.sock", {})
                await server.start()
                stopping = asyncio.ensure_future(server.stop())
                for _ in range(turns):
                    await asyncio.sleep(0)
                if not stopping.cancel():
                    continue
                await asyncio.wait([stopping])
                assert stopping.cancelled(), turns
                await server.stop()

    asyncio.run(main())


def test_it_ends_although_a_call_reports_its_own_error_for_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC does for a call that fails in the same moment."""

    async def main() -> None:
        called = asyncio.Event()

        async def publish(_self: DraOffer, _survey: Survey) -> None:
            called.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise Conflict("the kubelet is away") from None

        async with agent_world() as world:
            monkeypatch.setattr(DraOffer, "publish", publish)
            await called.wait()
            await world.stop()

    asyncio.run(main())
