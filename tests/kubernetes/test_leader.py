"""One leader among replicas: taken over when it is gone, never shared, given up at once, and kept through refusals."""

import asyncio
from collections.abc import Callable

import pytest
from tests.kubernetes.api_server import ApiServer, serving, until

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.operator import leader as leader_module
from aimgpu.kubernetes.cluster.operator.leader import DURATION_SECONDS, Leader

LEASE = "/apis/coordination.k8s.io/v1/namespaces/system/leases/operator"
ACCOUNT = {"username": "system:serviceaccount:system:operator", "uid": "u-1"}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses as short as they can be; how long a Lease is good for is counted by the clock of the test."""
    monkeypatch.setattr(leader_module, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(leader_module, "_RENEW_SECONDS", 0.002)


class Replica:
    """One that leads as soon as it can; `led` counts how often."""

    def __init__(self, client: Client, name: str, clock: Callable[[], float]) -> None:
        self.leader = Leader(client, namespace="system", name="operator", identity=name, clock=clock)
        self.led, self.leads, self.clock, self.stopped = 0, False, clock, 0.0
        self.task = asyncio.ensure_future(self.leader.lead(self._work))

    async def _work(self) -> None:
        self.led += 1
        self.leads = True
        try:
            await asyncio.Event().wait()
        finally:
            self.leads, self.stopped = False, self.clock()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def holder(api: ApiServer) -> str:
    found = api.find(LEASE)
    return str(found["spec"]["holderIdentity"]) if found else ""


def transitions(api: ApiServer) -> int:
    found = api.find(LEASE)
    assert found is not None
    return int(found["spec"]["leaseTransitions"])


def test_the_second_leads_when_the_first_gives_up_and_not_before() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            first = Replica(client, "first", lambda: 0.0)
            await until(lambda: first.leads)
            second = Replica(client, "second", lambda: 0.0)
            asked = len(api.writes)
            await until(lambda: len(api.writes) > asked + 5)  # the first renews while the second asks
            assert not second.leads
            await first.stop()
            await until(lambda: second.leads)
            assert (holder(api), transitions(api)) == ("second", 1)
            await second.stop()
            assert holder(api) == ""

    asyncio.run(main())


def test_a_leader_that_is_gone_is_replaced_when_its_lease_has_run_out_and_not_before() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            now = [0.0]
            spec = {
                "holderIdentity": "dead",
                "renewTime": "2026-01-01T00:00:00.000000Z",
                "leaseDurationSeconds": DURATION_SECONDS,
            }
            api.put(LEASE.rpartition("/")[0], {"metadata": {"name": "operator"}, "spec": spec})
            reads = [0]
            api.fault = lambda method, _path: reads.__setitem__(0, reads[0] + (method == "GET"))
            heir = Replica(client, "heir", lambda: now[0])
            await until(lambda: reads[0] > 3)
            now[0] = DURATION_SECONDS
            seen = reads[0]
            await until(lambda: reads[0] > seen + 3)
            assert holder(api) == "dead"  # exactly its duration is still within it
            now[0] += 0.1
            await until(lambda: heir.leads)
            assert holder(api) == "heir"
            await heir.stop()

    asyncio.run(main())


def test_a_lease_that_another_renews_never_runs_out() -> None:
    """By what it says, not by whose clock: the renewals of a machine whose clock is years off count."""

    async def main() -> None:
        async with serving() as (api, client):
            now, number = [0.0], [0]
            spec = {"holderIdentity": "other", "renewTime": "1990", "leaseDurationSeconds": DURATION_SECONDS}
            api.put(LEASE.rpartition("/")[0], {"metadata": {"name": "operator"}, "spec": spec})

            def renew(method: str, _path: str) -> None:
                if method == "GET":
                    number[0] += 1
                    now[0] += DURATION_SECONDS - 1
                    api.patch(LEASE, {"spec": {"renewTime": f"1990-{number[0]}"}})

            api.fault = renew
            waiting = Replica(client, "waiting", lambda: now[0])
            await until(lambda: number[0] > 10)
            assert not waiting.leads
            await waiting.stop()

    asyncio.run(main())


@pytest.mark.parametrize("status", [500, 403, 409])
def test_a_leader_that_cannot_renew_stops_before_another_may_lead(status: int) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            now = [0.0]
            first = Replica(client, "first", lambda: now[0])
            await until(lambda: first.leads)
            refused = [0]

            def refuse(method: str, _path: str) -> int | None:
                if method == "GET":
                    return None
                refused[0] += 1
                now[0] += 1.0
                return status

            api.fault = refuse
            await asyncio.wait({first.task})
            assert not first.leads
            assert 0 < first.stopped <= DURATION_SECONDS  # a conflict means that another has it; else it tries until then
            api.fault = lambda _method, _path: None

    asyncio.run(main())


def test_of_two_that_find_no_lease_one_leads() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            both = [Replica(client, name, lambda: 0.0) for name in ("one", "two")]
            await until(lambda: any(each.leads for each in both))
            asked = len(api.writes)
            await until(lambda: len(api.writes) > asked + 3)
            assert [each.leads for each in both].count(True) == 1
            for each in both:
                await each.stop()

    asyncio.run(main())


def test_work_that_fails_is_reported_and_the_lease_given_up() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            leader = Leader(client, namespace="system", name="operator", identity="only", clock=lambda: 0.0)

            async def fail() -> None:
                raise RuntimeError("broken")

            with pytest.raises(RuntimeError, match="broken"):
                await leader.lead(fail)
            assert holder(api) == ""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("user", "owners"),
    [
        (ACCOUNT, [{"apiVersion": "v1", "kind": "ServiceAccount", "name": "operator", "uid": "u-1"}]),
        ({**ACCOUNT, "username": "system:serviceaccount:elsewhere:operator"}, None),
        ({"username": "admin"}, None),
    ],
)
def test_the_lease_belongs_to_the_account_of_the_chart_and_to_no_other(user: dict[str, str], owners: object) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            api.user = user
            only = Replica(client, "only", lambda: 0.0)
            await until(lambda: only.leads)
            found = api.find(LEASE)
            assert found is not None
            assert (found["metadata"].get("ownerReferences") or None) == owners
            await only.stop()

    asyncio.run(main())
