"""What the agent keeps in the API server about its GPUs: slices that follow the hardware and the server's features."""

import asyncio
import itertools
from typing import Any

import pytest
from tests.kubernetes.agent_world import GPU, NODE, AgentWorld, add_claim, agent_world, log_data, result

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api.resources import NODES, RESOURCE_SLICES

DRIVER = "gpu.aim.amd.com"


def pools(world: AgentWorld) -> list[tuple[int, int]]:
    """Generations and counts of slices, of all slices."""
    return [(found["spec"]["pool"]["generation"], found["spec"]["pool"]["resourceSliceCount"]) for found in world.slices()]


def is_complete(world: AgentWorld) -> bool:
    """Between two writes of a change, slices of two generations are there."""
    return set(pools(world)) == {(pools(world)[0][0], len(world.slices()))}


def taints(world: AgentWorld, device: str = GPU) -> dict[str, str]:
    return {taint["key"].partition("/")[2]: taint["effect"] for taint in world.devices()[device].get("taints") or ()}


def test_the_pool_is_complete_owned_by_the_node_and_written_once() -> None:
    async def main() -> None:
        async with agent_world(simulated=(("MI300X", 2), ("H200", 1))) as world:
            assert set(pools(world)) == {(1, len(world.slices()))}
            assert len(world.devices()) == 6  # each GPU whole and shared
            for found in world.slices():
                (owner,) = found["metadata"]["ownerReferences"]
                assert (owner["kind"], owner["name"], owner["uid"]) == (
                    "Node",
                    NODE,
                    world.api.get(NODES, NODE)["metadata"]["uid"],
                )
                assert (found["spec"]["driver"], found["spec"]["pool"]["name"], found["spec"]["nodeName"]) == (
                    DRIVER,
                    NODE,
                    NODE,
                )
            written = world.api.count("POST", RESOURCE_SLICES) + world.api.count("PUT", RESOURCE_SLICES)
            await world.rounds(5)
            assert world.api.count("POST", RESOURCE_SLICES) + world.api.count("PUT", RESOURCE_SLICES) == written

    asyncio.run(main())


def test_a_change_of_layout_raises_the_generation_of_all_slices_and_removes_those_that_are_too_many() -> None:
    async def main() -> None:
        async with agent_world(simulated=(("MI300X", 9),), repartition=True) as world:
            before = len(world.slices())
            await world.restart(repartition=False)
            await world.until(lambda: len(world.slices()) < before and is_complete(world), "fewer slices")
            assert pools(world)[0][0] == 2
            for number in range(9):
                world.set_layout("CPX/NPS1", f"sim-mi300x-{number}")
            await world.until(lambda: "sim-mi300x-8-cpx-7" in world.devices() and is_complete(world), "the partitions")
            assert "sim-mi300x-8" not in world.devices()

    asyncio.run(main())


def test_slices_that_someone_deletes_or_an_older_agent_left_are_put_right() -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            left: dict[str, Any] = {
                "driver": DRIVER,
                "nodeName": NODE,
                "pool": {"name": NODE, "generation": 7, "resourceSliceCount": 5},
            }
            for number, generation in ((0, 7), (4, 8)):
                pool = left["pool"] | {"generation": generation}
                world.api.add(
                    RESOURCE_SLICES, {"metadata": {"name": f"{NODE}-{DRIVER}-{number}"}, "spec": {**left, "pool": pool}}
                )
            other = {"metadata": {"name": "other"}, "spec": {**left, "nodeName": "node2"}}
            world.api.add(RESOURCE_SLICES, other)
            await world.start()
            own = [found for found in world.slices() if found["spec"]["nodeName"] == NODE]
            assert {found["spec"]["pool"]["generation"] for found in own} == {9}
            assert f"{NODE}-{DRIVER}-4" not in {found["metadata"]["name"] for found in own}
            assert world.api.get(RESOURCE_SLICES, "other")["spec"]["pool"]["generation"] == 7
            await world.watching(RESOURCE_SLICES)
            for found in own:
                world.api.remove(RESOURCE_SLICES, found["metadata"]["name"])
            await world.until(lambda: GPU in world.devices(), "the slices again")

    asyncio.run(main())


def test_a_slice_that_someone_edits_is_put_right_and_an_agent_that_starts_again_writes_nothing() -> None:
    async def main() -> None:
        async with agent_world() as world:
            await world.watching(RESOURCE_SLICES)
            wanted = {name: device["capacity"] for name, device in world.devices().items()}
            (edited, *_) = [found for found in world.slices() if found["spec"].get("devices")]
            devices = [{**one, "capacity": {"memory": {"value": "1Gi"}}} for one in edited["spec"]["devices"]]
            world.api.change(RESOURCE_SLICES, edited["metadata"]["name"], {"spec": {"devices": devices}})
            await world.until(
                lambda: {name: device["capacity"] for name, device in world.devices().items()} == wanted and is_complete(world),
                "the slices as they were",
            )
            generation, written = pools(world)[0][0], world.api.count("PUT", RESOURCE_SLICES)
            await world.restart()
            await world.rounds(3)
            assert (pools(world)[0][0], world.api.count("PUT", RESOURCE_SLICES)) == (generation, written)
            world.set_gpus(foreign=[{"device": GPU, "pid": 1, "name": "python", "memory_bytes": 1 << 30}])
            await world.until(lambda: "foreign-processes" in taints(world), "a change of what is offered")

    asyncio.run(main())


FEATURES = {
    "DRAConsumableCapacity": {"allowMultipleAllocations", "requestPolicy"},
    "DRAPartitionableDevices": {"sharedCounters", "consumesCounters"},
    "DRADeviceTaints": {"taints"},
}


@pytest.mark.parametrize(
    "lacking", [pair for count in (1, 2, 3) for pair in itertools.combinations(FEATURES, count)], ids="+".join
)
def test_a_server_that_drops_fields_gets_slices_without_them_and_the_log_names_each_gate(
    lacking: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with agent_world(running=False, repartition=True) as world:
            world.set_layout("SPX/NPS1")
            world.set_gpus(foreign=[{"device": GPU, "pid": 1, "name": "python", "memory_bytes": 1 << 30}])
            world.api.dropped = set().union(*(FEATURES[gate] for gate in lacking))
            await world.start()
            kept = {name for device in world.devices().values() for name in device}
            assert not kept & world.api.dropped
            shares = [name for name, device in world.devices().items() if device.get("allowMultipleAllocations")]
            # Nothing keeps a whole GPU and its shares apart without counters.
            assert bool(shares) == (not {"DRAConsumableCapacity", "DRAPartitionableDevices"} & set(lacking))
            assert (len(world.devices()) > 1) == ("DRAPartitionableDevices" not in lacking)
            written = world.api.count("PUT", RESOURCE_SLICES) + world.api.count("POST", RESOURCE_SLICES)
            await world.rounds(3)
            assert world.api.count("PUT", RESOURCE_SLICES) + world.api.count("POST", RESOURCE_SLICES) == written

    asyncio.run(main())
    named = {line.partition(":")[0] for line in log_data(caplog.records, "server.lacks")[-1]["features"]}
    assert named == set(lacking)


def test_an_unhealthy_gpu_is_withdrawn_from_a_server_without_taints() -> None:
    async def main() -> None:
        async with agent_world(simulated=(("MI300X", 2),)) as world:
            world.api.dropped = {"taints"}
            world.set_gpus(faults={GPU: "lost"})
            await world.until(lambda: GPU not in world.devices(), "the GPU is withdrawn")
            assert "sim-mi300x-1" in world.devices()
            world.set_gpus(faults={})
            await world.until(lambda: GPU in world.devices(), "the GPU is back")

    asyncio.run(main())


def test_a_lost_gpu_and_one_that_strangers_use_are_tainted_apart_and_the_kubelet_hears_of_the_lost_one() -> None:
    async def main() -> None:
        async with agent_world(simulated=(("MI300X", 2),)) as world:
            health = world.watch_health()
            first = await health.read()
            assert {device.health for device in first.devices} == {1}
            assert {device.device.pool_name for device in first.devices} == {NODE}
            world.set_gpus(
                faults={GPU: "lost"}, foreign=[{"device": "sim-mi300x-1", "pid": 1, "name": "python", "memory_bytes": 1 << 30}]
            )
            await world.until(lambda: bool(taints(world)) and bool(taints(world, "sim-mi300x-1")), "taints")
            assert taints(world, f"{GPU}-shared") == taints(world) == {"unhealthy": "NoExecute"}
            assert taints(world, "sim-mi300x-1") == {"foreign-processes": "NoSchedule"}
            second = await health.read()
            states = {device.device.device_name: (device.health, bool(device.message)) for device in second.devices}
            assert states[GPU] == states[f"{GPU}-shared"] == (2, True)
            assert states["sim-mi300x-1"] == (1, False)
            world.set_gpus(faults={}, foreign=[])
            await world.until(lambda: not taints(world) and not taints(world, "sim-mi300x-1"), "no taints")
            third = await health.read()
            assert {device.health for device in third.devices} == {1}

    asyncio.run(main())


@pytest.mark.parametrize(("method", "status"), [("POST", 503), ("PUT", 409), ("PUT", 500), ("GET", 503), ("DELETE", 503)])
def test_a_server_that_fails_in_the_middle_of_a_publication_has_the_whole_pool_in_the_end(
    method: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    layouts = ("CPX/NPS1", "SPX/NPS1") if method == "DELETE" else ("SPX/NPS1", "CPX/NPS1")
    expected = {"CPX/NPS1": 9 * 8 * 2, "SPX/NPS1": 9 * 2}

    def set_layouts(world: AgentWorld, layout: str) -> None:
        for number in range(9):
            world.set_layout(layout, f"sim-mi300x-{number}")

    async def main() -> None:
        async with agent_world(running=False, simulated=(("MI300X", 9),)) as world:
            set_layouts(world, layouts[0])
            await world.start()
            assert len(world.devices()) == expected[layouts[0]]
            await world.watching(RESOURCE_SLICES)  # else its requests could be those that fail
            world.api.fail(method, RESOURCE_SLICES, status, times=2)
            set_layouts(world, layouts[1])
            await world.until(
                lambda: len(world.devices()) == expected[layouts[1]] and len(set(pools(world))) == 1, "one complete pool"
            )
            assert pools(world)[0][1] == len(world.slices())
            assert not world.api.faults_left

    asyncio.run(main())
    assert log_data(caplog.records, "agent.refresh_failed")


def test_an_older_server_gets_counters_beside_the_devices_and_a_newer_one_in_slices_of_their_own() -> None:
    async def main() -> None:
        forms: dict[tuple[int, int], bool] = {}
        for version in ((1, 34), (1, 35), (1, 37)):
            async with agent_world(running=False, repartition=True, single_device=False) as world:
                world.api.version = (*version, 0)
                await world.start()
                forms[version] = any(
                    found["spec"].get("devices") and found["spec"].get("sharedCounters") for found in world.slices()
                )
                assert any(found["spec"].get("sharedCounters") for found in world.slices())
        assert forms == {(1, 34): True, (1, 35): False, (1, 37): False}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("version", "asked", "single"),
    [
        ((1, 34, 4), None, True),
        ((1, 36, 1), None, True),
        ((1, 36, 2), None, False),
        ((1, 37, 0), True, True),
        ((1, 35, 4), False, False),
    ],
)
def test_a_gpu_is_one_device_where_the_scheduler_does_not_count_shares_or_where_it_is_asked_for(
    version: tuple[int, int, int], *, asked: bool | None, single: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with agent_world(running=False, repartition=True, single_device=asked) as world:
            world.api.version = version
            await world.start()
            assert (f"{GPU}-shared" not in world.devices()) == single
            counters = [found for found in world.slices() if found["spec"].get("sharedCounters")]
            counts = version >= (1, 36, 2)
            # One device takes several allocations, so that only a scheduler that counts those keeps layouts apart.
            assert bool(counters) == (counts or not single)
            assert (f"{GPU}-cpx-0" in world.devices()) == bool(counters)
            lacking = log_data(caplog.records, "server.lacks")
            assert [line.partition(":")[0] for entry in lacking for line in entry["features"]] == (
                [] if counts else ["kube-scheduler 1.36.2"]
            )

    asyncio.run(main())


@pytest.mark.parametrize("versions", [((1, 36, 4), (1, 35, 4)), ((1, 35, 4), (1, 36, 4))], ids=["to-one", "to-two"])
def test_the_form_of_devices_is_not_changed_under_a_claim(versions: tuple[tuple[int, int, int], ...]) -> None:
    """What was allocated by the former name does not count against the new one."""
    before, after = versions

    async def main() -> None:
        async with agent_world(running=False) as world:
            world.api.version = before
            await world.start()
            two = f"{GPU}-shared" in world.devices()
            claim = add_claim(world, "some", result(f"{GPU}-shared" if two else GPU, gib=8))
            assert not (await world.prepare(claim))["some"].error
            world.api.version = after
            await world.restart()
            await world.rounds()
            assert (f"{GPU}-shared" in world.devices()) == two
            await world.unprepare(claim)
            await world.until(lambda: (f"{GPU}-shared" in world.devices()) != two, "the other form")

    asyncio.run(main())


def test_a_server_without_resource_claims_ends_the_agent_with_what_to_run_instead() -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            world.api.served.clear()
            world.api.version = (1, 33, 0)
            with pytest.raises(ClusterFailed, match=r"1\.33.*does not serve resource.k8s.io/v1"):
                await world.start()

    asyncio.run(main())


def test_after_the_server_restarted_deleted_slices_are_still_noticed() -> None:
    async def main() -> None:
        async with agent_world() as world:
            await world.rounds()
            world.api.close_watches()
            await world.rounds()
            for found in world.slices():
                world.api.remove(RESOURCE_SLICES, found["metadata"]["name"])
            await world.until(lambda: GPU in world.devices(), "the slices again")

    asyncio.run(main())


def test_stopping_leaves_the_slices_and_the_claims_for_the_next_agent() -> None:
    """An upgrade must not evict pods: the kubelet withdraws slices of a driver that stays away."""

    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "kept", result(gib=10))
            assert not (await world.prepare(claim))["kept"].error
            before = world.devices()
            await world.stop()
            assert world.devices() == before
            assert len(world.grants()) == 1
            await world.start()
            answer: Any = (await world.prepare(claim))["kept"]
            assert [device.share_id for device in answer.devices] == ["share-10"]
            assert len(world.grants()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("ticks", range(6))
def test_the_agent_ends_also_where_the_signal_comes_together_with_a_claim(ticks: int) -> None:
    async def main() -> None:
        async with agent_world(interval_seconds=3600.0) as world:
            assert world.agent is not None
            wake = world.agent._wake
            await world.until(lambda: bool(wake._waiters), "the agent waits")
            wake.set()
            for _ in range(ticks):
                await asyncio.sleep(0)
            await world.stop()

    asyncio.run(main())
