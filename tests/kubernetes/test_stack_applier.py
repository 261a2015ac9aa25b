"""A stack brought to a cluster, changed, pruned and removed: only what differs is written, and nothing of others."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kubernetes.api_server import ApiServer, serving

from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.errors import AimGpuError, ClusterFailed, InvalidInput, UnknownDeployment
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration
from aimgpu.kubernetes.models.serving.applier import AppliedObject, StackApplier
from aimgpu.kubernetes.models.serving.cluster_view import ClusterView, find_installed_image, find_media_domains
from aimgpu.kubernetes.models.serving.engine_container import ServingImages
from aimgpu.kubernetes.models.serving.engine_keys import ENGINE_KEYS
from aimgpu.kubernetes.models.serving.manifests import RenderOptions, render_stack
from aimgpu.kubernetes.vocabulary.namespaces import AdmittedNamespaces

WORK = "/apis/apps/v1/namespaces/team/deployments"
CORE = "/api/v1/namespaces/team"
INSTALLED = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


JOBS = "/apis/batch/v1/namespaces/team/jobs"
TRAIN = "train: {command: [python, train.py], image: train:1, gpu: {memory: 8GiB}}"


def program_manifests(programs: str, **options: Any) -> list[dict[str, Any]]:
    stack = parse_stack(f"programs: {{{programs}}}")
    return render_stack(stack.deployments, RenderOptions(images=ServingImages(own=None), **options))


def manifests(models: str, **options: Any) -> list[dict[str, Any]]:
    stack = parse_stack(f"models: {{{models}}}", base_directory=Path("/nowhere"))
    return render_stack(stack.deployments, RenderOptions(images=ServingImages(own="own:1", vendor="amd"), **options))


async def collect(found: AsyncIterator[AppliedObject]) -> dict[str, str]:
    return {f"{one.kind}/{one.name}": one.change.value async for one in found}


def play(scenario: Callable[[ApiServer, StackApplier], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            await scenario(api, StackApplier(client, "team"))

    asyncio.run(main())


ONE = "chat: {model: org/chat, engine: vllm}"
TWO = f"{ONE}, small: {{model: org/small, engine: vllm}}"


def test_applying_twice_changes_nothing_and_a_change_only_what_differs() -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        first = await collect(applier.apply(manifests(TWO)))
        assert set(first.values()) == {"created"}
        before = api.versions()
        assert set((await collect(applier.apply(manifests(TWO)))).values()) == {"unchanged"}
        assert api.versions() == before
        changed = await collect(applier.apply(manifests(TWO.replace("org/small", "org/other"))))
        assert {name for name, change in changed.items() if change == "configured"} == {"Deployment/small"}
        assert {place[2] for place, version in api.versions().items() if before[place] != version} == {"small"}

    play(scenario)


def test_each_engine_has_a_key_that_stays_while_it_is_applied_again() -> None:
    secret = f"{CORE}/secrets/{ENGINE_KEYS}"

    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        await collect(applier.apply(manifests(ONE)))
        first = dict((api.find(secret) or {})["data"])
        await collect(applier.apply(manifests(TWO, stack="second")))
        both = (api.find(secret) or {})["data"]
        assert both.keys() == {"chat", "small"}
        assert both["chat"] == first["chat"] != both["small"]
        assert {len(base64.b64decode(key)) for key in both.values()} == {64}
        await collect(applier.remove(()))
        assert api.find(secret) is None

    play(scenario)


def test_a_dry_run_reports_and_writes_nothing() -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        assert set((await collect(applier.apply(manifests(ONE), dry_run=True))).values()) == {"created"}
        assert api.versions() == {}
        await collect(applier.apply(manifests(ONE)))
        before = api.versions()
        assert "Deployment/chat" in await collect(applier.remove(("chat",), dry_run=True))
        assert "Deployment/chat" in await collect(applier.prune((), stack="default", dry_run=True))
        assert api.versions() == before

    play(scenario)


def test_what_others_made_is_neither_taken_over_nor_removed() -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        api.put(WORK, {"metadata": {"name": "chat"}, "spec": {"replicas": 7}})
        with pytest.raises(InvalidInput, match="was not made by aimgpu"):
            await collect(applier.apply(manifests(ONE)))
        await collect(applier.remove(()))
        found = api.find(f"{WORK}/chat")
        assert found is not None
        assert found["spec"] == {"replicas": 7}

    play(scenario)


def test_pruning_keeps_other_stacks_and_what_was_downloaded() -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        await collect(applier.apply(manifests(TWO, cache="5Gi")))
        await collect(applier.apply(manifests("else: {model: org/else, engine: vllm}", stack="second")))
        gone = await collect(applier.prune(("chat",), stack="default"))
        assert set(gone) == {"Deployment/small", "Service/small"}
        kept = {place[2] for place in api.versions() if place[0] == "deployments"}
        assert kept == {"chat", "else"}
        claims = {place[2] for place in api.versions() if place[0] == "persistentvolumeclaims"}
        assert claims == {"chat-models", "small-models"}
        await collect(applier.remove(("chat",), caches=True))
        assert api.find(f"{CORE}/persistentvolumeclaims/chat-models") is None
        assert api.find(f"{CORE}/persistentvolumeclaims/small-models") is not None

    play(scenario)


def test_a_model_that_is_not_there_is_named_with_those_that_are() -> None:
    async def scenario(_api: ApiServer, applier: StackApplier) -> None:
        with pytest.raises(UnknownDeployment, match="no model 'caht' in namespace") as missing:
            await collect(applier.remove(("caht",)))
        assert "none" in str(missing.value.hint)
        await collect(applier.apply(manifests(ONE)))
        with pytest.raises(UnknownDeployment) as wrong:
            await collect(applier.remove(("caht",)))
        assert "Did you mean 'chat'?" in str(wrong.value.hint)

    play(scenario)


def test_a_model_that_sleeps_is_not_woken_by_applying_it_again() -> None:
    sleeping = "chat: {model: org/chat, engine: vllm, keep: 10m}"

    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        await collect(applier.apply(manifests(sleeping)))
        api.patch(f"{WORK}/chat", {"spec": {"replicas": 0}})
        assert (await collect(applier.apply(manifests(sleeping))))["Deployment/chat"] == "unchanged"
        changed = await collect(applier.apply(manifests(sleeping.replace("org/chat", "org/new"))))
        assert changed["Deployment/chat"] == "configured"
        found = api.find(f"{WORK}/chat")
        assert found is not None
        assert found["spec"]["replicas"] == 0
        await collect(applier.apply(manifests(ONE)))  # kept for ever from now on
        found = api.find(f"{WORK}/chat")
        assert found is not None
        assert found["spec"]["replicas"] == 1

    play(scenario)


@pytest.mark.parametrize(
    ("present", "kserve", "words"),
    [
        ((), False, "no namespace 'team'"),
        (("namespace",), False, "not installed in this cluster"),
        (("namespace", "chart"), True, "KServe is not installed"),
        (("namespace", "chart"), False, ""),
    ],
)
def test_a_cluster_that_cannot_run_the_stack_is_refused_with_what_is_missing(
    present: tuple[str, ...], words: str, *, kserve: bool
) -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        if "namespace" in present:
            api.put("/api/v1/namespaces", {"metadata": {"name": "team"}})
        if "chart" in present:
            api.put(INSTALLED, mutating_configuration("system", "admission"))
        if words:
            with pytest.raises(AimGpuError, match=words) as refused:
                await applier.check_cluster(inference_services=kserve)
            assert refused.value.hint
        else:
            await applier.check_cluster()
            api.absent.discard("serving.kserve.io/v1beta1")
            await applier.check_cluster(inference_services=True)

    play(scenario)


@pytest.mark.parametrize(
    ("scope", "label", "refused"),
    [("all", None, False), ("all", "disabled", True), ("labelled", None, True), ("labelled", "enabled", False)],
)
def test_a_namespace_that_the_webhooks_do_not_select_is_refused_with_the_command_that_labels_it(
    scope: str, label: str | None, *, refused: bool
) -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        labels = {"aim.amd.com/admission": label} if label else {}
        api.put("/api/v1/namespaces", {"metadata": {"name": "team", "labels": labels}})
        api.put(INSTALLED, mutating_configuration("system", "admission", scope=AdmittedNamespaces(scope)))
        if not refused:
            return await applier.check_cluster()
        with pytest.raises(ClusterFailed, match="do not select namespace team") as found:
            await applier.check_cluster()
        assert "kubectl label namespace team aim.amd.com/admission=enabled" in str(found.value.hint)
        return None

    play(scenario)


def test_a_user_who_may_not_look_is_let_through_and_one_who_may_not_write_is_told_what_to_ask_for() -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        api.fault = lambda method, path: (
            403 if method == "GET" and (path[-15:] == "namespaces/team" or "admission" in path) else None
        )
        await applier.check_cluster()
        api.fault = lambda method, _path: 403 if method == "PATCH" else None
        with pytest.raises(ClusterFailed, match="NetworkPolicy aim-gpu-models") as refused:
            await collect(applier.apply(manifests(ONE)))
        assert "namespace team" in str(refused.value.hint)
        api.fault = lambda method, _path: 500 if method == "GET" else None
        with pytest.raises(ClusterFailed):
            await applier.check_cluster()

    play(scenario)


def device(**attributes: Any) -> dict[str, Any]:
    kinds = {bool: "bool", str: "string"}
    return {"name": "g", "attributes": {name: {kinds[type(value)]: value} for name, value in attributes.items()}}


@pytest.mark.parametrize(
    ("devices", "vendor"),
    [
        ([], None),
        ([device(vendor="amd")], "amd"),
        ([device(vendor="amd"), device(vendor="nvidia")], None),
        ([device(vendor="amd"), device(vendor="nvidia", simulated=True)], "amd"),
        ([device(vendor="amd", simulated=True)], None),
    ],
)
def test_the_vendor_is_known_where_all_real_gpus_are_of_one(devices: list[dict[str, Any]], vendor: str | None) -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        spec = {"driver": "gpu.aim.amd.com", "devices": devices}
        api.put("/apis/resource.k8s.io/v1/resourceslices", {"metadata": {"name": "s"}, "spec": spec})
        assert await applier.find_vendor() == vendor
        api.fault = lambda _method, _path: 403
        assert await applier.find_vendor() is None

    play(scenario)


def view_of(client: Client) -> ClusterView:
    return ClusterView(client, "team")


def add_pod(api: ApiServer, name: str, model: str = "chat", namespace: str = "team", **status: Any) -> None:
    containers = [{"name": "sidecar"}, {"name": "engine"}]
    metadata = {"name": name, "labels": {"aim.amd.com/served-model": model}}
    api.put(
        f"/api/v1/namespaces/{namespace}/pods", {"metadata": metadata, "spec": {"containers": containers}, "status": status}
    )


def test_logs_are_of_the_pods_of_a_model_and_what_has_none_is_named() -> None:
    async def read(client: Client, model: str, *, follow: bool = False) -> list[tuple[str, str]]:
        return [line async for line in view_of(client).read_logs(model, lines=5, follow=follow)]

    async def main() -> None:
        async with serving() as (api, client):
            with pytest.raises(UnknownDeployment, match="no model 'chat' in namespace team"):
                await read(client, "chat")
            await collect(StackApplier(client, "team").apply(manifests(ONE)))
            with pytest.raises(InvalidInput, match="has no pod now"):
                await read(client, "chat")
            add_pod(api, "chat-1")
            api.logs["chat-1"] = "one\n\ntwo"
            assert await read(client, "chat") == [("chat-1", "one"), ("chat-1", ""), ("chat-1", "two")]
            assert await read(client, "chat-1") == await read(client, "chat")
            add_pod(api, "small-1", "small", containerStatuses=[{"name": "engine", "restartCount": 2}])
            api.logs["small-1 before"] = "error: no memory"
            assert await read(client, "small") == [("small-1", "error: no memory")]
            api.logs["small-1"] = "trying again"
            assert await read(client, "small") == [("small-1", "trying again")]
            add_pod(api, "chat-2")
            with pytest.raises(InvalidInput, match="has 2 pods"):
                await read(client, "chat", follow=True)

    asyncio.run(main())


def test_programs_are_applied_pruned_and_removed_beside_models() -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        both = [*manifests(ONE), *program_manifests(TRAIN)]
        assert (await collect(applier.apply(both)))["Job/train"] == "created"
        assert set((await collect(applier.apply(both))).values()) == {"unchanged"}
        assert await collect(applier.prune(("chat", "train"), stack="default")) == {}
        job = api.find(f"{JOBS}/train") or {}
        owner = {"kind": "Job", "name": "train", "uid": job["metadata"]["uid"]}
        api.put(f"{CORE}/pods", {"metadata": {"name": "train-1", "ownerReferences": [owner]}, "spec": {}})
        assert await collect(applier.prune(("chat",), stack="default")) == {"Job/train": "deleted"}
        assert api.find(f"{CORE}/pods/train-1") is None  # a Job that is deleted without a word leaves its pods
        await collect(applier.apply(program_manifests(TRAIN)))
        assert await collect(applier.remove(("train",))) == {"Job/train": "deleted"}
        assert api.find(f"{WORK}/chat") is not None

    play(scenario)


def test_a_job_that_would_change_is_refused_with_the_command_that_ends_it() -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        await collect(applier.apply(program_manifests(TRAIN)))
        before = api.versions()
        with pytest.raises(InvalidInput, match="Jobs cannot be changed") as refused:
            await collect(applier.apply(program_manifests(TRAIN.replace("8GiB", "9GiB"))))
        assert "aimgpu down train --on kubernetes --namespace team" in str(refused.value.hint)
        assert api.versions() == before

    play(scenario)


def test_a_program_that_is_now_always_started_again_leaves_no_job_behind_nor_the_other_way_round() -> None:
    always = TRAIN.replace("gpu:", "restart: always, gpu:")

    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        await collect(applier.apply([*manifests(ONE), *program_manifests(TRAIN)]))
        dry = await collect(applier.apply(program_manifests(always), dry_run=True))
        assert dry == {"Job/train": "deleted", "Deployment/train": "created"}
        assert api.find(f"{JOBS}/train") is not None
        assert await collect(applier.apply(program_manifests(always))) == dry
        assert (api.find(f"{JOBS}/train"), api.find(f"{WORK}/train") is None) == (None, False)
        back = await collect(applier.apply(program_manifests(TRAIN)))
        assert back == {"Deployment/train": "deleted", "Job/train": "created"}
        assert api.find(f"{WORK}/chat") is not None

    play(scenario)


def test_a_user_who_may_see_no_jobs_sees_the_models() -> None:
    async def scenario(api: ApiServer, applier: StackApplier) -> None:
        await collect(applier.apply(manifests(ONE)))
        api.fault = lambda _method, path: 403 if path == JOBS else None
        assert [one["metadata"]["name"] for one in await applier.models()] == ["chat"]
        assert "Deployment/chat" in await collect(applier.remove(("chat",)))

    play(scenario)


def test_the_status_of_a_program_is_that_of_its_pods_and_then_of_its_job() -> None:
    terminated = {"name": "program", "state": {"terminated": {"exitCode": 3, "reason": "Error", "message": "no such file"}}}
    pods: list[tuple[dict[str, Any], str, str | None]] = [
        ({"conditions": [{"type": "Ready", "status": "True"}]}, "ready", None),
        ({"phase": "Succeeded", "conditions": [{"type": "Ready", "status": "False"}]}, "ended", None),
        ({"phase": "Failed", "containerStatuses": [terminated]}, "failed", "Error: no such file (it ended with status 3)"),
    ]
    jobs = {"Complete": "ended", "Failed": "failed"}

    async def main() -> None:
        async with serving() as (api, client):
            await collect(StackApplier(client, "team").apply(program_manifests(TRAIN)))
            metadata = {"name": "train-1", "labels": {"aim.amd.com/program": "train"}}
            for status, state, reason in pods:
                api.put(f"{CORE}/pods", {"metadata": metadata, "spec": {"containers": [{"name": "program"}]}, "status": status})
                (row,) = (await view_of(client).read_status())["instances"]
                assert (row["name"], row["id"], row["engine"], row["kind"]) == ("train", "train-1", "program", "Job")
                assert (row["state"], row["reason"]) == (state, reason)
            api.logs["train-1"] = "epoch 1"
            assert [one async for one in view_of(client).read_logs("train", lines=5, follow=False)] == [("train-1", "epoch 1")]
            api.remove(f"{CORE}/pods/train-1")
            for kind, state in jobs.items():
                status = {"conditions": [{"type": kind, "status": "True", "message": "why"}]}
                api.patch(f"{JOBS}/train", {"status": status})
                (row,) = (await view_of(client).read_status())["instances"]
                assert (row["id"], row["state"], row["reason"]) == (None, state, "why")

    asyncio.run(main())


def test_the_status_of_models_says_why_one_does_not_run() -> None:
    waiting = {"name": "engine", "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}}
    ended = {**waiting, "lastState": {"terminated": {"exitCode": 137}}}
    printed = {
        **waiting,
        "lastState": {"terminated": {"exitCode": 8, "message": "error: cannot fetch it\nCheck the network.\n"}},
    }
    rows: list[tuple[dict[str, Any], str, str | None]] = [
        ({"conditions": [{"type": "Ready", "status": "True"}]}, "ready", None),
        ({"containerStatuses": [ended]}, "failed", "CrashLoopBackOff: back-off (it ended with status 137)"),
        (
            {"containerStatuses": [printed]},
            "failed",
            "CrashLoopBackOff: error: cannot fetch it Check the network. (it ended with status 8)",
        ),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "message": "no GPU"}]}, "queued", "no GPU"),
        ({"phase": "Failed", "reason": "Evicted"}, "failed", "Evicted"),
        ({"phase": "Pending"}, "loading", None),
    ]

    async def main() -> None:
        async with serving() as (api, client):
            await collect(StackApplier(client, "team").apply(manifests(ONE)))
            (none,) = (await view_of(client).read_status())["instances"]
            assert (none["state"], none["reason"]) == ("queued", "its pods are being made")
            for status, state, reason in rows:
                add_pod(api, "chat-1", **status)
                (row,) = (await view_of(client).read_status())["instances"]
                assert (row["state"], row["reason"]) == (state, reason)
                api.remove(f"{CORE}/pods/chat-1")
            api.patch(f"{WORK}/chat", {"spec": {"replicas": 0}})
            (asleep,) = (await view_of(client).read_status())["instances"]
            assert asleep["state"] == "sleeping"

    asyncio.run(main())


def test_scores_need_a_gateway_that_answers() -> None:
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "aim-gpu-sharing"}

    async def main() -> None:
        async with serving() as (api, client):
            with pytest.raises(ClusterFailed, match="no gateway of AIM GPU Sharing answers"):
                await view_of(client).read_scores()
            metadata = {"name": "gw", "labels": labels}
            api.put("/api/v1/namespaces/system/pods", {"metadata": metadata, "spec": {}, "status": {"podIP": "10.0.0.1"}})
            api.fault = lambda _method, path: 503 if "proxy" in path else None
            with pytest.raises(ClusterFailed, match="refused by the test"):
                await view_of(client).read_scores()
            assert len(await view_of(client).gateways()) == 1
            api.patch("/api/v1/namespaces/system/pods/gw", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
            assert await view_of(client).gateways() == []

    asyncio.run(main())


def test_the_installed_image_is_that_of_the_one_gateway() -> None:
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "aim-gpu-sharing"}

    async def main() -> None:
        async with serving() as (api, client):
            assert await find_installed_image(client) is None
            for number, image in enumerate(("own:1", "own:1", "own:2")):
                spec = {"template": {"spec": {"containers": [{"image": image}]}}}
                api.put(
                    f"/apis/apps/v1/namespaces/s{number}/deployments",
                    {"metadata": {"name": "gw", "labels": labels}, "spec": spec},
                )
                assert await find_installed_image(client) == ("own:1" if number < 2 else None)
            api.fault = lambda _method, _path: 403
            assert await find_installed_image(client) is None

    asyncio.run(main())


def test_the_media_domains_are_those_that_the_one_gateway_is_told() -> None:
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "aim-gpu-sharing"}

    async def main() -> None:
        async with serving() as (api, client):
            assert await find_media_domains(client) == ""
            told = {"image": "own:1", "env": [{"name": "AIMGPU_MEDIA_DOMAINS", "value": "a.example"}, {"name": "POD_NAME"}]}
            for namespace, container, domains in (("s0", told, "a.example"), ("s1", {"image": "own:1"}, "")):
                spec = {"template": {"spec": {"containers": [container]}}}
                path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
                api.put(path, {"metadata": {"name": "gw", "labels": labels}, "spec": spec})
                assert await find_media_domains(client) == domains
            api.fault = lambda _method, _path: 403
            assert await find_media_domains(client) == ""

    asyncio.run(main())
