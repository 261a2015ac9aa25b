"""Nodes are let go when their plan is gone, and a person's cordon stays: whatever ends in between."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kubernetes.api_server import serving
from tests.kubernetes.partitioned_cluster import CLOSED, GPU, GPU_NODES, NODES, PLANS, TAINT, PartitionedCluster

Scenario = Callable[[PartitionedCluster], Awaitable[None]]
BY_MANAGER: dict[str, Any] = {"applier": "DeviceConfigManager", "layout": {"computeMode": "CPX", "memoryMode": "NPS1"}}


def play(scenario: Scenario) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            await scenario(PartitionedCluster(api, client))

    asyncio.run(main())


async def reach(cluster: PartitionedCluster, phase: str) -> None:
    """Look until the plan is in this phase; the agent acts from Applying on."""
    for _ in range(10):
        await cluster.look()
        if cluster.phase() == phase:
            return
        if cluster.phase() != "Draining":
            cluster.act_as_agent()
    raise AssertionError(f"still {cluster.phase()}: {cluster.message()}")


@pytest.mark.parametrize("phase", ["Draining", "Applying"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_plan_deleted_under_way_leaves_no_node_cordoned(phase: str, *, restarted: bool) -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        if phase == "Draining":
            cluster.add_pod("stays")
            cluster.api.budgets.add("stays")
        cluster.add_plan()
        await reach(cluster, phase)
        assert (cluster.is_cordoned(), cluster.taints()) == (True, [CLOSED])
        assert cluster.marks()
        cluster.api.remove(f"{PLANS}/cpx")
        if restarted:
            cluster.start_operator()
        await cluster.look()
        assert (cluster.is_cordoned(), cluster.taints()) == (False, [])
        assert cluster.marks() == {}

    play(scenario)


@pytest.mark.parametrize("phase", ["Applying", "WaitingForDriver"])
def test_a_plan_of_the_device_config_manager_deleted_under_way_leaves_no_taint(phase: str) -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        other = {"key": "gpu", "value": "only", "effect": "NoSchedule"}
        cluster.add_node(taints=[other])
        cluster.add_plan(**BY_MANAGER)
        await reach(cluster, phase)
        assert cluster.taints() == [other, CLOSED, TAINT]
        cluster.api.remove(f"{PLANS}/cpx")
        await cluster.look()
        assert (cluster.is_cordoned(), cluster.taints(), cluster.marks()) == (False, [other], {})

    play(scenario)


def test_a_taint_that_was_there_before_the_plan_stays() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node(taints=[TAINT])
        cluster.add_plan(**BY_MANAGER)
        await reach(cluster, "WaitingForDriver")
        cluster.api.remove(f"{PLANS}/cpx")
        await cluster.look()
        assert (cluster.is_cordoned(), cluster.taints(), cluster.marks()) == (False, [TAINT], {})

    play(scenario)


@pytest.mark.parametrize("ends", ["deleted", "succeeds", "fails"])
def test_a_node_that_a_person_cordoned_before_the_plan_stays_cordoned(ends: str) -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.cordon()
        cluster.add_plan()
        await reach(cluster, "Applying")
        assert cluster.taints() == [CLOSED]
        if ends == "deleted":
            cluster.api.remove(f"{PLANS}/cpx")
            await cluster.look()
        elif ends == "succeeds":
            await cluster.carry_on()
            assert cluster.phase() == "Succeeded"
        else:
            cluster.clock += 10_000
            await cluster.look()
            assert cluster.phase() == "Failed"
        assert (cluster.is_cordoned(), cluster.taints()) == (True, [])
        assert cluster.marks() == {}

    play(scenario)


def test_a_node_that_a_person_cordoned_in_the_course_of_the_plan_stays_cordoned() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_plan()
        await reach(cluster, "Applying")
        cluster.uncordon()
        cluster.cordon()
        cluster.api.remove(f"{PLANS}/cpx")
        await cluster.look()
        assert cluster.is_cordoned()
        assert cluster.marks() == {}
        cluster.uncordon()
        await cluster.look(3)
        assert not cluster.is_cordoned()  # and it is left alone from then on

    play(scenario)


def test_a_taint_of_others_that_comes_in_the_moment_of_a_step_is_not_lost() -> None:
    """The list of taints is written as a whole: a step that has not seen the newest one is taken again."""
    other = {"key": "disk", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}

    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_plan()

        def taint(method: str, path: str) -> None:
            if method == "PATCH" and path == f"{NODES}/n1":
                cluster.api.fault = lambda _method, _path: None
                cluster.api.patch(f"{NODES}/n1", {"spec": {"taints": [*cluster.taints(), other]}})

        cluster.api.fault = taint
        await cluster.look()
        assert (cluster.is_cordoned(), cluster.taints()) == (False, [other])
        await cluster.look()
        assert (cluster.is_cordoned(), cluster.taints()) == (True, [other, CLOSED])
        await cluster.carry_on()
        assert (cluster.phase(), cluster.is_cordoned(), cluster.taints()) == ("Succeeded", False, [other])

    play(scenario)


def test_a_node_is_drained_with_the_taint_also_where_an_operator_before_had_only_cordoned_it() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_pod("stays")
        cluster.api.budgets.add("stays")
        cluster.add_plan()
        await cluster.look(2)
        cluster.api.patch(f"{NODES}/n1", {"spec": {"taints": []}})
        cluster.start_operator()
        await cluster.look()
        assert cluster.taints() == [CLOSED]

    play(scenario)


def test_a_node_whose_fields_the_api_server_does_not_track_is_let_go() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_plan()
        await reach(cluster, "Applying")
        del cluster.node()["metadata"]["managedFields"]
        cluster.api.remove(f"{PLANS}/cpx")
        await cluster.look()
        assert not cluster.is_cordoned()

    play(scenario)


def test_a_cordon_in_the_moment_of_letting_go_is_not_undone() -> None:
    """Between the operator's look at the node and its patch a person takes the cordon over."""

    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_plan()
        await reach(cluster, "Applying")
        cluster.api.remove(f"{PLANS}/cpx")

        def take_over(method: str, path: str) -> None:
            if method == "PATCH" and path == f"{NODES}/n1":
                cluster.api.fault = lambda _method, _path: None
                cluster.uncordon()
                cluster.cordon()

        cluster.api.fault = take_over
        await cluster.look(2)
        assert cluster.is_cordoned()
        assert cluster.marks() == {}

    play(scenario)


def test_a_node_that_is_gone_or_has_no_agent_any_more_does_not_stop_the_others() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        for name in ("n1", "n2"):
            cluster.add_node(name)
        cluster.add_plan(maxParallel=2)
        await reach(cluster, "Applying")
        assert cluster.is_cordoned("n1")
        assert cluster.is_cordoned("n2")
        cluster.api.remove(f"{GPU_NODES}/n1")
        await cluster.carry_on()
        assert cluster.phases() == {"n2": "Succeeded"}
        assert not cluster.is_cordoned("n1")
        assert not cluster.is_cordoned("n2")
        assert cluster.marks("n1") == cluster.marks("n2") == {}

    play(scenario)


def test_a_plan_that_is_held_by_a_finalizer_of_others_counts_as_gone() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_plan()
        await reach(cluster, "Applying")
        cluster.api.patch(f"{PLANS}/cpx", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y"]}})
        before = cluster.phase()
        await cluster.look(2)
        assert not cluster.is_cordoned()
        assert cluster.phase() == before  # nothing is done for it any more

    play(scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"nodeSelector": {"kubernetes.io/hostname": "elsewhere"}}},
        {"spec": {"dryRun": True}},
        {"spec": {"layout": {"computeMode": "SPX"}}},
    ],
)
def test_a_plan_that_is_changed_under_way_lets_go_of_nodes_that_it_no_longer_changes(change: dict[str, object]) -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_plan()
        await reach(cluster, "Applying")
        cluster.api.patch(f"{PLANS}/cpx", change)
        await cluster.look(2)
        assert not cluster.is_cordoned()
        assert cluster.marks() == {}

    play(scenario)


def test_two_plans_change_a_node_one_after_the_other() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        cluster.add_plan("first")
        await cluster.look()
        cluster.add_plan("second", layout={"computeMode": "DPX"})
        await cluster.look()
        assert cluster.phases("second") == {"n1": "Pending"}
        second = cluster.api.find(f"{PLANS}/second")
        assert second is not None
        assert "the plan first" in second["status"]["nodes"][0]["message"]
        await cluster.carry_on(12)
        assert (cluster.phase("first"), cluster.phase("second"), cluster.layout()) == ("Succeeded", "Succeeded", "DPX/NPS1")
        assert not cluster.is_cordoned()

    play(scenario)


def test_a_plan_that_cannot_be_written_holds_up_no_other() -> None:
    async def scenario(cluster: PartitionedCluster) -> None:
        for name in ("a", "b"):
            cluster.add_node(name)
            cluster.add_plan(f"for-{name}", nodeSelector={"kubernetes.io/hostname": name})
        cluster.api.fault = lambda method, path: 500 if method == "PATCH" and "for-a" in path else None
        await cluster.carry_on()
        assert cluster.phase("for-b") == "Succeeded"
        assert not cluster.is_cordoned("a")  # the intent is written first, so nothing was done
        cluster.api.fault = lambda _method, _path: None
        await cluster.carry_on()
        assert cluster.phase("for-a") == "Succeeded"

    play(scenario)


@pytest.mark.parametrize(("agent_refuses", "manager"), [(False, False), (True, False), (False, True)])
def test_an_operator_that_ends_after_any_write_leaves_a_plan_that_the_next_one_ends(
    *, agent_refuses: bool, manager: bool
) -> None:
    """After every single write of the whole course: the operator ends there, and another takes over."""

    async def course(cluster: PartitionedCluster, writes: int) -> bool:
        """Whether the plan was ended by an operator that was stopped after so many writes, or before."""
        cluster.add_node()
        cluster.add_pod("one")
        cluster.add_plan(**(BY_MANAGER if manager else {}))
        cluster.api.fault = lambda method, _path: 500 if method != "GET" and len(cluster.api.writes) >= writes else None
        ended = False
        for number in range(16):
            await cluster.look()
            if number == 7:
                ended = cluster.phase() in ("Succeeded", "Failed") and not cluster.marks()
                cluster.api.fault = lambda _method, _path: None
                cluster.start_operator()
            if manager and not agent_refuses and TAINT in cluster.taints():  # the Device Config Manager's part
                _set_layout(cluster, "CPX/NPS1")
            cluster.act_as_agent(refuse="the driver is busy" if agent_refuses and cluster.wanted() == WANTED else "")
            cluster.clock += 60 if agent_refuses else 1
        return ended

    async def main() -> None:
        for writes in range(40):
            async with serving() as (api, client):
                cluster = PartitionedCluster(api, client)
                ended = await course(cluster, writes)
                assert cluster.phase() == ("Failed" if agent_refuses else "Succeeded"), (writes, cluster.message())
                assert not cluster.is_cordoned(), writes
                assert (cluster.marks(), cluster.taints()) == ({}, []), writes
                assert cluster.layout() == ("SPX/NPS1" if agent_refuses else "CPX/NPS1"), writes
                if agent_refuses and not manager:
                    assert cluster.wanted() == [{"gpu": GPU, "layout": "SPX/NPS1"}], writes
                if ended:
                    return
        raise AssertionError("the course has more writes than were tried")

    asyncio.run(main())


WANTED = [{"gpu": GPU, "layout": "CPX/NPS1"}]


def _set_layout(cluster: PartitionedCluster, layout: str) -> None:
    found = cluster.api.find(f"{GPU_NODES}/n1")
    assert found is not None
    gpus = [{**gpu, "layout": layout} for gpu in found["status"]["gpus"]]
    cluster.api.patch(f"{GPU_NODES}/n1", {"status": {"gpus": gpus}})


STEPS = st.sampled_from(["look", "agent", "cordon", "uncordon", "delete", "plan", "restart", "late"])


@settings(max_examples=20, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_a_person_who_cordons_last_has_their_way(steps: list[str]) -> None:
    """Whatever happens, a node is cordoned in the end exactly where a person's own cordon is the last that took effect."""

    async def scenario(cluster: PartitionedCluster) -> None:
        cluster.add_node()
        persons = False
        for step in steps:
            if step == "cordon" and not cluster.is_cordoned():
                cluster.cordon()
                persons = True
            elif step == "uncordon" and cluster.is_cordoned():
                cluster.uncordon()
                persons = False
            elif step == "plan" and cluster.api.find(f"{PLANS}/cpx") is None:
                cluster.add_plan(layout={"computeMode": "CPX" if cluster.layout().startswith("SPX") else "SPX"})
            elif step == "delete" and cluster.api.find(f"{PLANS}/cpx") is not None:
                cluster.api.remove(f"{PLANS}/cpx")
            else:
                await _step(cluster, step)
        if cluster.api.find(f"{PLANS}/cpx") is not None:
            cluster.api.remove(f"{PLANS}/cpx")
        await cluster.look(2)
        assert cluster.is_cordoned() == persons
        assert (cluster.marks(), cluster.taints()) == ({}, [])

    play(scenario)


async def _step(cluster: PartitionedCluster, step: str) -> None:
    if step == "look":
        await cluster.look()
    elif step == "agent":
        cluster.act_as_agent()
    elif step == "restart":
        cluster.start_operator()
    elif step == "late":
        cluster.clock += 400
