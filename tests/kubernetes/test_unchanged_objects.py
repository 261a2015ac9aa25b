"""What is as it should be is not written again: over resyncs, after a restart, after a change of the leader."""

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from tests.kubernetes.api_server import ApiServer, serving, until
from tests.kubernetes.partitioned_cluster import PartitionedCluster

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.admission.certificate_keeper import CertificateKeeper
from aimgpu.kubernetes.cluster.admission.options import AdmissionOptions
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration, validating_configuration
from aimgpu.kubernetes.cluster.operator import claim_templates, leader, plan_loop
from aimgpu.kubernetes.cluster.operator.operator import Operator
from aimgpu.kubernetes.cluster.operator.options import OperatorOptions
from aimgpu.kubernetes.cluster.operator.shares import loop

DRA = "/apis/resource.k8s.io/v1"
OURS = {"app.kubernetes.io/managed-by": "aim-gpu-sharing"}
SHARES = "/apis/aim.amd.com/v1alpha1/namespaces/team/gpushares"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the operator does now and then it does all the time."""
    monkeypatch.setattr(loop, "_RESYNC_SECONDS", 0.01)
    monkeypatch.setattr(plan_loop, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(leader, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(leader, "_RENEW_SECONDS", 0.005)
    monkeypatch.setattr(claim_templates, "_age", lambda _since, _now: 1.0)


def fill(api: ApiServer, client: Client) -> None:
    """Workloads with shares, one that waits, plans of every kind, templates in use."""
    cluster = PartitionedCluster(api, client)
    cluster.add_node(layout="CPX/NPS1")
    cluster.add_plan("done")
    cluster.add_plan("impossible", layout={"computeMode": "TPX"})
    cluster.add_plan("preview", layout={"computeMode": "SPX"}, dryRun=True)
    cluster.add_plan("elsewhere", nodeSelector={"kubernetes.io/hostname": "none"})
    automatic = {"metadata": {"name": "auto"}, "spec": {"auto": {"policy": "Propose"}}, "kind": "PartitionPlan"}
    api.put("/apis/aim.amd.com/v1alpha1/partitionplans", automatic)
    devices = [{"name": "gpu0", "attributes": {"gpu": {"string": "g"}}, "capacity": {"memory": {"value": "192Gi"}}}]
    spec = {"driver": "gpu.aim.amd.com", "pool": {"name": "n1"}, "devices": devices}
    api.put(f"{DRA}/resourceslices", {"metadata": {"name": "s1"}, "spec": spec})
    for number in range(5):
        template = {"metadata": {"name": f"t{number}", "labels": OURS}, "spec": {}}
        api.put(f"{DRA}/namespaces/team/resourceclaimtemplates", template)
        add_pod(api, number, waits=number == 4)


def add_pod(api: ApiServer, number: int, *, waits: bool) -> None:
    name, claim = f"web-{number}", f"claim-{number}"
    status: dict[str, Any] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "no GPU"}],
    }
    if not waits:
        status = {"phase": "Running", "resourceClaimStatuses": [{"name": "aim-gpu", "resourceClaimName": claim}]}
        place = {"driver": "gpu.aim.amd.com", "pool": "n1", "device": "gpu0", "consumedCapacity": {"memory": "8Gi"}}
        owner = {"kind": "Pod", "name": name, "uid": "u"}
        metadata = {"name": claim, "labels": OURS, "ownerReferences": [owner]}
        allocation = {"allocation": {"devices": {"results": [place]}}}
        api.put(f"{DRA}/namespaces/team/resourceclaims", {"metadata": metadata, "spec": {}, "status": allocation})
    claims = [{"name": "aim-gpu", "resourceClaimTemplateName": f"t{number}"}]
    metadata = {"name": name, "labels": {"aim.amd.com/gpu-share": "true"}}
    spec = {"nodeName": "n1", "containers": [], "resourceClaims": claims}
    api.put("/api/v1/namespaces/team/pods", {"metadata": metadata, "spec": spec, "status": status})


def written(api: ApiServer) -> dict[tuple[str, str, str], str]:
    """Versions of everything but the Lease, whose purpose it is to be renewed."""
    return {place: version for place, version in api.versions().items() if place[0] != "leases"}


def renewals(api: ApiServer) -> int:
    return sum("/leases/" in write for write in api.writes)


def is_reported(api: ApiServer) -> bool:
    """Every workload has its first report, and every plan a status: what comes late is not taken for written again."""
    plans = [item for place, item in api.store.objects.items() if place[0] == "partitionplans"]
    return sum(place[0] == "events" for place in api.versions()) == 5 and all(
        (one.get("status") or {}).get("phase") for one in plans
    )


async def leads_for(api: ApiServer, client: Client, renewed: int, holds: Callable[[], bool] = lambda: True) -> None:
    """An operator that leads until it has renewed its Lease so often and this holds, and ends."""
    running = asyncio.ensure_future(Operator(client, OperatorOptions(namespace="system", keep_templates_seconds=60)).run())
    before = renewals(api)
    await until(lambda: (renewals(api) > before + renewed and holds()) or running.done())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.usefixtures("hurried")
def test_no_object_is_rewritten_by_resyncs_a_restart_or_another_leader() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            fill(api, client)
            await leads_for(api, client, 8, lambda: is_reported(api))
            shares = [place for place in written(api) if place[0] == "gpushares"]
            assert len(shares) == 5
            before, settled = written(api), len(api.writes)
            await leads_for(api, client, 8)  # after a restart: everything is read again
            heir = asyncio.ensure_future(leads_for(api, client, 12))
            await leads_for(api, client, 8)  # one of the two leads, and the other after it
            await heir
            assert written(api) == before
            assert sum(place[0] == "events" for place in before) == 5  # one for each workload, of its first report
            sent = {write for write in api.writes[settled:] if not any(word in write for word in ("/leases", "selfsubject"))}
            assert sent == set()

    asyncio.run(main())


@pytest.mark.usefixtures("hurried")
def test_what_a_person_changed_in_a_share_is_put_right_once() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            fill(api, client)
            await leads_for(api, client, 6, lambda: is_reported(api))
            right = api.find(f"{SHARES}/pod-web-0")
            assert right is not None
            api.patch(f"{SHARES}/pod-web-0", {"status": {"level": "hardware", "replicas": []}})
            status = right["status"]
            await leads_for(api, client, 6, lambda: (api.find(f"{SHARES}/pod-web-0") or {}).get("status") == status)
            after = api.find(f"{SHARES}/pod-web-0")
            assert after is not None
            assert after["status"] == right["status"]
            version = after["metadata"]["resourceVersion"]
            await leads_for(api, client, 6)
            again = api.find(f"{SHARES}/pod-web-0")
            assert again is not None
            assert again["metadata"]["resourceVersion"] == version

    asyncio.run(main())


def test_certificates_and_configurations_are_written_once_by_any_number_of_replicas() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            options = AdmissionOptions(namespace="system")
            for kind, made in (
                ("mutatingwebhookconfigurations", mutating_configuration("system", options.service)),
                ("validatingwebhookconfigurations", validating_configuration("system", options.service)),
            ):
                api.put(f"{CONFIGURATIONS}/{kind}", made)
            now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
            keepers = [CertificateKeeper(client, options, lambda: now) for _ in range(3)]
            await asyncio.gather(*(keeper.refresh() for keeper in keepers))
            before = api.versions()
            assert sum(place[0] == "secrets" for place in before) == 1
            for keeper in (*keepers, CertificateKeeper(client, options, lambda: now)):  # the last one has just started
                await keeper.refresh()
            assert api.versions() == before

    asyncio.run(main())


def test_while_nothing_changes_an_operator_renews_its_lease_and_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_RESYNC_SECONDS", 0.01)
    monkeypatch.setattr(loop, "_WAITING_SECONDS", 0.01)
    monkeypatch.setattr(plan_loop, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(leader, "_RENEW_SECONDS", 0.005)

    async def main() -> None:
        async with serving() as (api, client):
            fill(api, client)
            options = OperatorOptions(namespace="system", keep_templates_seconds=0.02)
            running = asyncio.ensure_future(Operator(client, options).run())
            await until(lambda: is_reported(api) and renewals(api) > 10)
            while True:  # until what was late is done
                asked, written_before, renewed = len(api.reads), len(api.writes), renewals(api)
                await until(lambda: renewals(api) >= renewed + 40)  # noqa: B023 - awaited
                if len(api.reads) == asked:
                    break
            assert all("/leases/" in write for write in api.writes[written_before:])
            version = api.store.version
            api.patch("/apis/aim.amd.com/v1alpha1/partitionplans/done", {"spec": {"layout": {"computeMode": "DPX"}}})
            await until(lambda: "/api/v1/nodes" in str(api.reads[asked:]) and api.store.version > version)  # it is awake again
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.usefixtures("hurried")
def test_the_replica_that_leads_shows_it_and_what_it_has_done() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            fill(api, client)
            operator = Operator(client, OperatorOptions(namespace="system"))
            assert b"aim_operator_leading 0" in operator.render()
            running = asyncio.ensure_future(operator.run())
            await until(lambda: b'aim_operator_reconciles_total{result="done"} 0' not in operator.render())
            assert b"aim_operator_leading 1" in operator.render()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
