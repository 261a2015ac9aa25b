"""Claims through the driver's gRPC socket: what the container gets, what the claim's status shows, and every refusal."""

import asyncio
import contextlib
import json
import re
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from tests.kubernetes.agent_world import (
    GIB,
    GPU,
    NODE,
    AgentWorld,
    add_claim,
    agent_world,
    claim_devices,
    log_data,
    parameters,
    result,
)

from aimgpu.domain import Grant
from aimgpu.errors import Conflict, OtherLedgerSchema
from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.api.resources import RESOURCE_CLAIMS
from aimgpu.ledger import read_grants

SHARED = f"{GPU}-shared"


def environment(edits: dict[str, list[str]]) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in edits["env"])


def condition(device: Object) -> tuple[str, str]:
    (found,) = device["conditions"]
    return found["status"], found["reason"]


def test_a_share_is_granted_described_to_the_container_and_shown_in_the_claims_status() -> None:
    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "some", result(gib=20, consumedCapacity={"memory": "20Gi", "compute": "30"}))
            answer: Any = (await world.prepare(claim))["some"]
            (device,) = answer.devices
            assert (device.pool_name, device.device_name, device.share_id) == (NODE, SHARED, "share-20")
            assert list(device.request_names) == ["gpu"]
            (grant,) = world.grants()
            assert (grant.memory_bytes, grant.compute_ppm, grant.exclusive) == (20 * GIB, 300_000, False)
            variables = environment(world.cdi()[device.cdi_device_ids[0]])
            assert variables["AIMGPU_MEMORY_BYTES"] == str(20 * GIB)
            assert variables["AIMGPU_COMPUTE_PERCENT"] == "30"
            assert variables["AIMGPU_LEVEL"] == grant.level.value
            await world.until(lambda: bool(claim_devices(world, "some")), "the status")
            (shown,) = claim_devices(world, "some")
            assert (shown["device"], shown["shareID"], condition(shown)) == (SHARED, "share-20", ("True", "Prepared"))
            assert (shown["data"]["memory"], shown["data"]["computePercent"]) == ("20Gi", 30)
            assert shown["data"]["level"] == grant.level.value

    asyncio.run(main())


def test_prepare_and_unprepare_can_be_repeated_and_change_nothing_the_second_time() -> None:
    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "some", result(gib=20))
            first = (await world.prepare(claim))["some"]
            (grant,) = world.grants()
            assert (await world.prepare(claim))["some"] == first
            assert world.grants()[0].id == grant.id
            assert await world.unprepare(claim) == {"some": ""}
            assert await world.unprepare(claim) == {"some": ""}
            assert (world.grants(), world.cdi()) == ((), {})

    asyncio.run(main())


def test_a_claim_whose_file_was_lost_or_whose_allocation_changed_is_prepared_again() -> None:
    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "some", result(gib=20))
            await world.prepare(claim)
            for path in (world.folder / "cdi").iterdir():
                path.unlink()
            assert not (await world.prepare(claim))["some"].error
            assert len(world.cdi()) == len(world.grants()) == 1
            devices = {"results": [result(gib=50)], "config": []}
            world.api.change(RESOURCE_CLAIMS, "some", {"status": {"allocation": {"devices": devices}}}, "default")
            assert [one.share_id for one in (await world.prepare(claim))["some"].devices] == ["share-50"]
            assert [grant.memory_bytes for grant in world.grants()] == [50 * GIB]

    asyncio.run(main())


Change = Callable[[AgentWorld, Object], None]


def _replace(world: AgentWorld, _claim: Object) -> None:
    world.api.remove(RESOURCE_CLAIMS, "some", "default")
    add_claim(world, "some", result(gib=1))


def _deallocate(world: AgentWorld, _claim: Object) -> None:
    world.api.change(RESOURCE_CLAIMS, "some", {"status": {"allocation": None}}, "default")


def _allocate(**allocated: Any) -> Change:
    def change(world: AgentWorld, _claim: Object) -> None:
        devices = {"results": [result(**allocated)], "config": []}
        world.api.change(RESOURCE_CLAIMS, "some", {"status": {"allocation": {"devices": devices}}}, "default")

    return change


def _configure(**values: str) -> Change:
    def change(world: AgentWorld, _claim: Object) -> None:
        config = {"config": [parameters("gpu", **values)]}
        world.api.change(RESOURCE_CLAIMS, "some", {"status": {"allocation": {"devices": config}}}, "default")

    return change


REFUSALS: dict[str, tuple[Change, str]] = {
    "it is gone": (lambda world, _: world.api.remove(RESOURCE_CLAIMS, "some", "default"), "not found"),
    "another has its name": (_replace, "was replaced by another of its name"),
    "it is not allocated": (
        _deallocate,
        "is not allocated",
    ),
    "it is on another node": (_allocate(gib=1, pool="node2"), "allocated on node2, not on node1"),
    "its device is another driver's": (_allocate(gib=1, driver="gpu.nvidia.com"), "has no device of gpu.aim.amd.com"),
    "its GPU does not exist": (_allocate(device="sim-mi300x-7-shared", gib=1), "there is no device sim-mi300x-7-shared"),
    "its share has no capacity": (_allocate(device=SHARED), "without the capacity that it takes"),
    "its partition does not exist and layouts are fixed": (_allocate(device=f"{GPU}-cpx-3"), "claims may not change layouts"),
    "its parameters have a wrong value": (_configure(isolation="strong"), "isolation cannot be 'strong'. It can be"),
    "its parameters have an unknown field": (_configure(memory="1Gi"), "unknown field 'memory'. Fields:"),
    "it demands more isolation than a share has": (_configure(isolation="hardware"), "hardware"),
    "it is larger than the GPU": (_allocate(gib=200), "were to be charged"),
}


@pytest.mark.parametrize("device", [GPU, SHARED])
def test_admin_access_sees_a_gpu_that_others_use_and_is_charged_nothing(device: str) -> None:
    async def main() -> None:
        async with agent_world() as world:
            holder = add_claim(world, "holder", result(gib=190))
            look = add_claim(world, "look", result(device, adminAccess=True))
            answers = await world.prepare(holder, look)
            assert not answers["look"].error
            assert [grant.memory_bytes for grant in world.grants()] == [190 * GIB]
            (seen,) = answers["look"].devices
            assert seen.cdi_device_ids
            assert len(world.cdi()) == 2
            await world.restart()
            assert (await world.prepare(look))["look"].devices == answers["look"].devices
            assert await world.unprepare(look) == {"look": ""}
            assert len(world.cdi()) == 1

    asyncio.run(main())


def test_a_claim_for_less_than_nothing_is_refused() -> None:
    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "some", result(gib=1))
            capacity = {"requests": {"memory": "1Gi", "compute": "-5"}}
            request = {"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.aim.amd.com", "capacity": capacity}}
            world.api.change(RESOURCE_CLAIMS, "some", {"spec": {"devices": {"requests": [request]}}}, "default")
            assert "asks for compute -5" in (await world.prepare(claim))["some"].error

    asyncio.run(main())


def test_metrics_name_the_model_that_a_claim_serves() -> None:
    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "some", result(gib=1))
            world.api.change(RESOURCE_CLAIMS, "some", {"metadata": {"annotations": {"aim.amd.com/model": "chat"}}}, "default")
            await world.prepare(claim)
            await world.rounds()
            assert world.agent is not None
            assert 'model="chat"' in (world.agent._render_metrics() or b"").decode()

    asyncio.run(main())


@pytest.mark.parametrize("why", REFUSALS)
def test_a_claim_that_cannot_be_prepared_is_refused_with_the_reason_and_holds_nothing(why: str) -> None:
    change, reason = REFUSALS[why]

    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "some", result(gib=1))
            good = add_claim(world, "good", result(gib=2))
            change(world, claim)
            answers = await world.prepare(claim, good)
            assert reason in answers["some"].error
            assert not answers["some"].devices
            assert not answers["good"].error  # one that cannot be had does not hold up the others
            assert [grant.memory_bytes for grant in world.grants()] == [2 * GIB]
            assert len(world.cdi()) == 1
            assert await world.unprepare(claim, good) == {"some": "", "good": ""}
            assert world.grants() == ()

    asyncio.run(main())


def test_the_reason_of_a_refusal_stands_in_the_claims_status_once_and_goes_when_it_is_prepared() -> None:
    async def main() -> None:
        async with agent_world() as world:
            holder = add_claim(world, "holder", result(gib=190))
            claim = add_claim(world, "late", result(gib=10))
            assert not (await world.prepare(holder))["holder"].error
            for _ in range(3):  # the kubelet asks again and again
                refused = (await world.prepare(claim))["late"].error
            (shown,) = claim_devices(world, "late")
            assert condition(shown) == ("False", "NotPrepared")
            assert shown["conditions"][0]["message"] == refused
            assert sum("/late/status" in path for _, path in world.api.requests) == 1
            await world.unprepare(holder)
            assert not (await world.prepare(claim))["late"].error
            await world.until(lambda: condition(claim_devices(world, "late")[0]) == ("True", "Prepared"), "the new status")

    asyncio.run(main())


def test_a_whole_gpu_and_shares_of_it_exclude_each_other_whatever_the_scheduler_says() -> None:
    async def main() -> None:
        async with agent_world() as world:
            whole, share = add_claim(world, "whole", result(GPU)), add_claim(world, "share", result(gib=1))
            assert not (await world.prepare(whole))["whole"].error
            assert (await world.prepare(share))["share"].error
            await world.unprepare(whole)
            assert not (await world.prepare(share))["share"].error
            assert (await world.prepare(whole))["whole"].error
            assert [grant.exclusive for grant in world.grants()] == [False]

    asyncio.run(main())


def test_requests_of_one_claim_have_limits_of_their_own_or_one_limit_as_its_parameters_say() -> None:
    async def main() -> None:
        async with agent_world() as world:
            two = [result(gib=10, request="small"), result(gib=30, request="large/first", shareID="other")]
            apart = add_claim(world, "apart", *two)
            together = add_claim(world, "together", *two, config=[parameters(limits="claim")])
            answers = await world.prepare(apart, together)
            limits = {
                name: {
                    tuple(device.request_names): environment(world.cdi()[device.cdi_device_ids[0]])["AIMGPU_MEMORY_BYTES"]
                    for device in answer.devices
                }
                for name, answer in answers.items()
            }
            names = ("small",), ("large/first", "large")
            assert limits["apart"] == dict(zip(names, (str(10 * GIB), str(30 * GIB)), strict=True))
            assert limits["together"] == dict.fromkeys(names, str(40 * GIB))
            assert sum(grant.memory_bytes for grant in world.grants()) == 80 * GIB

    asyncio.run(main())


def test_a_partition_is_made_for_a_claim_and_the_old_layout_comes_back_with_its_end() -> None:
    async def main() -> None:
        async with agent_world(repartition=True) as world:
            first, second = (add_claim(world, name, result(f"{GPU}-cpx-{number}")) for number, name in ((2, "a"), (5, "b")))
            other = add_claim(world, "c", result(f"{GPU}-dpx-1"))
            answers = await world.prepare(first, second, other)
            assert (answers["a"].error, answers["b"].error) == ("", "")
            assert "CPX/NPS1 and in use, it cannot become DPX/NPS1" in answers["c"].error
            await world.until(lambda: world.devices()[f"{GPU}-cpx-2"]["attributes"]["current"]["bool"], "the new layout")
            await world.unprepare(first)
            await world.rounds()
            assert world.devices()[f"{GPU}-cpx-2"]["attributes"]["current"]["bool"]  # the other partition is in use
            await world.unprepare(second)
            await world.until(lambda: world.devices()[GPU]["attributes"]["current"]["bool"], "the old layout")
            assert not (await world.prepare(other))["c"].error

    asyncio.run(main())


def test_an_api_server_that_does_not_answer_is_an_error_for_the_kubelet_which_then_succeeds() -> None:
    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "some", result(gib=1))
            world.api.fail("GET", RESOURCE_CLAIMS, 503)
            assert "out of order" in (await world.prepare(claim))["some"].error
            assert world.grants() == ()
            assert not (await world.prepare(claim))["some"].error
            world.api.fail("GET", RESOURCE_CLAIMS, 503, times=5)
            assert await world.unprepare(claim) == {"some": ""}  # needs no API server
            assert world.grants() == ()

    asyncio.run(main())


def test_a_status_that_cannot_be_written_keeps_no_pod_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with agent_world() as world:
            world.api.fail("PATCH", RESOURCE_CLAIMS, 403)
            claim = add_claim(world, "some", result(gib=1))
            assert not (await world.prepare(claim))["some"].error
            await world.until(lambda: not world.api.faults_left, "the status was tried")
            world.set_gpus(faults={GPU: "lost"})
            await world.until(lambda: bool(claim_devices(world, "some")), "the next status")
            assert condition(claim_devices(world, "some")[0]) == ("False", "Unhealthy")

    asyncio.run(main())
    (failed,) = log_data(caplog.records, "claim.status_not_written")
    assert failed["claim"] == "default/some"


def test_a_server_that_keeps_no_device_status_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with agent_world() as world:
            world.api.keeps_device_status = False
            for name in ("one", "two"):
                assert not (await world.prepare(add_claim(world, name, result(gib=1))))[name].error
                await world.rounds()
            assert sum(path.endswith("/status") for _, path in world.api.requests) == 1

    asyncio.run(main())
    (lacking,) = log_data(caplog.records, "server.lacks")
    assert [line.partition(":")[0] for line in lacking["features"]] == ["DRAResourceClaimDeviceStatus"]


def test_a_node_that_cannot_write_the_file_for_the_runtime_refuses_and_rolls_back() -> None:
    async def main() -> None:
        async with agent_world() as world:
            (world.folder / "cdi").rename(world.folder / "elsewhere") if (world.folder / "cdi").exists() else None
            (world.folder / "cdi").write_text("not a folder")
            claim = add_claim(world, "some", result(gib=1))
            assert "cdi" in (await world.prepare(claim))["some"].error
            assert world.grants() == ()
            (world.folder / "cdi").unlink()
            assert not (await world.prepare(claim))["some"].error
            assert len(world.grants()) == 1

    asyncio.run(main())


def test_claims_that_are_gone_from_the_api_are_released_and_those_that_stay_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aimgpu.kubernetes.node.agent.claim_upkeep._STALE_SECONDS", 0.0)

    async def main() -> None:
        async with agent_world() as world:
            kept, gone, renewed = (add_claim(world, name, result(gib=1)) for name in ("kept", "gone", "renewed"))
            await world.prepare(kept, gone, renewed)
            await world.rounds()
            assert len(world.grants()) == 3
            world.api.remove(RESOURCE_CLAIMS, "gone", "default")
            world.api.remove(RESOURCE_CLAIMS, "renewed", "default")
            add_claim(world, "renewed", result(gib=2))
            await world.until(lambda: len(world.grants()) == 1, "two are released")
            assert world.grants()[0].instance_id.startswith(kept["metadata"]["uid"])
            assert len(world.cdi()) == 1

    asyncio.run(main())
    assert {entry["claim"] for entry in log_data(caplog.records, "claim.stale")} == {"default/gone", "default/renewed"}


def test_a_claim_is_not_taken_for_gone_while_the_api_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimgpu.kubernetes.node.agent.claim_upkeep._STALE_SECONDS", 0.0)

    async def main() -> None:
        async with agent_world() as world:
            await world.prepare(add_claim(world, "some", result(gib=1)))
            world.api.fail("GET", RESOURCE_CLAIMS, 500, times=4)
            await world.until(lambda: not world.api.faults_left, "the failures are over")
            await world.rounds()
            assert len(world.grants()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("boot", ["the same boot", "another boot"])
def test_what_was_prepared_outlives_a_restart_of_the_agent_but_no_reboot(boot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with agent_world() as world:
            claim = add_claim(world, "some", result(gib=1))
            before = (await world.prepare(claim))["some"]
            await world.stop()
            if boot == "another boot":
                monkeypatch.setattr("aimgpu.kubernetes.node.agent.agent.read_boot_id", lambda: "other")
                (world.folder / "cdi").rename(world.folder / "lost")  # it is in memory
            await world.start()
            assert len(world.grants()) == len(world.cdi()) == (boot == "the same boot")
            assert (await world.prepare(claim))["some"] == before
            assert len(world.grants()) == len(world.cdi()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("lost", ["another state folder", "the file", "corrupt"])
def test_a_ledger_that_was_lost_is_rebuilt_from_the_claims_of_running_pods(lost: str) -> None:
    async def main() -> None:
        async with agent_world() as world:
            request = {"request": "part"}
            claims = [
                add_claim(world, "some", result(gib=20), result(gib=5, **request)),
                add_claim(world, "ended", result(gib=1)),
            ]
            before = await world.prepare(*claims)
            files = world.cdi()
            await world.stop()
            world.api.remove(RESOURCE_CLAIMS, "ended", "default")
            lose_ledger(world, lost)
            await world.start()
            assert sorted(grant.memory_bytes for grant in ledger_grants(world)) == [5 * GIB, 20 * GIB]
            ended = before["ended"].devices[0].cdi_device_ids[0]
            assert world.cdi() == {name: edits for name, edits in files.items() if name != ended}
            assert (await world.prepare(claims[0]))["some"] == before["some"]
            refused = (await world.prepare(add_claim(world, "more", result(gib=180))))["more"]
            assert "179298107392 bytes left" in refused.error
            assert await world.unprepare(claims[0]) == {"some": ""}
            assert (ledger_grants(world), world.cdi()) == ((), {})

    asyncio.run(main())


@pytest.mark.parametrize("why", ["the GPU has no such partition", "a file that names no claim", "the API server fails"])
def test_an_agent_that_cannot_rebuild_its_ledger_does_not_start_and_deletes_nothing(why: str) -> None:
    async def main() -> None:
        async with agent_world(repartition=True) as world:
            claim = add_claim(world, "some", result(f"{GPU}-cpx-2") if "partition" in why else result(gib=20))
            await world.prepare(claim)
            files = world.cdi()
            await world.stop()
            lose_ledger(world, "another state folder")
            if "file" in why:
                (path,) = (world.folder / "cdi").iterdir()
                path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": {}}))
            if "API" in why:
                world.api.fail("GET", RESOURCE_CLAIMS, 500, times=100)
            for _ in range(2):
                with pytest.raises(Conflict, match="cannot be rebuilt") as refused:
                    await world.start()
                assert "some" in refused.value.message or claim["metadata"]["uid"] in refused.value.message
                await world.stop()
            assert world.cdi() == files

    asyncio.run(main())


def test_a_ledger_of_another_build_is_refused_by_name_and_left_as_it_is() -> None:
    async def main() -> None:
        async with agent_world() as world:
            await world.prepare(add_claim(world, "some", result(gib=20)))
            await world.stop()
            path = world.folder / "state" / "ledger.db"
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA user_version = 999")
            content, files = path.read_bytes(), world.cdi()
            with pytest.raises(OtherLedgerSchema, match=re.escape(str(path))) as refused:
                await world.start()
            assert "aimgpu down" not in str(refused.value.hint)
            assert (path.read_bytes(), world.cdi()) == (content, files)

    asyncio.run(main())


def lose_ledger(world: AgentWorld, how: str) -> None:
    state = world.folder / "state"
    if how == "another state folder":
        world.options["state"] = world.folder / "other"
        return
    for path in state.glob("ledger.db*"):
        path.unlink()
    if how == "corrupt":
        (state / "ledger.db").write_bytes(b"not a database" * 100)


def ledger_grants(world: AgentWorld) -> tuple[Grant, ...]:
    return tuple(read_grants(world.settings().state / "ledger.db"))


def test_files_and_grants_of_nobody_are_removed_at_a_start_and_those_of_others_are_left_alone() -> None:
    async def main() -> None:
        async with agent_world(running=False) as world:
            folder = world.folder / "cdi"
            folder.mkdir()
            for name in ("gpu.aim.amd.com-claim-old.json", ".gpu.aim.amd.com-claim-half.fresh", "nvidia.com-gpu.json"):
                (folder / name).write_text(json.dumps({"kind": "x/y", "devices": []}))
            await world.start()
            assert [path.name for path in folder.iterdir()] == ["nvidia.com-gpu.json"]

    asyncio.run(main())


def test_the_kubelet_learns_the_socket_and_its_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aimgpu")

    async def main() -> None:
        async with agent_world() as world:
            found = await world.registration()
            assert (found.type, found.name) == ("DRAPlugin", "gpu.aim.amd.com")
            assert found.endpoint == str(world.kubelet / "plugins/gpu.aim.amd.com/dra.sock")
            assert list(found.supported_versions) == ["v1.DRAPlugin"]
            await world.report_registration(error="the version is not supported")
            await world.report_registration()
            await world.stop()
            assert not list(world.kubelet.rglob("*.sock"))

    asyncio.run(main())
    (refused,) = log_data(caplog.records, "kubelet.refused")
    assert refused["reason"] == "the version is not supported"
    assert len(log_data(caplog.records, "kubelet.registered")) == 1


def test_many_claims_at_once_are_granted_exactly_as_far_as_the_gpu_goes() -> None:
    async def main() -> None:
        async with agent_world() as world:
            claims = [add_claim(world, f"c{number}", result(gib=19)) for number in range(14)]
            answers = await asyncio.gather(*(world.prepare(claim) for claim in claims))
            refused = [name for answer in answers for name, one in answer.items() if one.error]
            assert len(refused) == 4  # ten of 19 GiB are 190 of 192 GiB less what does not divide
            assert len(world.grants()) == len(world.cdi()) == 10
            await asyncio.gather(*(world.unprepare(claim) for claim in claims))
            assert (world.grants(), world.cdi()) == ((), {})

    asyncio.run(main())


def test_shares_of_gpus_of_two_products_are_one_device_of_the_container() -> None:
    """As admission asks for them: a request for each GPU, and limits for the claim as a whole."""

    async def main() -> None:
        async with agent_world(simulated=(("MI300X", 1), ("MI355X", 1))) as world:
            results = [
                result("sim-mi300x-0-shared", gib=96, request="gpu-0/size0"),
                result("sim-mi355x-0-shared", gib=144, request="gpu-1/size1"),
            ]
            claim = add_claim(world, "both", *results, config=[parameters("gpu-0", "gpu-1", limits="claim")])
            answer = (await world.prepare(claim))["both"]
            assert not answer.error
            assert sorted(grant.memory_bytes for grant in world.grants()) == [96 * GIB, 144 * GIB]
            assert len({name for device in answer.devices for name in device.cdi_device_ids}) == 1
            (written,) = world.cdi().values()
            assert f"AIMGPU_MEMORY_BYTES={240 * GIB}" in str(written)

    asyncio.run(main())
