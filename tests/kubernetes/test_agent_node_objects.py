"""What the agent reports of its node: labels, the GpuNode object and the layouts wanted there, metrics; when it refuses."""

import asyncio
import socket
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from tests.kubernetes.agent_world import GIB, GPU, NODE, AgentWorld, add_claim, agent_world, log_data, result
from tests.kubernetes.memory_api import MemoryApi

from aimgpu.domain import Vendor
from aimgpu.errors import Conflict, HardwareUnavailable, InvalidInput, LedgerOwned
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.api.metrics_server import MetricsServer
from aimgpu.kubernetes.api.resources import DEVICE_CLASSES, NODES, RESOURCE_CLAIMS, RESOURCE_SLICES
from aimgpu.kubernetes.node.agent import succession
from aimgpu.kubernetes.node.agent.gpu_node import summaries
from aimgpu.kubernetes.node.agent.labels import PluginSharing, node_labels
from aimgpu.kubernetes.node.agent.metrics import render
from aimgpu.kubernetes.node.agent.options import parse_options
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, VERSION
from aimgpu.kubernetes.vocabulary.names import GROUP

MANAGED = "aim.amd.com/gpu-sharing.managed"


def labels(world: AgentWorld) -> dict[str, str]:
    found: dict[str, str] = world.api.get(NODES, NODE)["metadata"]["labels"]
    return found


def applied(world: AgentWorld) -> tuple[str, str]:
    return condition(world, "LayoutsApplied")


def condition(world: AgentWorld, name: str) -> tuple[str, str]:
    (found,) = [one for one in world.api.get(GPU_NODES, NODE)["status"]["conditions"] if one["type"] == name]
    return found["status"], found["message"]


async def with_gpu_nodes(world: AgentWorld) -> None:
    world.api.served.add(f"{GROUP}/{VERSION}")
    await world.start()
    await world.until(
        lambda: bool(world.api.all(GPU_NODES)) and bool(world.api.get(GPU_NODES, NODE).get("status")), "a GpuNode"
    )


def want(world: AgentWorld, *layouts: tuple[str, str]) -> None:
    wanted = [{"gpu": gpu, "layout": layout} for gpu, layout in layouts]
    world.api.change(GPU_NODES, NODE, {"spec": {"layouts": wanted}})


def test_the_status_that_calls_layouts_applied_shows_them() -> None:
    async def main() -> None:
        async with agent_world(running=False, dra=False, interval_seconds=3600.0) as world:  # one round
            world.api.served.add(f"{GROUP}/{VERSION}")
            wanted = [{"gpu": GPU, "layout": "CPX/NPS1"}]
            world.api.add(GPU_NODES, {"metadata": {"name": NODE, "generation": 3}, "spec": {"layouts": wanted}})
            await world.start()
            await world.until(lambda: "status" in world.api.get(GPU_NODES, NODE), "the status")
            status = world.api.get(GPU_NODES, NODE)["status"]
            assert applied(world) == ("True", "")
            assert (status["observedGeneration"], status["gpus"][0]["layout"]) == (3, "CPX/NPS1")

    asyncio.run(main())


def test_the_gpu_node_shows_what_the_server_lacks_and_since_when() -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            world.api.version = (1, 35, 4)
            await with_gpu_nodes(world)
            status, text = condition(world, "ServerComplete")
            assert status == "False"
            assert text.startswith("kube-scheduler 1.36.2: shares are not counted")
            world.api.version = (1, 36, 4)
            await world.restart()
            await world.until(lambda: condition(world, "ServerComplete") == ("True", ""), "a complete server")
            written = world.api.count("PATCH", GPU_NODES)
            await world.rounds()
            assert world.api.count("PATCH", GPU_NODES) == written

    asyncio.run(main())


@pytest.mark.parametrize(("kept", "lacks"), [(None, False), ({"extendedResourceName": "aim.amd.com/gpu"}, False), ({}, True)])
def test_a_server_that_drops_the_name_of_a_class_for_plain_limits_is_reported(
    kept: dict[str, str] | None, *, lacks: bool
) -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            if kept is not None:
                world.api.add(DEVICE_CLASSES, {"metadata": {"name": "gpu.aim.amd.com"}, "spec": {"selectors": [], **kept}})
            await with_gpu_nodes(world)
            status, message = condition(world, "ServerComplete")
            assert (status, "DRAExtendedResource" in message) == (("False", True) if lacks else ("True", False))

    asyncio.run(main())


def test_labels_follow_the_layout_others_are_left_alone_and_ours_come_back() -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            world.api.change(NODES, NODE, {"metadata": {"labels": {"rack": "7", "nvidia.com/gpu.count": "3"}}})
            await world.start()
            await world.until(lambda: labels(world).get(MANAGED) == "true", "labels")
            assert labels(world)["rack"] == "7"
            assert "nvidia.com/gpu.count" not in labels(world)  # of a node that had such GPUs
            assert labels(world)["amd.com/gpu.compute-memory-partition"] == "spx_nps1"
            world.set_layout("CPX/NPS1")
            await world.until(lambda: labels(world)["amd.com/gpu.compute-memory-partition"] == "cpx_nps1", "the new layout")
            world.api.change(NODES, NODE, {"metadata": {"labels": {MANAGED: None}}})
            await world.until(lambda: labels(world).get(MANAGED) == "true", "the label again")
            await world.rounds()
            written = world.api.count("PATCH", NODES)
            await world.rounds(5)
            assert world.api.count("PATCH", NODES) == written

    asyncio.run(main())


def test_without_labels_the_node_object_is_not_written() -> None:
    async def main() -> None:
        async with agent_world(labels=False) as world:
            await world.until(lambda: GPU in world.devices(), "slices")
            for _ in range(5):
                world.set_layout("CPX/NPS1")
                await world.until(lambda: f"{GPU}-cpx-0" in world.devices(), "the partitions")
                world.set_layout("SPX/NPS1")
                await world.until(lambda: GPU in world.devices(), "the whole GPU")
            assert world.api.count("PATCH", NODES) == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("products", "shared", "expected"),
    [
        ([("MI300X", 2)], {}, {"amd.com/gpu.product-name": "AMD-Instinct-MI300X", "amd.com/gpu.replicas": None}),
        ([("MI300X", 1), ("MI325X", 1)], {Vendor.AMD: 1}, {"amd.com/gpu.replicas": "1", "aim.amd.com/gpu.count": "2"}),
        (
            [("H200", 1)],
            {Vendor.NVIDIA: 1},
            {"nvidia.com/gpu.sharing-strategy": "none", "nvidia.com/gpu.product": "NVIDIA-H200"},
        ),
        ([("H200", 1)], {Vendor.NVIDIA: 4}, {"nvidia.com/gpu.product": "NVIDIA-H200-SHARED", "amd.com/gpu.vram": None}),
        ([], {}, {MANAGED: None}),
    ],
)
def test_labels_are_those_of_the_gpus_there_are(
    products: list[tuple[str, int]], shared: dict[Vendor, int], expected: dict[str, str | None]
) -> None:
    devices = SimulatedHardware(products).read_devices() if products else ()
    found = node_labels(devices, {vendor: PluginSharing(replicas=count) for vendor, count in shared.items()})
    assert {name: found.get(name) for name in expected} == expected


def test_the_gpu_node_is_made_kept_up_to_date_and_written_only_when_something_changed() -> None:
    async def main() -> None:
        async with agent_world(running=False, simulated=(("MI300X", 2), ("H200", 1))) as world:
            await with_gpu_nodes(world)
            found = world.api.get(GPU_NODES, NODE)
            assert found["metadata"]["ownerReferences"][0]["uid"] == world.api.get(NODES, NODE)["metadata"]["uid"]
            assert found["status"]["products"] == "2 x MI300X (simulated), H200-141 (simulated)"
            assert applied(world) == ("True", "")
            written = world.api.count("PATCH", GPU_NODES)
            await world.rounds(5)
            assert world.api.count("PATCH", GPU_NODES) == written
            world.set_gpus(faults={GPU: "lost"})
            await world.until(lambda: "unhealthy" in world.api.get(GPU_NODES, NODE)["status"]["gpus"][0], "its health")
            world.api.remove(GPU_NODES, NODE)
            await world.until(lambda: bool(world.api.all(GPU_NODES)), "a new one")

    asyncio.run(main())


def test_wanted_layouts_are_applied_to_idle_gpus_and_each_that_is_not_has_its_reason() -> None:
    async def main() -> None:
        async with agent_world(running=False, simulated=(("MI300X", 3),)) as world:
            await with_gpu_nodes(world)
            claim = add_claim(world, "busy", result("sim-mi300x-1-shared", gib=1))
            assert not (await world.prepare(claim))["busy"].error
            want(
                world,
                (GPU, "CPX/NPS1"),
                ("sim-mi300x-1", "CPX/NPS1"),
                ("sim-mi300x-2", "XYZ/NPS9"),
                ("no-such-gpu", "CPX/NPS1"),
            )
            await world.until(lambda: applied(world)[0] == "False", "what could not be done")
            message = applied(world)[1]
            assert "no-such-gpu: there is no such GPU on this node" in message
            assert "sim-mi300x-1: it is in use as SPX/NPS1; drain its pods first" in message
            assert "sim-mi300x-2: " in message
            assert GPU not in message.replace("sim-mi300x-1", "").replace("sim-mi300x-2", "")
            await world.until(lambda: f"{GPU}-cpx-7" in world.devices(), "the partitions of the idle GPU")
            await world.unprepare(claim)
            want(world, (GPU, "cpx/nps1"), ("sim-mi300x-1", "CPX/NPS1"))
            await world.until(lambda: applied(world) == ("True", ""), "all are applied")
            names = "2 x CPX/NPS1, SPX/NPS1"
            await world.until(lambda: world.api.get(GPU_NODES, NODE)["status"]["layoutNames"] == names, "the layouts are shown")

    asyncio.run(main())


def test_a_wanted_layout_is_what_a_gpu_returns_to_after_a_claim_changed_it() -> None:
    async def main() -> None:
        async with agent_world(running=False, repartition=True) as world:
            await with_gpu_nodes(world)
            want(world, (GPU, "DPX/NPS1"))
            await world.until(lambda: world.devices()[f"{GPU}-dpx-0"]["attributes"]["current"]["bool"], "what is wanted")
            claim = add_claim(world, "some", result(f"{GPU}-cpx-2"))
            assert not (await world.prepare(claim))["some"].error
            await world.unprepare(claim)
            await world.until(lambda: world.devices()[f"{GPU}-dpx-0"]["attributes"]["current"]["bool"], "what is wanted again")

    asyncio.run(main())


def test_a_gpu_node_that_cannot_be_written_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            world.api.fail("PATCH", GPU_NODES, 403)
            await with_gpu_nodes(world)
            await world.until(lambda: GPU in world.devices(), "slices")

    asyncio.run(main())
    assert len(log_data(caplog.records, "gpu_node.not_written")) == 1


def test_summaries_count_products_and_layouts() -> None:
    def gpu(product: str, layout: str, *, simulated: bool) -> dict[str, Any]:
        parts = [
            {"id": "0", "memoryBytes": 24 * GIB, "grantedBytes": 3 * GIB},
            {"id": "1", "memoryBytes": 0, "grantedBytes": 0},
        ]
        return {"product": product, "layout": layout, "simulated": simulated, "partitions": parts}

    found = summaries([gpu("MI300X", "CPX/NPS4", simulated=False)] * 7 + [gpu("MI300X", "SPX/NPS1", simulated=True)])
    assert found == {
        "products": "7 x MI300X, MI300X (simulated)",
        "layoutNames": "7 x CPX/NPS4, SPX/NPS1",
        "memoryGranted": "24GiB of 192GiB",
    }
    assert summaries([]) == {"products": "", "layoutNames": "", "memoryGranted": "0B of 0B"}


def test_the_gpu_node_shows_what_of_each_partition_is_granted() -> None:
    async def main() -> None:
        async with agent_world(running=False, simulated=(("MI300X", 2),)) as world:
            await with_gpu_nodes(world)

            def granted() -> list[int]:
                gpus = world.api.get(GPU_NODES, NODE)["status"]["gpus"]
                return [part["grantedBytes"] for gpu in gpus for part in gpu["partitions"]]

            assert granted() == [0, 0]
            claims = [add_claim(world, f"claim-{gib}", result("sim-mi300x-1-shared", gib=gib)) for gib in (2, 5)]
            await world.prepare(*claims)
            await world.until(lambda: granted() == [0, 7 * GIB], "both shares")
            await world.unprepare(claims[0])
            await world.until(lambda: granted() == [0, 5 * GIB], "one was given back")

    asyncio.run(main())


def test_metrics_count_what_is_granted_and_which_gpus_are_lost() -> None:
    async def main() -> None:
        async with agent_world(metrics_port=0, simulated=(("MI300X", 2),)) as world:
            await world.prepare(add_claim(world, "some", result(gib=48)))
            assert world.agent is not None
            await world.rounds()
            text = (world.agent._render_metrics() or b"").decode()
            where = f'node="{NODE}",gpu="{GPU}",partition="{GPU}/spx-0"'
            assert f"aim_gpu_partition_memory_allocated_bytes{{{where}}} {48 * GIB}" in text
            assert f'aim_gpu_up{{node="{NODE}",gpu="{GPU}"}} 1' in text
            assert 'model="default/some"' in text
            world.set_gpus(faults={GPU: "lost"})
            await world.until(
                lambda: f'aim_gpu_up{{node="{NODE}",gpu="{GPU}"}} 0' in (world.agent._render_metrics() or b"").decode(),  # type: ignore[union-attr]
                "the lost GPU",
            )

    asyncio.run(main())


def test_the_probe_of_the_kubelet_fails_until_the_gpus_were_read() -> None:
    collected: list[bytes | None] = [None]

    def ask(port: int, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    async def main() -> None:
        server = MetricsServer(0, lambda: collected[0])
        await server.stop()  # before it was started
        await server.start()
        assert server._runner is not None
        port = next(address[1] for address in server._runner.addresses if len(address) == 2)
        before = [await asyncio.to_thread(ask, port, path) for path in ("/healthz", "/metrics")]
        assert [status for status, _ in before] == [503, 503]
        assert "nothing was read yet" in before[1][1]
        assert (await asyncio.to_thread(ask, port, "/livez"))[0] == 200
        collected[0] = render([("aim_gpu_up", ("n", "g"), 1)])
        assert (await asyncio.to_thread(ask, port, "/healthz"))[0] == 200
        assert 'aim_gpu_up{node="n",gpu="g"} 1' in (await asyncio.to_thread(ask, port, "/metrics"))[1]
        assert (await asyncio.to_thread(ask, port, "/other"))[0] == 404
        await server.stop()

    asyncio.run(main())


def test_a_second_agent_on_one_node_is_refused() -> None:
    async def main() -> None:
        async with agent_world() as world:
            second = AgentWorld(world.folder, world.api, {})
            with pytest.raises(LedgerOwned):
                await second.start()
            await second.stop()

    asyncio.run(main())


def test_the_agent_of_an_update_is_ready_while_the_old_one_has_the_node_and_takes_over_when_it_goes() -> None:
    async def main() -> None:
        async with agent_world() as world:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            options = replace(world.settings(), metrics_port=port)
            client = world.api.client()
            waiting = asyncio.create_task(succession.take_over(options, client))

            def health() -> int:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=300) as answer:
                        return int(answer.status)
                except OSError:
                    return 0

            while await asyncio.to_thread(health) != 200:  # noqa: ASYNC110 - a server that starts
                await asyncio.sleep(0.01)
            assert not waiting.done()
            await world.stop()
            agent = await waiting
            assert agent.hardware.read_devices()
            agent._owner.release()
            await client.close()

    asyncio.run(main())


def test_the_agent_of_an_update_that_cannot_read_the_gpus_ends_and_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_hardware: object) -> None:
        raise HardwareUnavailable("this node has a GPU that cannot be used")

    monkeypatch.setattr(succession, "check_hardware", refuse)

    async def main() -> None:
        async with agent_world() as world:
            client = world.api.client()
            with pytest.raises(HardwareUnavailable):
                await succession.take_over(world.settings(), client)
            await world.rounds()
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(("driver", "refused"), [("gpu.amd.com", True), ("gpu.nvidia.com", False), ("dra.example.com", False)])
def test_a_vendors_driver_on_the_same_gpus_is_a_conflict(driver: str, *, refused: bool) -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            spec = {"driver": driver, "nodeName": NODE, "pool": {"name": NODE, "generation": 1}, "devices": [{"name": "gpu-0"}]}
            world.api.add(RESOURCE_SLICES, {"metadata": {"name": "rival"}, "spec": spec})
            world.api.add(
                RESOURCE_SLICES,
                {"metadata": {"name": "elsewhere"}, "spec": spec | {"driver": "gpu.amd.com", "nodeName": "node2"}},
            )
            if refused:
                with pytest.raises(Conflict, match=f"the DRA driver {driver} publishes devices of this node"):
                    await world.start()
            else:
                await world.start()
                await world.until(lambda: GPU in world.devices(), "slices")

    asyncio.run(main())


def test_gpus_are_given_to_no_further_pod_while_another_plugin_offers_them_that_came_later() -> None:
    async def main() -> None:
        async with agent_world(running=False, simulated=(("MI300X", 1), ("H200", 1))) as world:
            await with_gpu_nodes(world)
            assert condition(world, "OfferedHereOnly") == ("True", "")
            world.api.change(NODES, NODE, {"status": {"allocatable": {"nvidia.com/gpu": "1"}}})
            await world.until(lambda: condition(world, "OfferedHereOnly")[0] == "False", "the condition")
            assert condition(world, "OfferedHereOnly")[1] == "another device plugin advertises nvidia.com/gpu on this node"
            tainted = {name for name, device in world.devices().items() if device.get("taints")}
            assert {name.rpartition("-shared")[0] or name for name in tainted} == {"sim-h200-141-0"}
            world.api.change(NODES, NODE, {"status": {"allocatable": {"nvidia.com/gpu": "0"}}})
            await world.until(lambda: not any(device.get("taints") for device in world.devices().values()), "no taint")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--kai", "--no-dra"], "KAI-Scheduler"),
        (["--device-plugin", "file"], "twice"),
        (["--device-plugin-config", "map"], "twice"),
        (["--simulated", "MI300X:0"], "not a product and a number"),
        (["--simulated", "MI300X:-1"], "not a product and a number"),
        (["--default-share", "many"], "many"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_what_to_write(arguments: list[str], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_options(arguments, {})


def test_options_come_from_the_environment_of_the_chart_and_the_command_line_wins() -> None:
    environment = {"NODE_NAME": "gpu-7", "AIMGPU_SIMULATED": "MI300X:2", "POD_NAMESPACE": "sharing"}
    options = parse_options([], environment)
    assert (options.node, options.simulated, options.namespace) == ("gpu-7", (("MI300X", 2),), "sharing")
    given = parse_options(["--node-name", "other", "--simulated", "", "--kai", "--device-plugin", "file"], environment)
    assert (given.node, given.simulated, given.kai) == ("other", (), True)
    assert parse_options(["--default-share", "50%"], environment).default_share_ppm == 500_000
    forms = [parse_options(given, environment).single_device for given in ([], ["--single-device"], ["--no-single-device"])]
    assert forms == [None, True, False]


def test_slices_show_a_layout_before_the_gpu_node_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator opens the node by what the GpuNode shows: kube-scheduler would give pods a device of the layout before."""

    async def main() -> None:
        async with agent_world(running=False) as world:
            await with_gpu_nodes(world)
            shown: list[set[str]] = []
            patch = MemoryApi._patch

            def watched(api: MemoryApi, key: Any, body: Any, request: Any, subresource: str | None) -> Any:
                if key[0] == "gpunodes" and (body.get("status") or {}).get("gpus", [{}])[0].get("layout") == "CPX/NPS1":
                    shown.append(set(world.devices()))
                return patch(api, key, body, request, subresource)

            monkeypatch.setattr(MemoryApi, "_patch", watched)
            want(world, (GPU, "CPX/NPS1"))
            await world.until(lambda: bool(shown), "the layout is shown")
            assert f"{GPU}-cpx-0" in shown[0]
            assert GPU not in shown[0]

    asyncio.run(main())


def test_claims_change_no_layout_while_a_plan_changes_the_node() -> None:
    async def main() -> None:
        async with agent_world(running=False, repartition=True) as world:
            await with_gpu_nodes(world)
            world.api.change(NODES, NODE, {"metadata": {"labels": {"aim.amd.com/partition-plan": "uid"}}})
            await world.rounds(3)
            late = add_claim(world, "late", result(f"{GPU}-cpx-2"))
            assert "a PartitionPlan changes this node" in (await world.prepare(late))["late"].error
            (status,) = world.api.get(RESOURCE_CLAIMS, "late", "default")["status"]["devices"]
            assert status["conditions"][0]["reason"] == "DeviceGone"
            world.api.change(NODES, NODE, {"metadata": {"labels": {"aim.amd.com/partition-plan": None}}})
            await world.rounds(3)
            assert not (await world.prepare(late))["late"].error

    asyncio.run(main())
