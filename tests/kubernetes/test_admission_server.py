"""The admission server over HTTP, as the API server asks it: templates, dry runs, refusals, what is no review."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from tests.kubernetes.api_server import ApiServer, serving, until

from aimgpu.kubernetes.cluster.admission.options import AdmissionOptions
from aimgpu.kubernetes.cluster.admission.server import AdmissionServer
from aimgpu.kubernetes.vocabulary.names import UNUSED_SINCE

DRA = "/apis/resource.k8s.io/v1"
TEMPLATES = f"{DRA}/namespaces/team/resourceclaimtemplates"
Ask = Callable[..., Awaitable[dict[str, Any]]]


def pod(**annotations: str) -> dict[str, Any]:
    metadata = {"name": "p", "annotations": {key.replace("_", "-"): value for key, value in annotations.items()}}
    return {"metadata": metadata, "spec": {"containers": [{"name": "main", "image": "x"}]}}


def play(
    scenario: Callable[[ApiServer, AdmissionServer, Ask], Awaitable[None]],
    options: AdmissionOptions | None = None,
    absent: tuple[str, ...] = (),
) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            api.absent |= set(absent)
            server = AdmissionServer(client, options or AdmissionOptions(namespace="system"))
            following = asyncio.ensure_future(server.follow_cluster())
            async with TestServer(server.application()) as http, aiohttp.ClientSession() as session:

                async def ask(item: dict[str, Any], path: str = "/mutate/pods", **more: Any) -> dict[str, Any]:
                    review = {"request": {"uid": "1", "namespace": "team", "object": item, **more}}
                    async with session.post(http.make_url(path), json=review) as response:
                        answer: dict[str, Any] = (await response.json())["response"]
                        return answer

                async def ready() -> int:
                    async with session.get(http.make_url("/readyz")) as response:
                        return response.status

                async with asyncio.timeout(300):
                    while await ready() != 200:  # noqa: ASYNC110 - asked over HTTP
                        await asyncio.sleep(0.005)
                await scenario(api, server, ask)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())


def patches(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(base64.b64decode(answer["patch"])) if "patch" in answer else []
    return found


async def ask_until(ask: Ask, holds: Callable[[], bool]) -> None:
    """One pod after another, each of which is admitted."""
    async with asyncio.timeout(300):
        while not holds():
            assert (await ask(pod(gpu_memory="4096")))["allowed"]


def templates(api: ApiServer) -> dict[str, dict[str, Any]]:
    return {place[2]: item for place, item in api.store.objects.items() if place[0] == "resourceclaimtemplates"}


def test_equal_pods_share_a_template_that_is_made_once() -> None:
    async def scenario(api: ApiServer, _server: AdmissionServer, ask: Ask) -> None:
        first = await ask(pod(gpu_memory="4096"))
        assert first["allowed"]
        (name,) = templates(api)
        assert any(one["value"] == [{"name": "aim-gpu", "resourceClaimTemplateName": name}] for one in patches(first))
        writes = len(api.writes)
        for _ in range(3):
            assert patches(await ask(pod(gpu_memory="4096"))) == patches(first)
        assert len(api.writes) == writes
        await ask(pod(gpu_memory="8192"))
        assert len(templates(api)) == 2

    play(scenario)


def test_a_template_that_somebody_made_first_with_another_content_is_not_used() -> None:
    """Its spec cannot change: the API server refuses ours beside another, and takes it where it is the same."""

    async def scenario(api: ApiServer, server: AdmissionServer, ask: Ask) -> None:
        await ask(pod(gpu_memory="4096"))
        ((name, made),) = templates(api).items()
        wanted = made["spec"]
        api.remove(f"{TEMPLATES}/{name}")
        api.store.objects["resourceclaimtemplates", "team", name] = {**made, "spec": {"spec": {"devices": {"forged": True}}}}
        server._known_templates.clear()
        api.fault = lambda method, path: 422 if method == "PUT" and path.endswith(name) else None
        refused = await ask(pod(gpu_memory="4096"))
        assert not refused["allowed"]
        assert "another content than its name says" in refused["status"]["message"]
        api.fault = lambda _method, _path: None
        assert (await ask(pod(gpu_memory="4096")))["allowed"]
        assert templates(api)[name]["spec"] == wanted, "the API server took ours"

    play(scenario)


def test_a_dry_run_makes_nothing() -> None:
    async def scenario(api: ApiServer, _server: AdmissionServer, ask: Ask) -> None:
        answer = await ask(pod(gpu_memory="4096"), dryRun=True)
        assert answer["allowed"]
        assert patches(answer)
        assert templates(api) == {}

    play(scenario)


def test_a_template_that_was_removed_or_is_about_to_be_is_there_for_the_next_pod() -> None:
    async def scenario(api: ApiServer, _server: AdmissionServer, ask: Ask) -> None:
        await ask(pod(gpu_memory="4096"))
        (name,) = templates(api)
        api.remove(f"{TEMPLATES}/{name}")
        await ask_until(ask, lambda: name in templates(api))  # as soon as the watch has reported it
        api.patch(f"{TEMPLATES}/{name}", {"metadata": {"annotations": {UNUSED_SINCE: "2026-01-01T00:00:00Z"}}})

        def marked() -> bool:
            return UNUSED_SINCE in (templates(api)[name]["metadata"].get("annotations") or {})

        await ask_until(ask, lambda: not marked())

    play(scenario)


def test_a_template_that_goes_in_the_moment_of_its_second_use_is_made_again() -> None:
    async def scenario(api: ApiServer, _server: AdmissionServer, ask: Ask) -> None:
        await ask(pod(gpu_memory="4096"))
        (name,) = templates(api)
        api.patch(f"{TEMPLATES}/{name}", {"metadata": {"annotations": {UNUSED_SINCE: "2026-01-01T00:00:00Z"}}})

        def remove(method: str, path: str) -> None:
            if method == "PUT" and path.endswith(name):
                api.fault = lambda _method, _path: None
                api.remove(f"{TEMPLATES}/{name}")

        api.fault = remove
        await ask_until(ask, lambda: UNUSED_SINCE not in (templates(api)[name]["metadata"].get("annotations") or {}))

    play(scenario)


def test_an_api_server_that_makes_no_template_has_the_pod_refused() -> None:
    async def scenario(api: ApiServer, _server: AdmissionServer, ask: Ask) -> None:
        api.fault = lambda method, _path: 403 if method == "POST" else None
        answer = await ask(pod(gpu_memory="4096"))
        assert not answer["allowed"]
        assert "refused by the test" in answer["status"]["message"]
        api.fault = lambda _method, _path: None
        assert (await ask(pod(gpu_memory="4096")))["allowed"]

    play(scenario)


def test_fractions_follow_the_gpus_that_are_published() -> None:
    async def scenario(api: ApiServer, server: AdmissionServer, ask: Ask) -> None:
        refused = await ask(pod(gpu_fraction="0.5"))
        assert not refused["allowed"]
        assert "no GPU that can be shared" in refused["status"]["message"]
        attributes = {"type": {"string": "shared"}, "current": {"bool": True}, "productName": {"string": "MI300X"}}
        device = {"name": "g", "attributes": attributes, "capacity": {"memory": {"value": "192Gi"}}}
        api.put(
            f"{DRA}/resourceslices", {"metadata": {"name": "s"}, "spec": {"driver": "gpu.aim.amd.com", "devices": [device]}}
        )
        gpus = server._gpus
        await until(lambda: bool(gpus.shared_products(None, None, kai=False)))
        assert (await ask(pod(gpu_fraction="0.5")))["allowed"]
        (made,) = templates(api).values()
        request = made["spec"]["spec"]["devices"]["requests"][0]["exactly"]
        assert request["capacity"]["requests"]["memory"] == "96Gi"
        api.remove(f"{DRA}/resourceslices/s")
        await until(lambda: not gpus.shared_products(None, None, kai=False))
        assert not (await ask(pod(gpu_fraction="0.25")))["allowed"]

    play(scenario)


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("/validate/inferenceservices", {"predictor": {"model": {"modelFormat": {"name": "vLLM"}}}}),
        ("/validate/llminferenceservices", {"model": {"uri": "hf://Qwen/Qwen2.5-7B-Instruct"}}),
    ],
)
def test_bad_values_on_services_are_refused_when_they_are_made(path: str, spec: dict[str, Any]) -> None:
    async def scenario(_api: ApiServer, _server: AdmissionServer, ask: Ask) -> None:
        for value, allowed in (("0.5", True), ("1.5", False), ("0", False), ("half", False)):
            service = {"metadata": {"name": "s", "annotations": {"gpu-fraction": value}}, "spec": spec}
            answer = await ask(service, path)
            assert answer["allowed"] == allowed, value
            if not allowed:
                assert "gpu-fraction" in answer["status"]["message"]

    play(scenario)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"request": {}}', b'{"request": null}', b"\xff"])
@pytest.mark.parametrize("path", ["/mutate/pods", "/validate/inferenceservices"])
def test_what_is_no_review_is_refused_as_such(path: str, body: bytes) -> None:
    async def main() -> int:
        async with serving() as (_, client):
            server = AdmissionServer(client, AdmissionOptions(namespace="system"))
            async with TestServer(server.application()) as http, aiohttp.ClientSession() as session:
                headers = {"Content-Type": "application/json"}
                async with session.post(http.make_url(path), data=body, headers=headers) as response:
                    return response.status

    assert asyncio.run(main()) == 400


def test_models_of_the_administrators_own_file_are_known(tmp_path: Path) -> None:
    rows = tmp_path / "models.csv"
    rows.write_text("id,parameters\nours/secret-13b,13000000000\n")
    sharing = {"aim.amd.com/gpu-sharing": "true", "aim.amd.com/model": "ours/secret-13b"}
    item = {"metadata": {"name": "p", "annotations": sharing}, "spec": {"containers": [{"name": "main", "image": "x"}]}}

    async def scenario(api: ApiServer, _server: AdmissionServer, ask: Ask) -> None:
        answer = await ask(item)
        assert answer["allowed"], answer
        (made,) = templates(api).values()
        assert made["spec"]["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["memory"]

    play(scenario, AdmissionOptions(namespace="system", catalogue=rows))


def test_on_a_server_without_claims_a_pod_gets_a_limit_of_what_the_device_plugin_offers() -> None:
    offer = {"name": "amd.com/gpu", "replicas": 4, "memoryBytes": 48 << 30, "partitionBytes": 192 << 30, "shared": True}

    async def scenario(api: ApiServer, _server: AdmissionServer, ask: Ask) -> None:
        assert not (await ask(pod(gpu_fraction="0.25")))["allowed"]  # nothing is known that it could be a fraction of
        api.put("/apis/aim.amd.com/v1alpha1/gpunodes", {"metadata": {"name": "n1"}, "status": {"resources": [offer]}})
        async with asyncio.timeout(300):
            while not (admitted := await ask(pod(gpu_fraction="0.25")))["allowed"]:  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.005)
        assert {"limits": {"amd.com/gpu": "1"}} in [one["value"] for one in patches(admitted)]
        assert not api.writes
        refused = await ask(pod(gpu_fraction="0.5"))
        assert "49152 MiB and 98304 MiB are asked for" in refused["status"]["message"]

    play(scenario, absent=("resource.k8s.io/v1",))
