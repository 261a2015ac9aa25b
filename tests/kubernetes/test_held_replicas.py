"""Which pod holds which replica: from the kubelet's list by way of the node's GpuNode into the pod's GpuShare."""

import asyncio
import json
from typing import Any

from tests.kubernetes.agent_world import GPU, NODE, AgentWorld
from tests.kubernetes.test_agent_device_plugin import allocate, plugin_world, pod_resources, sharing
from tests.kubernetes.test_share_kinds import GIB, REPLICA, limited, pod
from tests.kubernetes.test_share_loop import GB

from aimgpu.domain import Grant, Instance, InstanceState, Level, Priority
from aimgpu.kubernetes.cluster.operator.shares.indexes import GpuNodeIndex, KnownGpus
from aimgpu.kubernetes.cluster.operator.shares.rows import asks, rows_of
from aimgpu.kubernetes.cluster.operator.shares.status import share_status
from aimgpu.kubernetes.node.agent.gpu_node import held_statuses
from aimgpu.kubernetes.node.device_plugin.pod_replicas import HeldReplica, ReplicaUser, match_grants
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, VERSION
from aimgpu.kubernetes.vocabulary.names import GROUP

Object = dict[str, Any]
SHARED = "amd.com/gpu.shared"


def grant(tenant: str, partition: str, number: int = 0, level: Level = Level.ADVISORY) -> Grant:
    return Grant(
        id=f"{tenant}.0.{number}",
        instance_id=tenant,
        deployment=SHARED,
        node=NODE,
        device_id="g0",
        partition_id=partition,
        memory_bytes=12 * GIB,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=level,
        exclusive=False,
    )


def tenant(replica: str, *partitions: str, resource: str = SHARED, state: InstanceState = InstanceState.READY) -> Instance:
    name = f"replica.{replica}"
    grants = tuple(grant(name, partition, number) for number, partition in enumerate(partitions))
    return Instance(id=name, deployment=resource, replica=0, model="", engine="", launcher="pod", state=state, grants=grants)


def user(namespace: str, name: str, *devices: str, resource: str = SHARED) -> ReplicaUser:
    return ReplicaUser(namespace=namespace, pod=name, resource=resource, devices=frozenset(devices))


def test_a_container_has_the_grants_that_were_given_for_any_of_its_replicas_in_a_fixed_order() -> None:
    tenants = [tenant("b", "p1", "p2"), tenant("c", "p1"), tenant("lost", "p3")]
    users = [user("team", "web", "c"), user("default", "web", "a", "b"), user("default", "other", "x")]
    found = match_grants(users, tenants)
    assert [(one.namespace, one.pod, one.grant.partition_id) for one in found] == [
        ("default", "web", "p1"),
        ("default", "web", "p2"),
        ("team", "web", "p1"),
    ]
    assert match_grants(users[::-1], tenants) == found


def test_a_replica_given_under_another_name_or_still_being_given_is_no_pods() -> None:
    users = [user("a", "web", "x"), user("a", "new", "y")]
    assert match_grants(users, [tenant("x", "p1", resource="amd.com/renamed")]) == ()
    assert match_grants(users, [tenant("y", "p1", state=InstanceState.LOADING)]) == ()


def test_a_pod_that_the_kubelet_does_not_list_keeps_its_replica_until_that_is_given_back_or_has_another_holder() -> None:
    """A kubelet that has just started lists no pods yet."""
    tenants = [tenant("x", "p1"), tenant("y", "p2")]
    both = match_grants([user("a", "web", "x"), user("a", "other", "y")], tenants)
    assert match_grants([], tenants, both) == both
    assert [one.pod for one in match_grants([], tenants[:1], both)] == ["web"]
    assert [one.pod for one in match_grants([user("a", "new", "x")], tenants, both)] == ["new", "other"]
    (mine,) = match_grants([user("a", "web", "y")], tenants, both[1:])  # made again, with another replica
    assert (mine.pod, mine.grant.partition_id) == ("web", "p2")


def test_a_gpu_node_stays_small_however_many_replicas_are_held() -> None:
    name = "a-model-of-some-length-predictor-7f6c9d8b5c-x2x4z"
    held = [
        HeldReplica(namespace="some-team", pod=f"{name}-{number}", resource=SHARED, grant=grant("t", "0000:c1:00.0/cpx-7"))
        for number in range(2000)
    ]
    found = held_statuses(held)
    assert len(found) == 512
    assert len(json.dumps(found)) < 128_000  # an object may have 1.5 MB


def held_of(world: AgentWorld) -> list[tuple[str, str, str]]:
    status = world.api.get(GPU_NODES, NODE).get("status") or {}
    return [(one["namespace"], one["pod"], one["partition"]) for one in status.get("heldReplicas") or ()]


async def settled(world: AgentWorld) -> int:
    """Writes of the GpuNode, when none is under way: five rounds without one."""
    for _ in range(50):
        written = world.api.count("PATCH", GPU_NODES)
        await world.rounds(5)
        if world.api.count("PATCH", GPU_NODES) == written:
            return written
    raise AssertionError("the GpuNode is written again and again")


def test_the_gpu_node_has_each_pods_replica_over_restarts_and_as_long_as_the_pod_is_there() -> None:
    async def main() -> None:
        async with plugin_world(sharing(2, strategy="single"), simulated=(("MI300X", 2),)) as (world, kubelet):
            world.api.served.add(f"{GROUP}/{VERSION}")
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            first, second = (f"{gpu}-spx-0::0" for gpu in (GPU, "sim-mi300x-1"))
            with pod_resources(world.kubelet / "pod-resources") as used:
                used |= {"team": [second], "default": [first]}  # pods of one name
                for replica in (first, second):
                    await allocate(world, kubelet, "amd.com/gpu", replica)
                both = [("default", "pod", f"{GPU}/spx-0"), ("team", "pod", "sim-mi300x-1/spx-0")]
                await world.until(lambda: bool(world.api.all(GPU_NODES)), "a GpuNode")
                await world.until(lambda: held_of(world) == both, "who holds what")
                (entry, _) = world.api.get(GPU_NODES, NODE)["status"]["heldReplicas"]
                (given, _) = sorted(world.grants(), key=lambda one: one.partition_id)
                assert (entry["memoryBytes"], entry["level"]) == (given.memory_bytes, given.level.value)
                written = await settled(world)
                socket = world.kubelet / "pod-resources" / "kubelet.sock"
                away = socket.rename(socket.with_name("away"))  # the kubelet does not answer
                await world.rounds(5)
                await world.restart()
                await world.rounds(5)
                assert held_of(world) == both
                assert world.api.count("PATCH", GPU_NODES) == written
                del used["team"]
                away.rename(socket)
                await world.until(lambda: held_of(world) == both[:1], "the other pod is gone")
                used.clear()
                await world.until(lambda: held_of(world) == [] and not world.grants(), "both are gone")

    asyncio.run(main())


def test_what_an_older_definition_does_not_keep_is_not_written_over_and_over() -> None:
    async def main() -> None:
        async with plugin_world(sharing(2)) as (world, kubelet):
            world.api.dropped |= {"heldReplicas", "computeMode"}
            world.api.served.add(f"{GROUP}/{VERSION}")
            await world.until(lambda: "amd.com/gpu" in kubelet.registered, "registration")
            await world.watching(GPU_NODES)
            with pod_resources(world.kubelet / "pod-resources") as used:
                (replica, _) = kubelet.registered["amd.com/gpu"]
                used["team"] = [replica]
                await allocate(world, kubelet, "amd.com/gpu", replica)
                await settled(world)
                assert held_of(world) == []

    asyncio.run(main())


def entry(namespace: str, name: str, partition: str, level: str = "runtime") -> Object:
    place = {"namespace": namespace, "pod": name, "resource": SHARED, "partition": partition}
    return {**place, "memoryBytes": 12 * GIB, "level": level}


def node(*held: Object, resources: tuple[Object, ...] = (REPLICA,)) -> KnownGpus:
    """Two GPUs with two partitions each, which are not alike."""
    gpus = [
        {
            "id": name,
            "simulated": True,
            "computeMode": mode,
            "memoryMode": "NPS1",
            "partitions": [{"id": f"{name}/{part}", "memoryBytes": 48 * GIB, "grantedBytes": 12 * GIB} for part in "01"],
        }
        for name, mode in (("g0", "CPX"), ("g1", "DPX"))
    ]
    status = {"resources": list(resources), "gpus": gpus, "heldReplicas": list(held)}
    return KnownGpus(nodes=GpuNodeIndex([{"metadata": {"name": "n1"}, "status": status}]))


def test_a_pod_with_a_replica_has_its_partition_and_level_and_not_those_of_its_namesake() -> None:
    held = [entry("a", "p", "g1/1"), entry("b", "p", "g0/0", "none"), entry("a", "q", "g0/1")]
    one = pod(**limited(SHARED))
    assert rows_of(one, node(*held)) == [
        {
            "pod": "p",
            "node": "n1",
            "resource": SHARED,
            "gpu": "g1",
            "level": "runtime",
            "simulated": True,
            "partitionInfo": {
                "partitionId": "g1/1",
                "computeMode": "DPX",
                "memoryMode": "NPS1",
                "partitionSizeGB": round(48 * GIB / GB, 3),
                "allocatedMemoryGB": round(12 * GIB / GB, 3),
                "availableMemoryGB": round(36 * GIB / GB, 3),
            },
        }
    ]
    status = share_status([one], node(*held), {})
    assert (status["level"], status["partitionInfo"]["partitionId"]) == ("runtime", "g1/1")


def test_replicas_that_the_node_has_not_reported_yet_have_what_is_offered() -> None:
    first, second = rows_of(pod(**limited(SHARED, 2)), node(entry("a", "p", "g0/1")))
    assert (first["level"], first["partitionInfo"]["partitionId"]) == ("runtime", "g0/1")
    assert "level" not in second
    assert "partitionId" not in second["partitionInfo"]
    assert second["partitionInfo"]["computeMode"] == "SPX"


def test_more_replicas_than_the_pod_asks_for_are_partly_a_former_pods_and_not_shown() -> None:
    (row,) = rows_of(pod(**limited(SHARED)), node(entry("a", "p", "g0/1"), entry("a", "p", "g1/0")))
    assert "level" not in row
    assert "gpu" not in row


def test_a_pod_keeps_its_share_when_its_replica_is_offered_no_more() -> None:
    gpus = node(entry("a", "p", "g0/gone"), resources=())
    one = pod(**limited(SHARED))
    assert asks(one, gpus)
    assert rows_of(one, gpus) == [
        {
            "pod": "p",
            "node": "n1",
            "resource": SHARED,
            "level": "runtime",
            "partitionInfo": {"partitionId": "g0/gone", "allocatedMemoryGB": round(12 * GIB / GB, 3)},
        }
    ]
    assert not asks(one, node(resources=()))


def test_a_gpu_node_that_goes_takes_its_reports_along() -> None:
    gpus = node(entry("a", "p", "g0/1"))
    gpus.nodes.remove({"metadata": {"name": "n1"}})
    assert not asks(pod(**limited(SHARED)), gpus)
