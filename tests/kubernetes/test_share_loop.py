"""GpuShares follow pods and claims, whatever order things come in and whoever changes them meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kubernetes.api_server import ApiServer, serving, until

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.operator.options import OperatorOptions, parse_options
from aimgpu.kubernetes.cluster.operator.shares.loop import ShareLoop

DRA = "/apis/resource.k8s.io/v1"
OURS = {"app.kubernetes.io/managed-by": "aim-gpu-sharing"}
GB = 10**9


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def shares(namespace: str) -> str:
    return f"/apis/aim.amd.com/v1alpha1/namespaces/{namespace}/gpushares"


@asynccontextmanager
async def running(client: Client, *namespaces: str) -> AsyncIterator[ShareLoop]:
    loop = ShareLoop(client, OperatorOptions(namespace="system", namespaces=frozenset(namespaces)))
    task = asyncio.ensure_future(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def publish(api: ApiServer, gib: int = 192) -> None:
    device = {"name": "gpu0", "attributes": {"level": {"string": "runtime"}}, "capacity": {"memory": {"value": f"{gib}Gi"}}}
    spec = {"driver": "gpu.aim.amd.com", "pool": {"name": "n1"}, "devices": [device]}
    api.put(f"{DRA}/resourceslices", {"metadata": {"name": "s1"}, "spec": spec})


def add_pod(
    api: ApiServer, name: str, namespace: str = "a", *, claim: bool = True, phase: str = "Running", **metadata: Any
) -> None:
    own = {"name": name, "labels": {"aim.amd.com/gpu-share": "true", **metadata.pop("labels", {})}, **metadata}
    status: dict[str, Any] = {"phase": phase}
    if claim:
        status["resourceClaimStatuses"] = [{"name": "aim-gpu", "resourceClaimName": f"{name}-claim"}]
    api.put(pods(namespace), {"metadata": own, "spec": {"nodeName": "n1", "containers": []}, "status": status})


def add_claim(api: ApiServer, pod: str, namespace: str = "a", *, memory: str = "8Gi") -> None:
    place = {"driver": "gpu.aim.amd.com", "pool": "n1", "device": "gpu0", "consumedCapacity": {"memory": memory}}
    metadata = {"name": f"{pod}-claim", "labels": OURS, "ownerReferences": [{"kind": "Pod", "name": pod, "uid": "u"}]}
    status = {"allocation": {"devices": {"results": [place]}}}
    api.put(f"{DRA}/namespaces/{namespace}/resourceclaims", {"metadata": metadata, "spec": {}, "status": status})


def condition(api: ApiServer, name: str, namespace: str = "a") -> dict[str, Any]:
    found = api.find(f"{shares(namespace)}/{name}") or {}
    conditions: list[dict[str, Any]] = (found.get("status") or {}).get("conditions") or [{}]
    return conditions[0]


def events(api: ApiServer) -> list[dict[str, Any]]:
    """In the order in which they came."""
    found = [item for place, item in api.store.objects.items() if place[0] == "events"]
    return sorted(found, key=lambda one: int(one["metadata"]["resourceVersion"]))


def known(api: ApiServer) -> set[tuple[str, str]]:
    return {(place[1], place[2]) for place in api.versions() if place[0] == "gpushares"}


def test_a_share_is_there_before_its_claim_and_is_filled_when_it_comes() -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client):
            publish(api)
            add_pod(api, "web", claim=False, phase="Pending")
            await until(lambda: condition(api, "pod-web").get("status") == "False")
            assert condition(api, "pod-web")["reason"] == "Waiting"
            add_pod(api, "web")
            add_claim(api, "web")
            await until(lambda: condition(api, "pod-web").get("status") == "True")
            found = api.find(f"{shares('a')}/pod-web")
            assert found is not None
            info = found["status"]["partitionInfo"]
            assert info["allocatedMemoryGB"] == round((8 << 30) / GB, 3)
            assert info["availableMemoryGB"] == round((184 << 30) / GB, 3)
            await until(lambda: len(events(api)) == 1)
            assert [event["type"] for event in events(api)] == ["Normal"]  # no warning of what is placed within seconds
            assert {event["involvedObject"]["uid"] for event in events(api)} == {found["metadata"]["uid"]}

    asyncio.run(main())


def test_what_is_left_of_a_gpu_changes_for_all_that_share_it() -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client):
            publish(api)
            for name in ("one", "two"):
                add_pod(api, name)
                add_claim(api, name)

            def left(name: str) -> float | None:
                found = api.find(f"{shares('a')}/pod-{name}") or {}
                return ((found.get("status") or {}).get("partitionInfo") or {}).get("availableMemoryGB")

            await until(lambda: left("one") == left("two") == round((176 << 30) / GB, 3))
            add_pod(api, "three", "other")
            add_claim(api, "three", "other", memory="100Gi")
            await until(lambda: left("one") == left("two") == round((76 << 30) / GB, 3))
            api.remove(f"{DRA}/namespaces/other/resourceclaims/three-claim")
            await until(lambda: left("one") == left("two") == round((176 << 30) / GB, 3))

    asyncio.run(main())


def test_equal_names_in_two_namespaces_are_two_and_only_chosen_namespaces_are_looked_after() -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client, "a", "b"):
            publish(api)
            for namespace in ("a", "b", "c"):
                add_pod(api, "web", namespace)
                add_claim(api, "web", namespace)
            await until(lambda: known(api) == {("a", "pod-web"), ("b", "pod-web")})
            api.remove(f"{pods('a')}/web")
            await until(lambda: known(api) == {("b", "pod-web")})
            api.remove(f"{pods('c')}/web")
            api.remove(f"{pods('b')}/web")
            await until(lambda: known(api) == set())

    asyncio.run(main())


def test_a_share_that_is_deleted_by_hand_comes_back_and_one_without_a_workload_goes() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            publish(api)
            add_pod(api, "web")
            add_claim(api, "web")
            stale = {"metadata": {"name": "pod-gone"}, "spec": {"workload": {"kind": "Pod", "name": "gone"}}}
            api.put(shares("a"), stale)
            async with running(client):
                await until(lambda: known(api) == {("a", "pod-web")})
                await until(lambda: condition(api, "pod-web").get("status") == "True")
                api.remove(f"{shares('a')}/pod-web")
                await until(lambda: condition(api, "pod-web").get("status") == "True")

    asyncio.run(main())


def test_nothing_is_taken_for_gone_before_everything_was_listed() -> None:
    """An operator whose view of the pods is not complete yet leaves every share alone."""

    async def main() -> None:
        async with serving() as (api, client):
            publish(api)
            add_pod(api, "web")
            add_claim(api, "web")
            async with running(client):
                await until(lambda: condition(api, "pod-web").get("status") == "True")
            asked = [0]

            def refuse(method: str, path: str) -> int | None:
                asked[0] += method == "GET" and path == "/api/v1/pods"
                return 500 if path == "/api/v1/pods" else None

            api.fault = refuse
            before = api.versions()
            async with running(client):
                await until(lambda: asked[0] >= 3)
                assert api.versions() == before

    asyncio.run(main())


@pytest.mark.parametrize("status", [409, 500, 404])
def test_writes_that_are_refused_are_tried_again(status: int) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            publish(api)
            add_pod(api, "web")
            add_claim(api, "web")
            left = [2]

            def refuse(method: str, path: str) -> int | None:
                if method in ("PATCH", "POST") and "gpushares" in path and left[0] > 0:
                    left[0] -= 1
                    return status
                return None

            api.fault = refuse
            async with running(client):
                await until(lambda: condition(api, "pod-web").get("status") == "True")

    asyncio.run(main())


def test_a_gap_in_every_watch_loses_nothing() -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client):
            publish(api)
            for name in ("kept", "lost"):
                add_pod(api, name)
                add_claim(api, name)
            await until(lambda: known(api) == {("a", "pod-kept"), ("a", "pod-lost")})
            await until(lambda: condition(api, "pod-lost").get("status") == "True")
            api.store.delete(("pods", "a", "lost"))
            api.store.delete(("resourceclaims", "a", "lost-claim"))
            api.store.forget_history()
            add_pod(api, "new")
            add_claim(api, "new")
            await until(lambda: known(api) == {("a", "pod-kept"), ("a", "pod-new")})
            expected = round((176 << 30) / GB, 3)

            def left() -> float:
                found = api.find(f"{shares('a')}/pod-kept") or {}
                return float(((found.get("status") or {}).get("partitionInfo") or {}).get("availableMemoryGB") or 0)

            await until(lambda: left() == expected)

    asyncio.run(main())


def test_pods_that_have_ended_hold_no_share() -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client):
            publish(api)
            job: dict[str, Any] = {"ownerReferences": [{"kind": "Job", "name": "train", "controller": True}]}
            add_pod(api, "train-1", phase="Succeeded", **job)
            await until(lambda: condition(api, "job-train").get("reason") == "NoPods")
            add_pod(api, "train-2", **job)
            add_claim(api, "train-2")
            await until(lambda: condition(api, "job-train").get("status") == "True")
            found = api.find(f"{shares('a')}/job-train")
            assert found is not None
            assert [row["pod"] for row in found["status"]["replicas"]] == ["train-2"]

    asyncio.run(main())


STEPS = st.lists(
    st.tuples(st.sampled_from(["pod", "claim", "end", "drop claim", "remove share"]), st.integers(0, 3), st.sampled_from("ab")),
    max_size=20,
)


@settings(max_examples=10, deadline=None)
@given(STEPS)
def test_after_any_course_there_is_one_share_per_workload_and_it_is_true(steps: list[tuple[str, int, str]]) -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client):
            publish(api)
            for kind, number, namespace in steps:
                change(api, kind, f"p{number}", namespace)
                await asyncio.sleep(0)
            alive = {(place[1], f"pod-{place[2]}") for place in api.versions() if place[0] == "pods"}
            claimed = {(place[1], place[2]) for place in api.versions() if place[0] == "resourceclaims"}
            await until(lambda: known(api) == alive)
            expected = {
                (namespace, share): "True" if (namespace, f"{share.removeprefix('pod-')}-claim") in claimed else "False"
                for namespace, share in alive
            }
            await until(lambda: {key: condition(api, key[1], key[0]).get("status") for key in alive} == expected)

    asyncio.run(main())


def change(api: ApiServer, kind: str, name: str, namespace: str) -> None:
    """One that makes no sense now changes nothing."""
    if kind == "pod":
        add_pod(api, name, namespace)
    elif kind == "claim" and api.find(f"{pods(namespace)}/{name}"):
        add_claim(api, name, namespace)
    elif kind == "end" and api.find(f"{pods(namespace)}/{name}"):
        api.remove(f"{pods(namespace)}/{name}")
    elif kind == "drop claim" and api.find(f"{DRA}/namespaces/{namespace}/resourceclaims/{name}-claim"):
        api.remove(f"{DRA}/namespaces/{namespace}/resourceclaims/{name}-claim")
    elif kind == "remove share" and api.find(f"{shares(namespace)}/pod-{name}"):
        api.remove(f"{shares(namespace)}/pod-{name}")


def test_the_options_name_namespaces_and_the_pods_own() -> None:
    given_options = parse_options(["--watch-namespaces", " a, ,b", "--keep-templates-seconds", "5"], {"POD_NAMESPACE": "mine"})
    assert given_options == OperatorOptions(namespace="mine", namespaces=frozenset({"a", "b"}), keep_templates_seconds=5.0)
    assert parse_options([], {}).namespace == "aim-gpu-sharing"
    with pytest.raises(SystemExit):
        parse_options(["--keep-templates-seconds", "soon"], {})


def test_a_pod_that_admission_never_saw_has_a_gpu_share_that_says_so() -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client):
            publish(api)

            def add(name: str, **spec: Any) -> None:
                metadata = {"name": name, "annotations": {"gpu-memory": "1024"}}
                api.put(pods("a"), {"metadata": metadata, "spec": {"nodeName": "n1", "containers": [], **spec}})

            add("unseen")
            await until(lambda: condition(api, "pod-unseen").get("reason") == "NotAdmitted")
            assert "unseen was created while admission was down" in condition(api, "pod-unseen")["message"]
            await until(lambda: [one["reason"] for one in events(api)] == ["NotAdmitted"])
            add("of-kai", schedulerName="kai-scheduler")  # KAI-Scheduler gives it its part
            add_pod(api, "seen", annotations={"gpu-memory": "1024", "aim.amd.com/claim": "t"})
            add_claim(api, "seen")
            await until(lambda: condition(api, "pod-seen").get("status") == "True")
            assert ("a", "pod-of-kai") not in known(api)

    asyncio.run(main())


def test_a_scheduler_that_gives_no_reason_is_named() -> None:
    async def main() -> None:
        async with serving() as (api, client), running(client):
            publish(api)
            metadata = {"name": "web", "labels": {"aim.amd.com/gpu-share": "true"}}
            spec = {"containers": [], "schedulerName": "kai-scheduler"}
            api.put(pods("a"), {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
            await until(lambda: condition(api, "pod-web").get("reason") == "Waiting")
            assert "web is not placed yet, and kai-scheduler gives no reason" in condition(api, "pod-web")["message"]

    asyncio.run(main())
