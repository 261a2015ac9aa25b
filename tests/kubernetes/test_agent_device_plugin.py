"""The device plugin inside the agent: registration, allocation, health and layouts that change, and grants that come back."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.kubernetes.agent_world import GIB, GPU, NODE, AgentWorld, agent_world, log_data
from tests.kubernetes.recording_kubelet import RecordingKubelet, recording_kubelet

from aimgpu.errors import Conflict, InvalidInput
from aimgpu.kubernetes.api.resources import CONFIG_MAPS, NODES
from aimgpu.kubernetes.node.kubelet_api import device_plugin_v1beta1_pb2 as pb
from aimgpu.kubernetes.node.kubelet_api import pod_resources_v1_pb2 as resources_pb
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, VERSION
from aimgpu.kubernetes.vocabulary.names import GROUP

LABEL = "aim.amd.com/device-plugin.config"
CONFIG = "aim-plugin-config"
NAMESPACE = "own"


def sharing(replicas: int, *, name: str = "amd.com/gpu", strategy: str = "none", own: str = "") -> str:
    resources = f"sharing: {{timeSlicing: {{resources: [{{name: {name}, replicas: {replicas}}}]}}}}"
    return f"version: v1\nflags: {{migStrategy: {strategy}}}\n{resources}\naim: {{{own}}}\n"


@contextmanager
def pod_resources(folder: Path) -> Iterator[dict[str, list[str]]]:
    """The kubelet's list of devices in use: namespaces with the devices of their one pod."""
    used: dict[str, list[str]] = {}

    def answer(_request: Any, _context: Any) -> resources_pb.ListPodResourcesResponse:
        return resources_pb.ListPodResourcesResponse(
            pod_resources=[
                resources_pb.PodResources(
                    name="pod",
                    namespace=namespace,
                    containers=[
                        resources_pb.ContainerResources(
                            name="main",
                            devices=[resources_pb.ContainerDevices(resource_name="amd.com/gpu", device_ids=devices)]
                            if devices
                            else [],
                        )
                    ],
                )
                for namespace, devices in used.items()
            ]
        )

    handler = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=resources_pb.ListPodResourcesRequest.FromString,
        response_serializer=resources_pb.ListPodResourcesResponse.SerializeToString,
    )
    folder.mkdir(parents=True, exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler})])
    server.add_insecure_port(f"unix://{folder / 'kubelet.sock'}")
    server.start()
    try:
        yield used
    finally:
        server.stop(None)


@asynccontextmanager
async def plugin_world(text: str | None, **options: Any) -> AsyncIterator[tuple[AgentWorld, RecordingKubelet]]:
    """`text`: the configuration in a file; None: it is followed in a ConfigMap."""
    async with agent_world(running=False, dra=False, **options) as world:
        folder = world.kubelet / "device-plugins"
        folder.mkdir(parents=True)
        if text is not None:
            path = world.folder / "config.yaml"
            path.write_text(text)
            world.options["device_plugin"] = path
        with recording_kubelet(folder) as kubelet:
            await world.start()
            yield world, kubelet


async def allocate(world: AgentWorld, kubelet: RecordingKubelet, resource: str, *ids: str) -> Any:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
    socket = f"device-plugins/{kubelet.endpoints[resource]}"
    answer = await world.call(socket, "v1beta1.DevicePlugin/Allocate", request, pb.AllocateResponse)
    return answer.container_responses[0]


async def listed(world: AgentWorld, kubelet: RecordingKubelet, resource: str) -> Any:
    """The stream of devices, as the kubelet follows it."""
    channel = world._channel(f"device-plugins/{kubelet.endpoints[resource]}")
    ask = channel.unary_stream(
        "/v1beta1.DevicePlugin/ListAndWatch",
        request_serializer=pb.Empty.SerializeToString,
        response_deserializer=pb.ListAndWatchResponse.FromString,
    )
    return ask(pb.Empty())


def test_replicas_are_registered_and_a_container_gets_its_part_of_the_memory() -> None:
    async def main() -> None:
        async with plugin_world(sharing(4), simulated=(("MI300X", 2),)) as (world, kubelet):
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            ids = kubelet.registered["amd.com/gpu"]
            assert len(ids) == 8
            given = await allocate(world, kubelet, "amd.com/gpu", ids[0])
            (grant,) = world.grants()
            assert grant.memory_bytes == 206141652992 // 4 // (1 << 20) * (1 << 20)
            assert given.envs["AIMGPU_MEMORY_BYTES"] == str(grant.memory_bytes)
            assert given.envs["AIMGPU_LEVEL"] == grant.level.value
            assert not given.cdi_devices

    asyncio.run(main())


def test_where_the_configuration_says_so_a_container_is_given_the_name_of_a_cdi_device() -> None:
    async def main() -> None:
        async with plugin_world(sharing(2, own="cdi: true")) as (world, kubelet):
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            given = await allocate(world, kubelet, "amd.com/gpu", kubelet.registered["amd.com/gpu"][0])
            (device,) = given.cdi_devices
            assert any(entry.startswith("AIMGPU_MEMORY_BYTES=") for entry in world.cdi()[device.name]["env"])
            assert not given.envs

    asyncio.run(main())


def test_a_refused_allocation_has_a_reason_and_holds_nothing() -> None:
    async def main() -> None:
        async with plugin_world(sharing(4)) as (world, kubelet):
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            ids = kubelet.registered["amd.com/gpu"]
            for wanted, reason in (
                ((ids[0], ids[1]), "2 replicas of one GPU"),
                (("gone::0",), "has no device gone::0 any more"),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=reason):
                    await allocate(world, kubelet, "amd.com/gpu", *wanted)
            assert world.grants() == ()

    asyncio.run(main())


def test_several_replicas_of_one_gpu_add_up_where_that_is_allowed() -> None:
    async def main() -> None:
        async with plugin_world(sharing(4, own="sameGpu: true")) as (world, kubelet):
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            ids = kubelet.registered["amd.com/gpu"]
            given = await allocate(world, kubelet, "amd.com/gpu", *ids[:3])
            assert given.envs["AIMGPU_MEMORY_BYTES"] == str(sum(grant.memory_bytes for grant in world.grants()))
            assert len(world.grants()) == 3

    asyncio.run(main())


def test_a_kubelet_that_starts_again_finds_the_plugin_registered_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aimgpu")

    async def main() -> None:
        async with plugin_world(sharing(2)) as (world, kubelet):
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            kubelet.registered.clear()
            for path in (world.kubelet / "device-plugins").glob("aimgpu-*.sock"):
                path.unlink()  # as a kubelet does at its start
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registered again")
            assert await allocate(world, kubelet, "amd.com/gpu", kubelet.registered["amd.com/gpu"][0])

    asyncio.run(main())
    assert log_data(caplog.records, "kubelet.restarted") == [{"resource": "amd.com/gpu"}]


def test_without_a_kubelet_the_agent_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with agent_world(running=False, dra=False) as world:
            folder = world.kubelet / "device-plugins"
            folder.mkdir(parents=True)
            path = world.folder / "config.yaml"
            path.write_text(sharing(2))
            await world.start(device_plugin=path)
            await world.rounds()
            with recording_kubelet(folder) as kubelet:
                await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")

    asyncio.run(main())
    assert log_data(caplog.records, "plugin.not_registered")


def test_the_kubelet_follows_health_and_layouts_without_a_restart() -> None:
    async def main() -> None:
        async with plugin_world(sharing(2, strategy="single"), simulated=(("MI300X", 1),)) as (world, kubelet):
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            stream = await listed(world, kubelet, "amd.com/gpu")
            assert [device.health for device in (await stream.read()).devices] == ["Healthy"] * 2
            world.set_gpus(faults={GPU: "lost"})
            assert [device.health for device in (await stream.read()).devices] == ["Unhealthy"] * 2
            world.set_gpus(faults={})
            assert [device.health for device in (await stream.read()).devices] == ["Healthy"] * 2
            world.set_layout("CPX/NPS1")
            assert len((await stream.read()).devices) == 16

    asyncio.run(main())


def resources_offered(world: AgentWorld) -> str:
    """Why some GPUs are not offered, as the GpuNode says it."""
    nodes = world.api.all(GPU_NODES)
    if not nodes or not nodes[0].get("status"):
        return "no GpuNode"
    conditions = nodes[0]["status"]["conditions"]
    (found,) = [one for one in conditions if one["type"] == "ResourcesOffered"]
    assert found["status"] == ("False" if found["message"] else "True")
    return str(found["message"])


def test_gpus_of_different_layouts_are_withdrawn_under_one_name_and_offered_again_when_they_are_alike(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with plugin_world(sharing(2, strategy="single"), simulated=(("MI300X", 2), ("H200", 1))) as (world, kubelet):
            await world.until(lambda: {"amd.com/gpu", "nvidia.com/gpu"} <= set(kubelet.registered), "registration")
            world.api.served.add(f"{GROUP}/{VERSION}")
            world.set_layout("CPX/NPS1")
            socket = world.kubelet / "device-plugins" / kubelet.endpoints["amd.com/gpu"]
            await world.until(lambda: not socket.exists(), "AMD's GPUs are withdrawn")
            await world.rounds(3)
            assert (world.kubelet / "device-plugins" / kubelet.endpoints["nvidia.com/gpu"]).exists()
            await world.until(lambda: resources_offered(world) == "GPUs have different partitions (CPX/NPS1, SPX/NPS1)", "why")
            kubelet.registered.pop("amd.com/gpu")
            world.set_layout("CPX/NPS1", "sim-mi300x-1")
            await world.until(lambda: len(kubelet.registered.get("amd.com/gpu", ())) == 32, "all are offered")
            await world.until(lambda: resources_offered(world) == "", "the condition")

    asyncio.run(main())
    (reported,) = log_data(caplog.records, "plugin.not_offered")
    assert reported == {"vendor": "amd", "reason": "GPUs have different partitions (CPX/NPS1, SPX/NPS1)"}


def test_grants_come_back_when_the_kubelet_no_longer_lists_their_containers() -> None:
    async def main() -> None:
        async with plugin_world(sharing(4)) as (world, kubelet):
            with pod_resources(world.kubelet / "pod-resources") as used:
                await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
                first, second, *_ = kubelet.registered["amd.com/gpu"]
                used["default"] = [first]
                await allocate(world, kubelet, "amd.com/gpu", first)
                await allocate(world, kubelet, "amd.com/gpu", second)
                await world.until(lambda: len(world.grants()) == 1, "the one that was never listed is given back")
                assert world.grants()[0].instance_id == f"replica.{first}"
                await world.rounds(10)
                assert len(world.grants()) == 1
                used.clear()
                await world.until(lambda: not world.grants(), "the other one is given back")

    asyncio.run(main())


def test_a_pod_keeps_its_grant_when_the_kubelet_starts_again_without_its_checkpoint() -> None:
    """It lists the pod, which runs on, without devices."""

    async def main() -> None:
        async with plugin_world(sharing(4)) as (world, kubelet):
            with pod_resources(world.kubelet / "pod-resources") as used:
                await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
                first, second, *_ = kubelet.registered["amd.com/gpu"]
                used |= {"stays": [first], "ends": [second]}
                for replica in (first, second):
                    await allocate(world, kubelet, "amd.com/gpu", replica)
                await world.rounds(3)
                used |= {"stays": [], "ends": []}
                kubelet.registered.clear()
                socket = world.kubelet / "device-plugins" / kubelet.endpoints["amd.com/gpu"]
                socket.unlink()  # as a kubelet does that starts
                await world.until(lambda: bool(kubelet.registered), "registration with the new one")
                await world.rounds(8)
                assert {grant.instance_id for grant in world.grants()} == {f"replica.{first}", f"replica.{second}"}
                del used["ends"]
                await world.until(lambda: len(world.grants()) == 1, "the pod that ended gives its replica back")
                assert world.grants()[0].instance_id == f"replica.{first}"
                await allocate(world, kubelet, "amd.com/gpu", first)  # the kubelet takes it for free
                used["new"] = [first]
                del used["stays"]
                await world.rounds(8)
                assert len(world.grants()) == 1

    asyncio.run(main())


def test_grants_stay_while_the_kubelet_does_not_answer_and_a_replica_given_again_is_charged_once() -> None:
    async def main() -> None:
        async with plugin_world(sharing(4)) as (world, kubelet):
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            (first, *_) = kubelet.registered["amd.com/gpu"]
            for _ in range(3):  # the kubelet says that it is free: its former container is gone
                await allocate(world, kubelet, "amd.com/gpu", first)
                assert len(world.grants()) == 1
            await world.rounds(10)
            assert len(world.grants()) == 1
            await world.restart()
            await world.rounds(5)
            assert len(world.grants()) == 1

    asyncio.run(main())


def test_the_configuration_is_followed_in_a_config_map_and_chosen_by_the_nodes_label(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aimgpu")

    def data(**texts: str) -> dict[str, Any]:
        return {"metadata": {"name": CONFIG}, "data": texts}

    async def main() -> None:
        async with plugin_world(None, device_plugin_config=CONFIG, namespace="ns") as (world, kubelet):
            await world.rounds()
            assert kubelet.registered == {}
            world.api.add(CONFIG_MAPS, data(two=sharing(2), eight=sharing(8)), "ns")
            await world.rounds()
            assert kubelet.registered == {}  # no label, no default
            world.api.change(NODES, NODE, {"metadata": {"labels": {LABEL: "two"}}})
            await world.until(lambda: len(kubelet.registered.get("amd.com/gpu", ())) == 2, "two replicas")
            stream = await listed(world, kubelet, "amd.com/gpu")
            assert len((await stream.read()).devices) == 2
            world.api.change(NODES, NODE, {"metadata": {"labels": {LABEL: "eight"}}})
            assert len((await stream.read()).devices) == 8
            world.api.change(CONFIG_MAPS, CONFIG, {"data": {"eight": "version: v9"}}, "ns")
            await world.rounds(3)
            world.api.change(CONFIG_MAPS, CONFIG, {"data": {"eight": sharing(5)}}, "ns")
            assert len((await stream.read()).devices) == 5  # the unusable one in between left the former in force

    asyncio.run(main())
    assert [entry["reason"] for entry in log_data(caplog.records, "plugin.configuration_refused")] == ["unknown version: v9"]


@pytest.mark.parametrize(
    ("allocatable", "conflict"),
    [
        ({"amd.com/cpx_nps1": "8"}, "another device plugin advertises amd.com/cpx_nps1"),
        ({"amd.com/spx_nps1": "1"}, "another device plugin advertises amd.com/spx_nps1"),
        ({"amd.com/qpx_nps4": "4"}, "another device plugin advertises amd.com/qpx_nps4"),
        ({"nvidia.com/gpu": "8"}, ""),  # no GPU of that vendor here
        ({"amd.com/cpx_nps1": "0"}, ""),  # of a plugin that is gone
        ({"amd.com/gpu": "2"}, ""),  # our own, from before
    ],
)
def test_the_agent_refuses_a_node_whose_gpus_another_plugin_offers(allocatable: dict[str, str], conflict: str) -> None:
    async def main() -> None:
        async with agent_world(running=False, dra=False) as world:
            world.api.change(NODES, NODE, {"status": {"allocatable": allocatable}})
            path = world.folder / "config.yaml"
            path.write_text(sharing(2))
            if not conflict:
                await world.start(device_plugin=path)
                await world.rounds()
                return
            with pytest.raises(Conflict, match=conflict) as refused:
                await world.start(device_plugin=path)
            assert refused.value.hint

    asyncio.run(main())


def test_a_vendors_plugin_that_listens_is_a_conflict_and_its_left_over_socket_is_none() -> None:
    async def main() -> None:
        async with agent_world(running=False, dra=False) as world:
            folder = world.kubelet / "device-plugins"
            folder.mkdir(parents=True)
            path = world.folder / "config.yaml"
            path.write_text(sharing(2))
            with socket.socket(socket.AF_UNIX) as rival:
                rival.bind(str(folder / "amd.com_gpu"))
                rival.listen()
                with pytest.raises(Conflict, match=r"a vendor's device plugin listens on .*amd\.com_gpu"):
                    await world.start(device_plugin=path)
                await world.stop()
            await world.start()  # its file is still there
            await world.rounds()

    asyncio.run(main())


def test_replicas_of_pods_that_are_gone_come_back_also_when_the_node_has_the_dra_driver_by_then() -> None:
    async def main() -> None:
        async with plugin_world(sharing(2)) as (world, kubelet):
            with pod_resources(world.kubelet / "pod-resources") as used:
                await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
                replica = kubelet.registered["amd.com/gpu"][0]
                used["team"] = [replica]
                await allocate(world, kubelet, "amd.com/gpu", replica)
                await world.stop()
                await world.start(device_plugin=None, dra=True)
                await world.rounds(8)
                assert len(world.grants()) == 1  # its container still runs
                used.clear()
                await world.until(lambda: not world.grants(), "the grant is given back")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("block", "rename", "product", "strategy"),
    [
        ("timeSlicing", "false", "NVIDIA-H200-SHARED", "time-slicing"),
        ("timeSlicing", "true", "NVIDIA-H200", "time-slicing"),  # the name of the resource says it
        ("mps", "false", "NVIDIA-H200-SHARED", "mps"),
    ],
)
def test_labels_are_those_of_nvidias_feature_discovery(block: str, rename: str, product: str, strategy: str) -> None:
    async def main() -> None:
        resources = "resources: [{name: nvidia.com/gpu, replicas: 4}]"
        text = f"version: v1\nsharing: {{{block}: {{renameByDefault: {rename}, {resources}}}}}\n"
        async with plugin_world(text, simulated=(("H200", 1),)) as (world, _kubelet):
            await world.until(lambda: "nvidia.com/gpu.replicas" in world.api.get(NODES, NODE)["metadata"]["labels"], "labels")
            found = world.api.get(NODES, NODE)["metadata"]["labels"]
            assert found["nvidia.com/gpu.product"] == product
            assert found["nvidia.com/gpu.sharing-strategy"] == strategy

    asyncio.run(main())


def test_replicas_are_withdrawn_while_a_vendors_plugin_listens_that_came_later() -> None:
    async def main() -> None:
        async with plugin_world(sharing(2)) as (world, kubelet):
            world.api.served.add(f"{GROUP}/{VERSION}")
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            stream = await listed(world, kubelet, "amd.com/gpu")
            assert {device.health for device in (await stream.read()).devices} == {"Healthy"}
            with socket.socket(socket.AF_UNIX) as rival:
                rival.bind(str(world.kubelet / "device-plugins" / "amd.com_gpu"))
                rival.listen()
                assert {device.health for device in (await stream.read()).devices} == {"Unhealthy"}
            assert {device.health for device in (await stream.read()).devices} == {"Healthy"}

    asyncio.run(main())


@pytest.mark.parametrize("text", ["version: v2\n", "sharing: 3\n", "[", None])
def test_a_configuration_file_that_cannot_be_used_ends_the_agent_before_it_offers_anything(text: str | None) -> None:
    async def main() -> None:
        async with agent_world(running=False, dra=False) as world:
            path = world.folder / "config.yaml"
            if text is not None:
                path.write_text(text)
            with pytest.raises(InvalidInput):
                await world.start(device_plugin=path)

    asyncio.run(main())


def test_memory_of_replicas_adds_up_to_no_more_than_the_gpu_has() -> None:
    async def main() -> None:
        async with plugin_world(sharing(7)) as (world, kubelet):
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            for name in kubelet.registered["amd.com/gpu"]:
                await allocate(world, kubelet, "amd.com/gpu", name)
            assert len(world.grants()) == 7
            assert 191 * GIB < sum(grant.memory_bytes for grant in world.grants()) <= 206141652992

    asyncio.run(main())


def test_replicas_that_would_be_refused_are_not_advertised() -> None:
    """Pods of a former configuration hold larger parts: what is left is for fewer of the new replicas."""

    async def main() -> None:
        async with plugin_world(sharing(4)) as (world, kubelet):
            with pod_resources(world.kubelet / "pod-resources") as used:
                await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
                held = kubelet.registered["amd.com/gpu"][:3]
                for number, name in enumerate(held):
                    await allocate(world, kubelet, "amd.com/gpu", name)
                    used[f"pod-{number}"] = [name]
                (world.folder / "config.yaml").write_text(sharing(8))
                await world.restart()
                stream = await listed(world, kubelet, "amd.com/gpu")
                healthy: list[str] = []
                async for answer in stream:
                    healthy = [one.ID for one in answer.devices if one.health == "Healthy"]
                    if len(healthy) == 5:
                        break
                assert set(held) <= set(healthy)
                for name in sorted(set(healthy) - set(held)):
                    await allocate(world, kubelet, "amd.com/gpu", name)
                    used[f"pod-{name}"] = [name]
                used.pop("pod-0")
                async for answer in stream:
                    if len([one for one in answer.devices if one.health == "Healthy"]) == 6:  # what it held is two of these
                        break
                stream.cancel()

    asyncio.run(main())


def test_the_gpu_node_describes_what_is_offered_to_admission_as_the_configuration_changes() -> None:
    async def main() -> None:
        async with plugin_world(None, simulated=(("MI300X", 2),), device_plugin_config=CONFIG, namespace=NAMESPACE) as (
            world,
            _kubelet,
        ):
            world.api.served.add(f"{GROUP}/{VERSION}")
            text = sharing(4, own="isolation: none").replace(
                "timeSlicing: {", "timeSlicing: {failRequestsGreaterThanOne: true, "
            )
            world.api.add(CONFIG_MAPS, {"metadata": {"name": CONFIG}, "data": {"default": text}}, NAMESPACE)
            await world.until(lambda: bool(offered(world)), "what is offered")
            total = 206141652992
            assert offered(world) == [
                {
                    "name": "amd.com/gpu",
                    "replicas": 8,
                    "memoryBytes": total // 4 // (1 << 20) * (1 << 20),
                    "partitionBytes": total,
                    "shared": True,
                    "mostPerContainer": 1,
                    "isolation": "none",
                    "computeMode": "SPX",
                    "memoryMode": "NPS1",
                }
            ]
            world.api.change(CONFIG_MAPS, CONFIG, {"data": {"default": sharing(2)}}, NAMESPACE)
            await world.until(lambda: [one["replicas"] for one in offered(world)] == [4], "two of each")
            world.api.remove(CONFIG_MAPS, CONFIG, NAMESPACE)
            await world.until(lambda: offered(world) == [], "nothing is offered any more")

    asyncio.run(main())


def offered(world: AgentWorld) -> list[dict[str, Any]]:
    nodes = world.api.all(GPU_NODES)
    found: list[dict[str, Any]] = (nodes[0].get("status") or {}).get("resources") or [] if nodes else []
    return found


def test_replicas_of_running_pods_are_charged_again_after_the_ledger_was_lost() -> None:
    async def main() -> None:
        async with plugin_world(sharing(4)) as (world, kubelet):
            with pod_resources(world.kubelet / "pod-resources") as used:
                await world.until(lambda: "amd.com/gpu" in kubelet.registered, "the resource")
                first, second = sorted(kubelet.registered["amd.com/gpu"])[:2]
                for name in (first, second):
                    await allocate(world, kubelet, "amd.com/gpu", name)
                    used[name.replace("::", "-")] = [name]
                before = sorted((grant.instance_id, grant.memory_bytes) for grant in world.grants())
                await world.stop()
                for path in (world.folder / "state").glob("ledger.db*"):
                    path.unlink()
                await world.start()
                await world.rounds()
                assert sorted((grant.instance_id, grant.memory_bytes) for grant in world.grants()) == before
                used.clear()
                await world.until(lambda: not world.grants(), "they are given back")

    asyncio.run(main())
